"""Runs a program with a lab, for as long as a test or a bench needs it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path

from holdfast.host import processes
from lab.lab import Lab
from lab.runner import MARK


@contextlib.contextmanager
def extra_program(
    lab: Lab, name: str, *argv: str | Path, environ: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """Run a program as the lab's administrator; its output is in the lab's `log/NAME.log`."""
    with (lab.folder / "log" / f"{name}.log").open("ab") as output:
        program = subprocess.Popen(
            argv,
            env={**os.environ, MARK: str(lab.folder), "KUBECONFIG": str(lab.kubeconfig), **(environ or {})},
            cwd=lab.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,  # noqa: PLW1509 it makes one system call
        )
    try:
        yield program
    finally:
        program.kill()
        program.wait()
