"""The command line: each command parses, calls `api` and prints. app.py lists the commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from holdfast.cli.streams import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line without ever showing a traceback; returns the exit code."""
    prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"] and any(flag == "--on" and target != "local" for flag, target in pairwise(words)):
        from holdfast.launch.kubernetes.submit.submit_process import prestart

        prestart()  # first: it starts while the other slow imports run
    from holdfast.cli.app import run_command

    return run_command(words)
