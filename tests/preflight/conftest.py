"""A node made of a file tree and recorded output of commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.findings import Finding
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.protocol.node_requirements import NodeRequirements

MakeNode = Callable[..., NodeView]


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    """Make a node of files (path: text), commands (first words: output), and fields of the view or the requirements."""

    def make(
        files: Mapping[str, str] | None = None, commands: Mapping[str, str | Exception] | None = None, **fields: Any
    ) -> NodeView:
        for path, text in (files or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

        def run(argv: Sequence[str], timeout_s: float) -> str:
            line = " ".join(argv)
            found = next((out for words, out in (commands or {}).items() if line.startswith(words)), None)
            if found is None:
                raise NotLookedAt(f"there is no program `{argv[0]}`")
            if isinstance(found, Exception):
                raise found
            return found

        of_view = {name: fields.pop(name) for name in ("environ", "address") if name in fields}
        return NodeView(wanted=NodeRequirements(**fields), root=tmp_path, run=run, **of_view)

    return make


def codes(found: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in found]
