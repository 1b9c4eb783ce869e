"""The catalogue of injectable faults, one row per action and target, and the check of a request.

Agents execute them in agent/fault_injection.py, the controller in launch/local/controller_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.job.isolation import Isolation
from holdfast.job.run_spec import RunSpec
from holdfast.protocol.watch_levels import WatchLevel


class Executor(StrEnum):
    """Which process injects a fault."""

    AGENT = "agent"
    """The agent of the target's node; a disconnected agent injects it after it reconnects."""
    CONTROLLER = "controller"
    """The controller, or the host it runs on."""
    TARGET = "target"
    """The run's target, which creates its nodes."""


class Precondition(Struct, frozen=True, kw_only=True):
    """A property that a fault needs of the run; its texts may use `run` (the id) and `accepted` (the spec)."""

    field: str
    """The field of the target or job that provides it."""
    what: str
    met: Callable[[RunSpec], bool]
    where: str
    """Where that field is set."""
    evidence: str
    """What a run without it has."""
    remedy: str


NEEDS_NETNS = Precondition(
    field="isolation: netns",
    what="nodes that are isolated by `netns`",
    met=lambda accepted: accepted.isolation is Isolation.NETNS,
    where="target {accepted.target}",
    evidence="the nodes of {run} have `isolation: {accepted.isolation}`",
    remedy="Start the run with a target that has `isolation: netns`.",
)
NEEDS_MEMORY_LIMIT = Precondition(
    field="resources.memory",
    what="nodes with a memory limit, or it would take the whole machine's",
    met=lambda accepted: accepted.job.resources.memory is not None,
    where="resources.memory",
    evidence="the job of {run} sets no `resources.memory`",
    remedy="Start the run with, for example, `--set resources.memory=4GiB`.",
)
NEEDS_REPLICAS = Precondition(
    field="recovery.replicas",
    what="a run of several replicas; only these have a quorum service",
    met=lambda accepted: accepted.job.recovery.replicas > 1,
    where="recovery.replicas",
    evidence="the job of {run} has one replica",
    remedy="Start the run with, for example, `--set recovery.replicas=2`.",
)
NEEDS_PHASES = Precondition(
    field="watch.stragglers",
    what="ranks that measure the phases of their steps",
    met=lambda accepted: accepted.job.watch.stragglers is not WatchLevel.OFF,
    where="watch.stragglers",
    evidence="the job of {run} has `watch.stragglers: off`",
    remedy="Start the run with `--set watch.stragglers=warn`.",
)
NEEDS_DEVICE_WATCH = Precondition(
    field="watch.device_faults",
    what="agents that read the nodes' GPUs",
    met=lambda accepted: accepted.job.watch.device_faults is not WatchLevel.OFF,
    where="watch.device_faults",
    evidence="the job of {run} has `watch.device_faults: off`",
    remedy="Start the run with `--set watch.device_faults=warn`.",
)


class FaultSpec(Struct, frozen=True, kw_only=True):
    """What one action does to one target."""

    description: str
    """The effect and the expected recovery, one line for the reference."""
    executor: Executor = Executor.AGENT
    reversible: bool = False
    """Whether `--for` can undo it; otherwise it is permanent."""
    amount_unit: str = ""
    """The unit of `--amount`, for a fault that requires one."""
    precondition: Precondition | None = None
    """What the run must have."""


_KILL, _STOP, _PARTITION, _SKEW = FaultAction.KILL, FaultAction.STOP, FaultAction.PARTITION, FaultAction.CLOCK_SKEW
_LOSE, _RETURN, _FILL, _OOM = FaultAction.REMOVE, FaultAction.RESTORE, FaultAction.FILL, FaultAction.OOM
_RANK, _NODE, _AGENT, _CONTROLLER = FaultTarget.RANK, FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.CONTROLLER
_RAISE, _HANG, _SLOW = FaultAction.RAISE, FaultAction.HANG, FaultAction.SLOW
_LIGHTHOUSE, _COLLECTIVE = FaultTarget.LIGHTHOUSE, FaultTarget.COLLECTIVE
_FAIL, _ECC_ERROR = FaultAction.FAIL, FaultAction.ECC_ERROR
_THROTTLE, _LINK_ERRORS = FaultAction.THROTTLE, FaultAction.LINK_ERRORS
_GPU, _NVLINK, _NIC = FaultTarget.GPU, FaultTarget.NVLINK, FaultTarget.NIC
_NAN, _SPIKE, _LOSS, _GRADIENT = FaultAction.NAN, FaultAction.SPIKE, FaultTarget.LOSS, FaultTarget.GRADIENT
_BITFLIP = FaultAction.BITFLIP
_RUN_FOLDER, _CHECKPOINTS = FaultTarget.RUN_DIR, FaultTarget.CHECKPOINTS

FAULTS: Mapping[tuple[FaultAction, FaultTarget], FaultSpec] = {
    (_KILL, _RANK): FaultSpec(
        description="SIGKILL to the rank: all ranks restart from the last checkpoint, if there is one."
    ),
    (_KILL, _NODE): FaultSpec(
        description="SIGKILL to all processes of the node, agent included: the node is replaced."
    ),
    (_KILL, _AGENT): FaultSpec(description="SIGKILL to the agent; its ranks die with it, and the node is replaced."),
    (_KILL, _CONTROLLER): FaultSpec(
        description="SIGKILL: the controller restarts; no rank restarts.", executor=Executor.CONTROLLER
    ),
    (_LOSE, _NODE): FaultSpec(
        description="As kill, and cordons its machine: the node is replaced if there is a spare, else the job shrinks."
    ),
    (_RETURN, _NODE): FaultSpec(
        description="Its machine is uncordoned and available to the job again.", executor=Executor.TARGET
    ),
    (_STOP, _RANK): FaultSpec(
        description="SIGSTOP to the rank: a hang, detected after `recovery.step_timeout_s`.", reversible=True
    ),
    (_STOP, _NODE): FaultSpec(
        description="SIGSTOP to all processes of the node: unreachable, with its connections open.", reversible=True
    ),
    (_STOP, _AGENT): FaultSpec(
        description="SIGSTOP to the agent alone: its ranks continue without it.", reversible=True
    ),
    (_STOP, _CONTROLLER): FaultSpec(
        description="SIGSTOP: the controller is replaced after 15 s; no rank restarts.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_PARTITION, _NODE): FaultSpec(
        description="Drops all traffic of the node in both directions; no connection is closed.",
        executor=Executor.CONTROLLER,
        reversible=True,
        precondition=NEEDS_NETNS,
    ),
    (_SKEW, _AGENT): FaultSpec(
        description="Its wall clock jumps: `clock-jumped` is reported, nothing restarts.", amount_unit="seconds"
    ),
    (_SKEW, _CONTROLLER): FaultSpec(
        description="Its wall clock jumps: `clock-jumped` is reported, nothing restarts.",
        executor=Executor.CONTROLLER,
        amount_unit="seconds",
    ),
    (_FILL, _RUN_FOLDER): FaultSpec(
        description="Fills a small disk: ranks continue, the log uses its reserved space, then the run waits.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_FILL, _CHECKPOINTS): FaultSpec(
        description="Fills a small disk: the next checkpoint fails, older ones stay.",
        executor=Executor.CONTROLLER,
        reversible=True,
    ),
    (_OOM, _NODE): FaultSpec(
        description="Takes its memory: `memory-pressure` is reported, then the kernel kills a rank and all restart.",
        precondition=NEEDS_MEMORY_LIMIT,
    ),
    (_RAISE, _RANK): FaultSpec(description="Its Session raises an error at the end of a step: all ranks restart."),
    (_HANG, _RANK): FaultSpec(
        description="It sleeps in Python code at the end of a step: detected after `recovery.step_timeout_s`."
    ),
    (_HANG, _COLLECTIVE): FaultSpec(
        description="It enters an all-reduce that no other rank enters: detected after `recovery.step_timeout_s`."
    ),
    (_NAN, _LOSS): FaultSpec(
        description="The model's output of the rank is NaN in one step, so its loss is: all ranks restart as soon as "
        "weights are damaged."
    ),
    (_NAN, _GRADIENT): FaultSpec(
        description="The gradient of the last parameter of the rank is NaN in one step, before ranks reduce it: all "
        "ranks restart as soon as weights are damaged."
    ),
    (_SPIKE, _LOSS): FaultSpec(
        description="The model's output of the rank is multiplied in one step: a spike of its loss is reported.",
        amount_unit="times",
    ),
    (_SPIKE, _GRADIENT): FaultSpec(
        description="The gradient of the last parameter of the rank is multiplied in one step: a spike of the gradient "
        "norm is reported, if the program reports `grad_norm`.",
        amount_unit="times",
    ),
    (_BITFLIP, FaultTarget.WEIGHTS): FaultSpec(
        description="One bit of one weight of the rank changes: found when ranks are compared, and its node is "
        "replaced."
    ),
    (_BITFLIP, FaultTarget.OPTIMIZER): FaultSpec(
        description="One bit of the optimizer state of the rank changes: found when ranks are compared, and its node "
        "is replaced."
    ),
    (_BITFLIP, _GRADIENT): FaultSpec(
        description="From then on one bit of a gradient of the rank is wrong in each step, before ranks reduce it: "
        "found when a pass is repeated, and its node is replaced."
    ),
    (_BITFLIP, FaultTarget.ACTIVATIONS): FaultSpec(
        description="From then on one bit of what a layer of the rank computes is wrong in each step: found when a "
        "pass is repeated, and its node is replaced."
    ),
    (_FAIL, _GPU): FaultSpec(
        description="The rank's output reports a lost GPU and it ends with SIGABRT, as by torch: its node is replaced."
    ),
    (_ECC_ERROR, _GPU): FaultSpec(
        description="The same with a CUDA error of uncorrectable memory: its node is replaced."
    ),
    (_FAIL, _NVLINK): FaultSpec(
        description="The same with a CUDA error of a failed link between GPUs: its node is replaced."
    ),
    (_FAIL, _NIC): FaultSpec(
        description="The same with a lost link of an adapter and NCCL's error: all ranks restart; the second time "
        "within `recovery.suspect_window_s` its node is replaced."
    ),
    (_THROTTLE, _GPU): FaultSpec(
        description="Readings of its GPU show a thermal slowdown: `gpu-throttled` is reported after 15 s, nothing "
        "restarts.",
        reversible=True,
        precondition=NEEDS_DEVICE_WATCH,
    ),
    (_LINK_ERRORS, _NIC): FaultSpec(
        description="Readings of its adapter show symbol errors: `fabric-link-errors` is reported after 5 s, nothing "
        "restarts.",
        reversible=True,
    ),
    (_SLOW, _NODE): FaultSpec(
        description="Its ranks are suspended most of the time: nothing restarts; those with a Session are stragglers.",
        amount_unit="times",
        reversible=True,
    ),
    **{
        (_SLOW, target): FaultSpec(
            description=f"{what} of the rank takes longer, by a share of its step: it is named as the straggler.",
            amount_unit="times",
            reversible=True,
            precondition=NEEDS_PHASES,
        )
        for target, what in (
            (FaultTarget.DATA, "The wait for samples"),
            (FaultTarget.FORWARD, "The forward pass"),
            (FaultTarget.BACKWARD, "The backward pass"),
            (FaultTarget.OPTIMIZER, "The optimizer's step"),
            (FaultTarget.COMMUNICATION, "The reduction of gradients"),
            (FaultTarget.HOST, "What is between two steps"),
        )
    },
    (FaultAction.DATA_STALL, _RANK): FaultSpec(
        description="Every batch comes later by so many seconds: `data-stall` is reported, nothing restarts.",
        amount_unit="seconds",
        reversible=True,
    ),
    (FaultAction.LEAK, _RANK): FaultSpec(
        description="It keeps so much memory of each step: `memory-growing` is reported, until the kernel kills it.",
        amount_unit="MiB per step",
        reversible=True,
        precondition=NEEDS_MEMORY_LIMIT,
    ),
    (_KILL, _LIGHTHOUSE): FaultSpec(
        description="SIGKILL: it restarts at its port, no rank restarts; replicas that need a quorum wait for it.",
        executor=Executor.CONTROLLER,
        precondition=NEEDS_REPLICAS,
    ),
    (_STOP, _LIGHTHOUSE): FaultSpec(
        description="SIGSTOP: it is replaced after 5 s, no rank restarts; replicas that need a quorum wait.",
        executor=Executor.CONTROLLER,
        reversible=True,
        precondition=NEEDS_REPLICAS,
    ),
}


def check_fault(request: FaultRequested, accepted: RunSpec, run: str) -> None:
    """Raise HoldfastError if the run has no such target, or if the fault does not apply to it."""
    fault = FAULTS.get((request.action, request.target))
    if fault is None:
        raise _unusable(
            f"a {request.target} has no fault `{request.action}`",
            f"`{request.action}` takes {_either(target for action, target in FAULTS if action is request.action)}; "
            f"a {request.target} takes {_either(action for action, target in FAULTS if target is request.target)}.",
        )
    if request.for_s is not None and not fault.reversible:
        reversible = sorted({action for (action, _), row in FAULTS.items() if row.reversible})
        raise _unusable(
            f"`{request.action}` is permanent, so it cannot last {request.for_s:g} s",
            f"`--for` goes with {_either(reversible)}.",
        )
    if (request.amount is None) is not (fault.amount_unit == ""):
        what = (
            f"`{request.action}` needs an amount in {fault.amount_unit}"
            if fault.amount_unit
            else f"`{request.action}` takes no amount"
        )
        raise _unusable(what, "Add `--amount AMOUNT`." if fault.amount_unit else "Leave `--amount` out.")
    if request.at_step is not None and fault.executor is Executor.TARGET:
        raise _unusable(f"`{request.action}` cannot wait for a step", "Leave out `--at-step`.")
    if fault.precondition is not None and not fault.precondition.met(accepted):
        raise _unavailable(request, fault.precondition, accepted, run)
    job = accepted.job
    if request.action is _SLOW and (request.amount or 0) < 1:
        raise _unusable(f"nothing is {request.amount:g} times as slow", "Write, for example, `--amount 3`.")
    known = 1 if not request.target.is_numbered else job.world_size if request.target.is_rank else job.node_slots
    if not 0 <= request.index < known:
        raise failure(
            "no-such-fault-target",
            f"{run} has no {request.target} {request.index}",
            exit_code=ExitCode.NOT_FOUND,
            remedy=f"It has {request.target}s 0 to {known - 1}.",
        )


def _unavailable(request: FaultRequested, need: Precondition, accepted: RunSpec, run: str) -> HoldfastError:
    return failure(
        "fault-unavailable",
        f"{request.action} {request.target} needs {need.what}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=need.where.format(accepted=accepted),
        evidence=(need.evidence.format(accepted=accepted, run=run),),
        remedy=need.remedy,
    )


def _unusable(what: str, remedy: str) -> HoldfastError:
    return failure("bad-fault", what, exit_code=ExitCode.USAGE, remedy=remedy)


def _either(names: Iterable[str]) -> str:
    return " or ".join(f"`{name}`" for name in dict.fromkeys(names))
