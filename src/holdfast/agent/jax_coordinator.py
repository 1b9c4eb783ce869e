"""Tells whether a JAX program takes its coordinator's address from the environment, as its source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.agent.python_script import parse_script


def bind_address_env(argv: Sequence[str], cwd: Path, address: str) -> dict[str, str]:
    """Where the coordinator may listen, as a variable: at its address only, rather than at every one of the machine.

    JAX obeys JAX_COORDINATOR_BIND_ADDRESS even if the program names another coordinator; it would then listen where
    nobody looks for it. So it is only set where every call in the script leaves the address to the environment.
    """
    return {"JAX_COORDINATOR_BIND_ADDRESS": address} if address and _leaves_address_open(argv, cwd) else {}


def _leaves_address_open(argv: Sequence[str], cwd: Path) -> bool:
    found = parse_script(argv, cwd, b"jax", b"initialize")
    calls = list(_calls(found)) if found is not None else []
    return bool(calls) and not any(map(_names_address, calls))


def _calls(found: ast.AST) -> Iterator[ast.Call]:
    """Calls of `jax.distributed.initialize`; one by its last name alone may be of anything."""
    for node in ast.walk(found):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("distributed.initialize"):
            yield node


def _names_address(call: ast.Call) -> bool:
    """Whether a call names an address, or may do so by words that are not seen here (`*args`, `**options`)."""
    return bool(call.args) or any(
        keyword.arg in (None, "coordinator_address", "coordinator_bind_address") for keyword in call.keywords
    )
