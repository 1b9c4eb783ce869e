"""Owns how a run is ended where no controller would: how that is asked for and answered, and what its log says."""

from __future__ import annotations

import time

from holdfast.events import CancelRequested, Outcome, RunFinished, StopDecided
from holdfast.events.log import EventWriter, last_event
from holdfast.events.paths import REQUESTS
from holdfast.folder import RunFolder

CANCEL = f"POST {REQUESTS[CancelRequested]} ".encode()
"""How a request for the run's end begins."""
OBEYED = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def conclude(folder: RunFolder, outcome: Outcome, why: str, exit_code: int) -> None:
    """End a run's log, once; one that was never begun is begun first."""
    from holdfast.job.accepted import Accepted  # its models take a mirror longest to import

    last, at = last_event(folder.events), time.time()
    if isinstance(last, RunFinished):
        return
    writer = EventWriter(folder.events)
    writer.append(
        (
            *(() if last else (Accepted.read(folder.job).created(folder.run),)),
            StopDecided(at=at, outcome=outcome, reason=why, exit_code=exit_code),
            RunFinished(at=at, outcome=outcome, reason=why, exit_code=exit_code),
        ),
        sync=True,
    )
    writer.close()
