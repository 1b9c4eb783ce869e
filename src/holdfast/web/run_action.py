"""What a reader of the live page may do to a run, if the page was started for that."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from holdfast.run_dir import RunDir


class RunAction(Struct, frozen=True, kw_only=True):
    """One action: a button of the page."""

    name: str
    """Its path, such as `cancel`."""
    label: str
    """Text of the button."""
    effect: str
    """What will happen; the page shows it before it asks for confirmation."""
    perform: Callable[[RunDir, str], str]
    """Do it, and tell what was done; raises HoldfastError."""
    argument: str = ""
    """Label of the text that it needs; empty if it needs none."""
    example: str = ""
    """Such a text."""
