"""The command line: each command parses, calls `api` and prints. app.py lists the commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from holdfast.cli.streams import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line without ever showing a traceback; returns the exit code."""
    prepare()
    words = list(sys.argv[1:] if argv is None else argv)
    rest = (place for place, word in enumerate(words) if word == "--" or word.endswith(".py"))
    own = words[: next(rest, len(words))]  # what follows is the job's command
    targets = [target for flag, target in pairwise(own) if flag == "--on"]
    if words[:1] == ["run"] and not {"--help", "-h"} & {*own}:
        from holdfast.launch.target import LOCAL, prestart

        file = next((word for word in own if word.endswith((".yaml", ".yml"))), "")
        target = targets[-1] if targets else LOCAL
        prestart(target, start=Path(file).parent, environ=os.environ)  # while the other slow imports run
    from holdfast.cli.app import run_command

    return run_command(words)
