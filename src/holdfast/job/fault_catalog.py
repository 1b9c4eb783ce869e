"""Owns what of a run can be broken on purpose: one row for each action and target, and the check of what is asked.

Who carries a row out, and how, is not told here: agents in agent/fault_injection.py, the controller's side in
launch/local/controller_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.job.isolation import Isolation
from holdfast.job.run_spec import RunSpec


class Executor(StrEnum):
    """Who carries a drill out."""

    AGENT = "agent"
    """The agent of the target's node, also once it has come back from being away."""
    CONTROLLER = "controller"
    """The controller, or the place it runs in."""
    BACKEND = "place"
    """The place that nodes come from."""


@dataclass(frozen=True, kw_only=True)
class Precondition:
    """What not every run has; its words know the `run`'s id and how it was `accepted`."""

    field: str
    """Of a target or a job."""
    what: str
    met: Callable[[RunSpec], bool]
    where: str
    """Where it is said that a run has it."""
    evidence: str
    """What a run has that does not."""
    remedy: str


NEEDS_NETNS = Precondition(
    field="isolation: netns",
    what="nodes that are kept apart by `netns`",
    met=lambda accepted: accepted.isolation is Isolation.NETNS,
    where="target {accepted.target}",
    evidence="the nodes of {run} are kept apart by `{accepted.isolation}`",
    remedy="Start the run with a target that has `isolation: netns`.",
)
NEEDS_MEMORY_LIMIT = Precondition(
    field="resources.memory",
    what="nodes that are held to a limit, or it would take the whole machine's",
    met=lambda accepted: accepted.job.resources.memory is not None,
    where="resources.memory",
    evidence="the job of {run} asks for no `resources.memory`",
    remedy="Start the run with such as `--set resources.memory=4GiB`.",
)
NEEDS_REPLICAS = Precondition(
    field="recovery.replicas",
    what="a run of several replicas, which alone has one",
    met=lambda accepted: accepted.job.recovery.replicas > 1,
    where="recovery.replicas",
    evidence="the job of {run} has one replica",
    remedy="Start the run with such as `--set recovery.replicas=2`.",
)


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """What one action does to one target."""

    description: str
    """What happens, and what should follow, in a line for the reference."""
    executor: Executor = Executor.AGENT
    reversible: bool = False
    """Whether it can end by itself (`--for`); else it is for good."""
    amount_unit: str = ""
    """What `--amount` counts, for a drill that must be told how much."""
    precondition: Precondition | None = None
    """What a run must have for it."""


_KILL, _STOP, _PARTITION, _SKEW = FaultAction.KILL, FaultAction.STOP, FaultAction.PARTITION, FaultAction.CLOCK_SKEW
_LOSE, _RETURN, _FILL, _EXHAUST = FaultAction.REMOVE, FaultAction.RESTORE, FaultAction.FILL, FaultAction.EXHAUST
_RANK, _NODE, _AGENT, _CONTROLLER = FaultTarget.RANK, FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.CONTROLLER
_RAISE, _HANG, _SLOW = FaultAction.RAISE, FaultAction.HANG, FaultAction.SLOW
_QUORUM, _COLLECTIVE = FaultTarget.LIGHTHOUSE, FaultTarget.COLLECTIVE
_RUN_FOLDER, _CHECKPOINTS, _MEMORY = FaultTarget.RUN_DIR, FaultTarget.CHECKPOINTS, FaultTarget.MEMORY

FAULTS: Mapping[tuple[FaultAction, FaultTarget], FaultSpec] = {
    (_KILL, _RANK): FaultSpec(
        description="SIGKILL to its process: all ranks restart, from the last checkpoint where there is one."
    ),
    (_KILL, _NODE): FaultSpec(description="SIGKILL to all of it at once, agent included: it is replaced."),
    (_KILL, _AGENT): FaultSpec(description="SIGKILL to the agent; its ranks die with it, and the node is replaced."),
    (_KILL, _CONTROLLER): FaultSpec(
        description="SIGKILL: it comes back and no rank restarts.", executor=Executor.CONTROLLER
    ),
    (_LOSE, _NODE): FaultSpec(
        description="As kill, and its machine is out of use: it is replaced if there is a spare, else the job shrinks."
    ),
    (_RETURN, _NODE): FaultSpec(
        description="Its machine is of use again: what misses a node gets it.", executor=Executor.BACKEND
    ),
    (_STOP, _RANK): FaultSpec(
        description="SIGSTOP to its process: a hang, which `recovery.step_timeout_s` finds.", reversible=True
    ),
    (_STOP, _NODE): FaultSpec(
        description="SIGSTOP to all of it: out of reach, with its connections open.", reversible=True
    ),
    (_STOP, _AGENT): FaultSpec(description="SIGSTOP to the agent alone: its ranks go on without it.", reversible=True),
    (_STOP, _CONTROLLER): FaultSpec(
        description="SIGSTOP: it is replaced after fifteen silent seconds and no rank restarts.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_PARTITION, _NODE): FaultSpec(
        description="Nothing leaves the node's network and nothing arrives; no connection is closed.",
        executor=Executor.CONTROLLER,
        reversible=True,
        precondition=NEEDS_NETNS,
    ),
    (_SKEW, _AGENT): FaultSpec(
        description="Its wall clock jumps: told as `clock-jumped`, and nothing else.", amount_unit="seconds"
    ),
    (_SKEW, _CONTROLLER): FaultSpec(
        description="Its wall clock jumps: told as `clock-jumped`, and nothing else.",
        executor=Executor.CONTROLLER,
        amount_unit="seconds",
    ),
    (_FILL, _RUN_FOLDER): FaultSpec(
        description="Its disk is full, if it is a small one: ranks go on, the log lives on its reserve, then the run waits.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_FILL, _CHECKPOINTS): FaultSpec(
        description="Their disk is full, if it is a small one: the next is given up, the older ones stay.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_EXHAUST, _MEMORY): FaultSpec(
        description="Its memory is taken: told as `memory-pressure`, then the kernel ends a rank and all restart.",
        precondition=NEEDS_MEMORY_LIMIT,
    ),
    (_RAISE, _RANK): FaultSpec(description="Its Session raises an error at the end of a step: all ranks restart."),
    (_HANG, _RANK): FaultSpec(
        description="It goes to sleep at the end of a step, in its own code: `recovery.step_timeout_s` finds it."
    ),
    (_HANG, _COLLECTIVE): FaultSpec(
        description="It enters an all-reduce that no other rank enters: the same, as it looks there."
    ),
    (_SLOW, _NODE): FaultSpec(
        description="Its ranks stand still most of the time: told as nothing, and nothing restarts.",
        amount_unit="times",
        reversible=True,
    ),
    (_KILL, _QUORUM): FaultSpec(
        description="SIGKILL: it comes back at its port, no rank restarts; replicas wait for it where they have to meet.",
        executor=Executor.CONTROLLER,
        precondition=NEEDS_REPLICAS,
    ),
    (_STOP, _QUORUM): FaultSpec(
        description="SIGSTOP: it is replaced after five silent seconds, no rank restarts; replicas wait where they meet.",
        executor=Executor.CONTROLLER,
        reversible=True,
        precondition=NEEDS_REPLICAS,
    ),
}


def check_fault(asked: FaultRequested, accepted: RunSpec, run: str) -> None:
    """Raise when a run has no such target, or when what is asked cannot be done to it."""
    drill = FAULTS.get((asked.action, asked.target))
    if drill is None:
        raise _unusable(
            f"nothing is known that a {asked.action} of a {asked.target} would be",
            f"`{asked.action}` takes {_either(target for action, target in FAULTS if action is asked.action)}; "
            f"a {asked.target} takes {_either(action for action, target in FAULTS if target is asked.target)}.",
        )
    if asked.for_s is not None and not drill.reversible:
        lasting = sorted({action for (action, _), row in FAULTS.items() if row.reversible})
        raise _unusable(
            f"a {asked.action} is for good, so it cannot last {asked.for_s:g} s",
            f"`--for` goes with {_either(lasting)}.",
        )
    if (asked.amount is None) is not (drill.amount_unit == ""):
        what = (
            f"a {asked.action} is told by how many {drill.amount_unit}"
            if drill.amount_unit
            else f"a {asked.action} has no amount"
        )
        raise _unusable(what, "Add `--amount AMOUNT`." if drill.amount_unit else "Leave `--amount` out.")
    if asked.at_step is not None and drill.executor is Executor.BACKEND:
        raise _unusable(f"a {asked.action} waits for no step", "Leave out `--at-step`.")
    if drill.precondition is not None and not drill.precondition.met(accepted):
        raise _unavailable(asked, drill.precondition, accepted, run)
    job = accepted.job
    if asked.action is _SLOW and (asked.amount or 0) < 1:
        raise _unusable(f"nothing is {asked.amount:g} times as slow", "Say such as `--amount 3`.")
    known = 1 if not asked.target.is_numbered else job.world_size if asked.target.is_rank else job.node_slots
    if not 0 <= asked.index < known:
        raise failure(
            "no-such-fault-target",
            f"{run} has no {asked.target} {asked.index}",
            exit_code=ExitCode.NOT_FOUND,
            remedy=f"It has {asked.target}s 0 to {known - 1}.",
        )


def _unavailable(asked: FaultRequested, need: Precondition, accepted: RunSpec, run: str) -> HoldfastError:
    return failure(
        "fault-unavailable",
        f"{asked.action} {asked.target} needs {need.what}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=need.where.format(accepted=accepted),
        evidence=(need.evidence.format(accepted=accepted, run=run),),
        remedy=need.remedy,
    )


def _unusable(what: str, remedy: str) -> HoldfastError:
    return failure("bad-fault", what, exit_code=ExitCode.USAGE, remedy=remedy)


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in dict.fromkeys(names))
