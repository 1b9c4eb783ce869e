"""Owns what of a run can be broken on purpose: one row for each action and target, and the check of what is asked.

Who carries a row out, and how, is not told here: agents in agent/drills.py, the controller's side in
launch/local/drills.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import DrillAction, DrillRequested, DrillTarget
from holdfast.job.accepted import Accepted
from holdfast.job.isolation import Isolation


class Doer(StrEnum):
    """Who carries a drill out."""

    AGENT = "agent"
    """The agent of the target's node, also once it has come back from being away."""
    CONTROLLER = "controller"
    """The controller, or the place it runs in."""
    PLACE = "place"
    """The place that nodes come from."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What not every run has; its words know the `run`'s id and how it was `accepted`."""

    field: str
    """Of a profile or a job."""
    what: str
    met: Callable[[Accepted], bool]
    where: str
    """Where it is said that a run has it."""
    evidence: str
    """What a run has that does not."""
    remedy: str


APART = Need(
    field="isolation: netns",
    what="nodes that are kept apart by `netns`",
    met=lambda accepted: accepted.isolation is Isolation.NETNS,
    where="profile {accepted.profile}",
    evidence="the nodes of {run} are kept apart by `{accepted.isolation}`",
    remedy="Start the run with a profile that has `isolation: netns`.",
)
LIMITED = Need(
    field="resources.memory",
    what="nodes that are held to a limit, or it would take the whole machine's",
    met=lambda accepted: accepted.job.resources.memory is not None,
    where="resources.memory",
    evidence="the job of {run} asks for no `resources.memory`",
    remedy="Start the run with such as `--set resources.memory=4GiB`.",
)
SEVERAL = Need(
    field="recovery.replicas",
    what="a run of several replicas, which alone has one",
    met=lambda accepted: accepted.job.recovery.replicas > 1,
    where="recovery.replicas",
    evidence="the job of {run} has one replica",
    remedy="Start the run with such as `--set recovery.replicas=2`.",
)


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What one action does to one target."""

    does: str
    """What happens, and what should follow, in a line for the reference."""
    by: Doer = Doer.AGENT
    lasting: bool = False
    """Whether it can end by itself (`--for`); else it is for good."""
    unit: str = ""
    """What `--by` counts, for a drill that must be told how much."""
    needs: Need | None = None
    """What a run must have for it."""


_KILL, _STOP, _PARTITION, _SKEW = DrillAction.KILL, DrillAction.STOP, DrillAction.PARTITION, DrillAction.SKEW
_LOSE, _RETURN, _FILL, _EXHAUST = DrillAction.LOSE, DrillAction.RETURN, DrillAction.FILL, DrillAction.EXHAUST
_RANK, _NODE, _AGENT, _CONTROLLER = DrillTarget.RANK, DrillTarget.NODE, DrillTarget.AGENT, DrillTarget.CONTROLLER
_RAISE, _HANG, _SLOW = DrillAction.RAISE, DrillAction.HANG, DrillAction.SLOW
_QUORUM, _COLLECTIVE = DrillTarget.QUORUM, DrillTarget.COLLECTIVE
_RUN_FOLDER, _CHECKPOINTS, _MEMORY = DrillTarget.RUN_FOLDER, DrillTarget.CHECKPOINTS, DrillTarget.MEMORY

DRILLS: Mapping[tuple[DrillAction, DrillTarget], Drill] = {
    (_KILL, _RANK): Drill(
        does="SIGKILL to its process: all ranks restart, from the last checkpoint where there is one."
    ),
    (_KILL, _NODE): Drill(does="SIGKILL to all of it at once, agent included: it is replaced."),
    (_KILL, _AGENT): Drill(does="SIGKILL to the agent; its ranks die with it, and the node is replaced."),
    (_KILL, _CONTROLLER): Drill(does="SIGKILL: it comes back and no rank restarts.", by=Doer.CONTROLLER),
    (_LOSE, _NODE): Drill(
        does="As kill, and its machine is out of use: it is replaced if there is a spare, else the job shrinks."
    ),
    (_RETURN, _NODE): Drill(does="Its machine is of use again: what misses a node gets it.", by=Doer.PLACE),
    (_STOP, _RANK): Drill(does="SIGSTOP to its process: a hang, which `recovery.step_deadline_s` finds.", lasting=True),
    (_STOP, _NODE): Drill(does="SIGSTOP to all of it: out of reach, with its connections open.", lasting=True),
    (_STOP, _AGENT): Drill(does="SIGSTOP to the agent alone: its ranks go on without it.", lasting=True),
    (_STOP, _CONTROLLER): Drill(
        does="SIGSTOP: it is replaced after fifteen silent seconds and no rank restarts.",
        by=Doer.CONTROLLER,
        lasting=True,
    ),
    (_PARTITION, _NODE): Drill(
        does="Nothing leaves the node's network and nothing arrives; no connection is closed.",
        by=Doer.CONTROLLER,
        lasting=True,
        needs=APART,
    ),
    (_SKEW, _AGENT): Drill(does="Its wall clock jumps: told as `clock-jumped`, and nothing else.", unit="seconds"),
    (_SKEW, _CONTROLLER): Drill(
        does="Its wall clock jumps: told as `clock-jumped`, and nothing else.", by=Doer.CONTROLLER, unit="seconds"
    ),
    (_FILL, _RUN_FOLDER): Drill(
        does="Its disk is full, if it is a small one: ranks go on, the log lives on its reserve, then the run waits.",
        by=Doer.CONTROLLER,
        lasting=True,
    ),
    (_FILL, _CHECKPOINTS): Drill(
        does="Their disk is full, if it is a small one: the next is given up, the older ones stay.",
        by=Doer.CONTROLLER,
        lasting=True,
    ),
    (_EXHAUST, _MEMORY): Drill(
        does="Its memory is taken: told as `memory-pressure`, then the kernel ends a rank and all restart.",
        needs=LIMITED,
    ),
    (_RAISE, _RANK): Drill(does="Its Session raises an error at the end of a step: all ranks restart."),
    (_HANG, _RANK): Drill(
        does="It goes to sleep at the end of a step, in its own code: `recovery.step_deadline_s` finds it."
    ),
    (_HANG, _COLLECTIVE): Drill(does="It enters an all-reduce that no other rank enters: the same, as it looks there."),
    (_SLOW, _NODE): Drill(
        does="Its ranks stand still most of the time: told as nothing, and nothing restarts.",
        unit="times",
        lasting=True,
    ),
    (_KILL, _QUORUM): Drill(
        does="SIGKILL: it comes back at its port, no rank restarts; replicas wait for it where they have to meet.",
        by=Doer.CONTROLLER,
        needs=SEVERAL,
    ),
    (_STOP, _QUORUM): Drill(
        does="SIGSTOP: it is replaced after five silent seconds, no rank restarts; replicas wait where they meet.",
        by=Doer.CONTROLLER,
        lasting=True,
        needs=SEVERAL,
    ),
}


def check(asked: DrillRequested, accepted: Accepted, run: str) -> None:
    """Raise when a run has no such target, or when what is asked cannot be done to it."""
    drill = DRILLS.get((asked.action, asked.target))
    if drill is None:
        raise _unusable(
            f"nothing is known that a {asked.action} of a {asked.target} would be",
            f"`{asked.action}` takes {_either(target for action, target in DRILLS if action is asked.action)}; "
            f"a {asked.target} takes {_either(action for action, target in DRILLS if target is asked.target)}.",
        )
    if asked.for_s is not None and not drill.lasting:
        lasting = sorted({action for (action, _), row in DRILLS.items() if row.lasting})
        raise _unusable(
            f"a {asked.action} is for good, so it cannot last {asked.for_s:g} s",
            f"`--for` goes with {_either(lasting)}.",
        )
    if (asked.amount is None) is not (drill.unit == ""):
        what = f"a {asked.action} is told by how many {drill.unit}" if drill.unit else f"a {asked.action} has no amount"
        raise _unusable(what, "Add `--by AMOUNT`." if drill.unit else "Leave `--by` out.")
    if asked.at_step is not None and drill.by is Doer.PLACE:
        raise _unusable(f"a {asked.action} waits for no step", "Leave out `--at-step`.")
    if drill.needs is not None and not drill.needs.met(accepted):
        raise _unavailable(asked, drill.needs, accepted, run)
    job = accepted.job
    if asked.action is _SLOW and (asked.amount or 0) < 1:
        raise _unusable(f"nothing is {asked.amount:g} times as slow", "Say such as `--by 3`.")
    known = 1 if not asked.target.numbered else job.world_size if asked.target.of_rank else job.node_slots
    if not 0 <= asked.index < known:
        raise failure(
            "no-such-target",
            f"{run} has no {asked.target} {asked.index}",
            exit_code=ExitCode.NOT_FOUND,
            remedy=f"It has {asked.target}s 0 to {known - 1}.",
        )


def _unavailable(asked: DrillRequested, need: Need, accepted: Accepted, run: str) -> HoldfastError:
    return failure(
        "drill-unavailable",
        f"{asked.action} {asked.target} needs {need.what}",
        exit_code=ExitCode.IMPOSSIBLE,
        where=need.where.format(accepted=accepted),
        evidence=(need.evidence.format(accepted=accepted, run=run),),
        remedy=need.remedy,
    )


def _unusable(what: str, remedy: str) -> HoldfastError:
    return failure("bad-drill", what, exit_code=ExitCode.USAGE, remedy=remedy)


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in dict.fromkeys(names))
