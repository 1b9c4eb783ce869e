"""Replaces `torch._dynamo`, which an eager program never uses, but every optimizer imports for 2 s of CPU time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class OptimizedModule:
    """What `torch.compile` makes of a module: there is none."""


class _EvalFrame:
    OptimizedModule = OptimizedModule


class _Dynamo(ModuleType):
    """What optimizers and `torch.distributed.checkpoint` use of it in eager mode."""

    eval_frame = _EvalFrame

    @staticmethod
    def graph_break() -> None:
        """Do nothing: no graph is being recorded."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """The function itself: it is not being compiled."""
        return function


if "torch._dynamo" not in sys.modules:  # a prewarmed process has the real one
    import torch

    torch._dynamo = sys.modules["torch._dynamo"] = _Dynamo("torch._dynamo")  # pyright: ignore[reportAttributeAccessIssue]
