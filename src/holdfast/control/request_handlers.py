"""Handles user requests: cancel, checkpoint, step profile, stack dump."""

from __future__ import annotations

from dataclasses import replace

from holdfast.control.commands import DumpStacks, ProfileSteps, TakeCheckpoint
from holdfast.control.lifecycle import end_run
from holdfast.control.state import Ending, State, Transition
from holdfast.errors import ExitCode
from holdfast.events import CancelRequested, CheckpointRequested, Outcome, ProfileRequested, StackDumpRequested
from holdfast.job.spec import Job


def cancel(job: Job, state: State, event: CancelRequested) -> Transition:
    """Cancel the run; a second request with `force` removes its grace period."""
    if state.ending and not event.force:
        return state, ()
    grace_s = 0.0 if event.force else job.recovery.stop_grace_s
    asked = Ending(outcome=Outcome.CANCELLED, exit_code=ExitCode.CANCELLED, reason="cancelled on request")
    return end_run(job, state, replace(state.ending or asked, grace_s=grace_s), event.at)


def checkpoint(job: Job, state: State, event: CheckpointRequested) -> Transition:
    """Request a checkpoint from every rank."""
    return state, (TakeCheckpoint(),)


def profile(job: Job, state: State, event: ProfileRequested) -> Transition:
    """Request a step profile from every rank."""
    return state, (ProfileSteps(),)


def dump_stacks(job: Job, state: State, event: StackDumpRequested) -> Transition:
    """Request the stacks of every rank."""
    return state, (DumpStacks(),)
