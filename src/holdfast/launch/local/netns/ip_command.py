"""Runs `ip`, `tc` and similar programs, and reports their failures."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner


def find(name: str) -> str | None:
    """Path of a program; on Debian an ordinary user's PATH lacks the sbin folders, which have `tc`."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


def try_run(argv: Sequence[str], batch: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program with the batch's lines as its input; a failure raises nothing."""
    return subprocess.run(argv, input="\n".join(batch), capture_output=True, text=True, check=False)


def run(argv: Sequence[str], batch: Sequence[str] = ()) -> str:
    """Run a program and return its output; raises an error that quotes the command, its input and its stderr."""
    done = try_run(argv, batch)
    if done.returncode == 0:
        return done.stdout
    raise failure(
        "netns-command-failed",
        f"`{shlex.join(argv)}` failed with exit status {done.returncode}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        evidence=(*batch, *done.stderr.splitlines()),
        remedy="Use `isolation: process`, or see in the quoted error what the machine lacks.",
        owner=Owner.CLUSTER,
    )


def ip(*batch: str, inside: Sequence[str] = ()) -> None:
    """Run `ip` commands in one process; `inside` is the prefix that enters another namespace."""
    run((*inside, find("ip") or "ip", "-batch", "-"), batch)


def tc(*batch: str, inside: Sequence[str] = ()) -> None:
    """Run `tc` commands in one process; `inside` is the prefix that enters another namespace."""
    run((*inside, find("tc") or "tc", "-batch", "-"), batch)
