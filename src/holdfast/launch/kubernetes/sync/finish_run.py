"""Owns how a run is ended where no controller would: how that is asked for and answered, and what its log says."""

from __future__ import annotations

import time

from holdfast.events import CancelRequested, Outcome, RunFinished, ShutdownDecided
from holdfast.events.log import EventWriter, last_event
from holdfast.protocol.routes import REQUEST_ROUTES
from holdfast.run_dir import RunDir

CANCEL_REQUEST = f"POST {REQUEST_ROUTES[CancelRequested]} ".encode()
"""How a request for the run's end begins."""
OK_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def finish_run(folder: RunDir, outcome: Outcome, reason: str, exit_code: int) -> None:
    """End a run's log, once; one that was never begun is begun first."""
    from holdfast.job.run_spec import RunSpec  # its models take a mirror longest to import

    last, at = last_event(folder.events), time.time()
    if isinstance(last, RunFinished):
        return
    writer = EventWriter(folder.events)
    writer.append(
        (
            *(() if last else (RunSpec.read(folder.job).created_event(folder.run_id),)),
            ShutdownDecided(at=at, outcome=outcome, reason=reason, exit_code=exit_code),
            RunFinished(at=at, outcome=outcome, reason=reason, exit_code=exit_code),
        ),
        sync=True,
    )
    writer.close()
