"""The command line: parse, call api, print; one small file per verb, all listed in app.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from holdfast.cli.streams import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code, and never shows a traceback."""
    prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"] and any(flag == "--on" and place != "local" for flag, place in pairwise(words)):
        from holdfast.launch.kubernetes.submit.submit_process import prestart

        prestart()  # before all that takes as long to import as its client does
    from holdfast.cli.app import run_command

    return run_command(words)
