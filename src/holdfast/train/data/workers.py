"""Data worker processes: their lifetime is tied to their rank, and their errors reach it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner
from holdfast.train.torch_private import unmark_worker

PR_SET_PDEATHSIG = 1


def init_worker(_number: int) -> None:
    """Initialise a worker: signals to the rank's process group do not reach it, and it dies with the rank.

    A rank that gets SIGTERM finishes its step and saves; torch would fail it if its worker got SIGTERM as well.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def init_only_worker(number: int) -> None:
    """Initialise the only reader of a stream so that it yields the same as in the rank's own process.

    A stream in a worker may read only its share of the shards or, as `datasets` does, shuffle differently.
    """
    init_worker(number)
    unmark_worker()


@dataclass(frozen=True)
class WorkerFailure:
    """Sent in place of data: torch only forwards exceptions that are constructed from one string."""

    findings: tuple[Finding, ...]
    exit_code: ExitCode


def reraise_failures(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the workers' items, or raise the error that a worker met."""
    try:
        for one in loader:
            if isinstance(one, WorkerFailure):
                raise HoldfastError(one.findings, one.exit_code)
            yield one
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise failure(
            "data-worker-lost",
            "a process that reads data ahead has ended",
            exit_code=ExitCode.UNAVAILABLE,
            evidence=(str(error),),
            remedy="most often memory ran out: give Data fewer workers, or the node more memory",
            owner=Owner.CLUSTER,
        ) from error
