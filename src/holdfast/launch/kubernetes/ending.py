"""Owns how a run's log here is ended where nobody else would."""

from __future__ import annotations

import time

from holdfast.events import Outcome, RunFinished, StopDecided
from holdfast.events.log import EventWriter, last_event
from holdfast.folder import RunFolder


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
