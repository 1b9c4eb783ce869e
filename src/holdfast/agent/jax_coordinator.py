"""Detects whether a JAX program takes its coordinator's address from the environment, by parsing its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.agent.python_script import parse_script


def bind_address_env(argv: Sequence[str], cwd: Path, address: str) -> dict[str, str]:
    """Environment that has the coordinator listen on its own address only, instead of on every interface.

    JAX obeys JAX_COORDINATOR_BIND_ADDRESS even if the program names another coordinator, and would then listen on an
    address that no rank connects to. So it is set only if no call in the script passes an address.
    """
    return {"JAX_COORDINATOR_BIND_ADDRESS": address} if address and _leaves_address_open(argv, cwd) else {}


def _leaves_address_open(argv: Sequence[str], cwd: Path) -> bool:
    found = parse_script(argv, cwd, b"jax", b"initialize")
    calls = list(_calls(found)) if found is not None else []
    return bool(calls) and not any(map(_names_address, calls))


def _calls(found: ast.AST) -> Iterator[ast.Call]:
    """Calls of `jax.distributed.initialize`, matched by the last two parts of the name."""
    for node in ast.walk(found):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("distributed.initialize"):
            yield node


def _names_address(call: ast.Call) -> bool:
    """Whether a call passes an address, or may do so by `*args` or `**options`."""
    return bool(call.args) or any(
        keyword.arg in (None, "coordinator_address", "coordinator_bind_address") for keyword in call.keywords
    )
