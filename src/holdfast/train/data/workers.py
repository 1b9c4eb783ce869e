"""Owns the processes that read data ahead: how they live and die with their rank, and how their errors reach it."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data._utils import worker

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding, Owner

PR_SET_PDEATHSIG = 1


def init_worker(_number: int) -> None:
    """Begin as a worker: out of reach of signals that are meant for the rank, and gone as soon as the rank is.

    A rank that gets SIGTERM finishes its step and saves; torch would fail it for the worker that got it as well.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def init_only_worker(number: int) -> None:
    """Begin as the one reader of a stream, which must give the same as it would in the rank's own process.

    A stream that finds itself in a worker may take its share of the shards, or, as those of `datasets` do, shuffle
    otherwise. Torch has no public way to tell it that it is alone.
    """
    init_worker(number)
    worker._worker_info = None  # pyright: ignore[reportPrivateUsage] - see above


@dataclass(frozen=True)
class WorkerFailure:
    """Sent in place of data: torch hands on only exceptions that are made of one string."""

    findings: tuple[Finding, ...]
    exit_code: ExitCode


def reraise_failures(loader: Iterable[Any]) -> Iterator[Any]:
    """What workers make, or the error that one of them came upon."""
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
