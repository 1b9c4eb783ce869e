"""The actions of the live page: those that the command line has for a live run."""

from __future__ import annotations

from holdfast import api
from holdfast.job.fault_file import parse_fault_action, parse_fault_target
from holdfast.report.formatting import short_digest
from holdfast.run_dir import RunDir
from holdfast.web.run_action import RunAction

TIMEOUT_S = 600.0
"""How long the page waits for a checkpoint, or for the first step with new code."""


def page_actions() -> tuple[RunAction, ...]:
    """All actions, in the page's order."""
    return (
        RunAction(
            name="checkpoint",
            label="Save a checkpoint",
            effect="All ranks save a checkpoint at their next step. The run continues.",
            perform=_checkpoint,
        ),
        RunAction(
            name="update",
            label="Update the code",
            effect="The run switches to the code that is in the job's directory now. Nodes stay. Code that fails "
            "within ten steps is rolled back.",
            perform=_update,
        ),
        RunAction(
            name="drill",
            label="Inject a fault",
            effect="The fault is injected into the live run immediately. The run recovers as from a real one.",
            perform=_drill,
            argument="Fault and target",
            example="kill rank:1",
        ),
        RunAction(
            name="cancel",
            label="Cancel the run",
            effect="Its ranks get SIGTERM, and SIGKILL when their grace period is over. Then the run is over.",
            perform=_cancel,
        ),
    )


def _checkpoint(run: RunDir, _: str) -> str:
    taken = api.checkpoint(run, timeout_s=TIMEOUT_S)
    return f"step {taken.step} is saved: {taken.path}"


def _update(run: RunDir, _: str) -> str:
    updated = api.update(run, code=None, after_s=0.0, timeout_s=TIMEOUT_S)
    return f"the run uses code {short_digest(updated.digest)}" if updated.digest else "the run uses the code in place"


def _drill(run: RunDir, fault: str) -> str:
    action, *target = fault.split() or [""]
    what, (victim, index) = parse_fault_action(action), parse_fault_target(target)
    api.inject_fault(run, target=victim, index=index, action=what)
    return f"{fault} is injected"


def _cancel(run: RunDir, _: str) -> str:
    api.cancel(run, requested_by="live page")
    return "the run is stopping"
