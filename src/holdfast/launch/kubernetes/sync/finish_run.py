"""Ends a run that has no controller: the cancel request, its response, and the events in the log."""

from __future__ import annotations

import time

from holdfast.events import CancelRequested, Outcome, RunFinished, ShutdownDecided
from holdfast.events.log import last_event
from holdfast.events.log_writer import EventWriter
from holdfast.protocol.routes import REQUEST_ROUTES
from holdfast.run_dir import RunDir

CANCEL_REQUEST = f"POST {REQUEST_ROUTES[CancelRequested]} ".encode()
"""The start of a cancel request."""
OK_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def finish_run(folder: RunDir, outcome: Outcome, reason: str, exit_code: int) -> None:
    """Append the end of a run to its log, once; an empty log gets its first events before."""
    from holdfast.job.run_spec import RunSpec  # late: its models are the sync process's slowest import

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
