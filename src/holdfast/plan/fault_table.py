"""The inputs of a simulated run: faults, delays and costs, each with its source; pure.

A source is a publication, a measurement of this project (bench/results), a default of a job, or an assumption. Where
nothing is published, the assumption favours the run without Watch.
"""

from __future__ import annotations

import signal

from msgspec import Struct

from holdfast.control.policy import FailureKind
from holdfast.failure_rates import (
    DAY_S,
    FAILURE_RATES,
    STANDBY_WINDOW_S,
    FailureHistory,
    standby_count,
    young_interval_s,
)
from holdfast.job.spec import Recovery
from holdfast.job.step_timeouts import StepTimeouts
from holdfast.plan.reliability import RACK_NODES, Delay, Detection, FaultEffect, FaultKind, Fleet

NODES, GPUS_PER_NODE = 2048, 8
HOUR_S = 3600.0
RECOVERY = Recovery()

LLAMA_RATE = next(each for each in FAILURE_RATES if each.fleet == "Llama 3").per_1000_node_days
LLAMA_DAYS, LLAMA_INTERRUPTIONS = 54.0, 419
"""The Llama 3 Herd of Models (arXiv 2407.21783), table 5: unexpected interruptions on 16,384 GPUs."""


class Measured(Struct, frozen=True, kw_only=True):
    """A time that a bench of this project measured, where it stands in bench/results."""

    seconds: float
    bench: str
    claim: str
    detail: str = ""
    """One of the result's details, if it is not the figure."""


EXIT = Measured(
    seconds=0.032,
    bench="recovery",
    claim="phase of a recovery: detect: kill until the agent knows how the rank exited",
)
FANOUT = Measured(seconds=0.76, bench="scale", claim="2,048 nodes (16,384 ranks): node lost → next attempt starts, p99")
HANG_MARGIN = Measured(
    seconds=0.914,
    bench="hang_eviction",
    claim="a replica hangs: last commit → killed, beyond 3 × p99 of its steps, longest",
)
CHECKS = Measured(
    seconds=49.4, bench="planted_faults", claim="faults planted for the probes: located", detail="silent node"
)
SMALL_RESTART = Measured(seconds=2.65, bench="recovery", claim="`kill -9` of a rank → first complete step")
MEASURED = (EXIT, FANOUT, HANG_MARGIN, CHECKS, SMALL_RESTART)
EXIT_S, FANOUT_S, HANG_MARGIN_S, CHECKS_S = EXIT.seconds, FANOUT.seconds, HANG_MARGIN.seconds, CHECKS.seconds


class Input(Struct, frozen=True, kw_only=True):
    """A figure of the simulation."""

    name: str
    value: float
    unit: str
    source: str

    @property
    def is_assumed(self) -> bool:
        """Whether nothing supports it."""
        return self.source.startswith("assumed")


STEP_S = 10.0
P99_STEP = 1.05
RESTART_S, REQUEUE_S = 65.0, 768.0
COLLECTIVE_TIMEOUT_S = 600.0
PERSON_RESTARTS_S = 68 * 60.0
LOOKS_EVERY_S = 8 * HOUR_S
SAVE_STALL_S = 0.59
PERSISTENT = 0.27
SLOWDOWN = 0.1
SLOW_NODES, SLOW_NODES_DAYS = 0.005, 30.0
STRAGGLER_STEPS = 40

_CUDA = "RuntimeError: CUDA error: unspecified launch failure"
_ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
_NCCL = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error"
_TIMES_OUT = Detection(
    delay=Delay(low_s=COLLECTIVE_TIMEOUT_S, high_s=COLLECTIVE_TIMEOUT_S),
    kind=FailureKind.KILLED,
    code=signal.SIGABRT,
    error="Watchdog caught collective operation timeout",
    names_node=False,
)


def inputs(*, step_s: float = STEP_S, is_predicted: bool = False, recovery: Recovery = RECOVERY) -> tuple[Input, ...]:
    """The figures that the simulation of a run uses, with their sources."""
    return (
        Input(name="step", value=step_s, unit="s", source="predicted" if is_predicted else "assumed"),
        Input(name="p99 of a step over its median", value=P99_STEP, unit="×", source="assumed"),
        Input(name="rank ends → agent knows", value=EXIT_S, unit="s", source="bench.recovery"),
        Input(name="node lost → next attempt starts, 2,048 nodes", value=FANOUT_S, unit="s", source="bench.scale"),
        Input(name="hang → ranks killed, beyond 3 × p99", value=HANG_MARGIN_S, unit="s", source="bench.hang_eviction"),
        Input(
            name="checks and probes of the nodes", value=CHECKS_S, unit="s", source="bench.planted_faults, with a start"
        ),
        Input(
            name="restart on nodes that are there, or on a standby",
            value=RESTART_S,
            unit="s",
            source="ByteRobust (arXiv 2509.16293): hot update, 46 to 65 s; the largest scale",
        ),
        Input(
            name="restart with a node started anew",
            value=REQUEUE_S,
            unit="s",
            source="ByteRobust: requeue, 454 to 768 s; the largest scale",
        ),
        Input(
            name="hang → ranks end, without Watch",
            value=COLLECTIVE_TIMEOUT_S,
            unit="s",
            source="torch: timeout of NCCL process groups, 10 min (pytorch pull request 110947)",
        ),
        Input(
            name="a person restarts a run that has stopped",
            value=PERSON_RESTARTS_S,
            unit="s",
            source="Unicron (arXiv 2401.00134): restart path of about 68 min",
        ),
        Input(
            name="a person looks at loss and throughput every",
            value=LOOKS_EVERY_S,
            unit="s",
            source="assumed: once a shift; sees every slow node and NaN then, and finds its node in no time",
        ),
        Input(
            name="stall of a save",
            value=SAVE_STALL_S,
            unit="s",
            source="ByteCheckpoint: 0.34 to 0.59 s; `checkpoint.every: auto` follows from it",
        ),
        Input(
            name="hardware faults that a restart does not end",
            value=PERSISTENT,
            unit="",
            source="Unicron: 73 % of errors are transient",
        ),
        Input(
            name="nodes that become slow in the month",
            value=SLOW_NODES,
            unit="",
            source="MegaScale: 0.5 % of machines; assumed to be as many in each month",
        ),
        Input(name="slowdown by a slow node", value=SLOWDOWN, unit="", source="MegaScale: about 10 %"),
        Input(
            name="steps until a straggler is named", value=STRAGGLER_STEPS, unit="steps", source="upper bound of docs"
        ),
        Input(
            name="steps between comparisons of states",
            value=recovery.verify_every_steps,
            unit="steps",
            source="recovery.verify_every_steps; cost: bench.replica_verify",
        ),
        Input(
            name="nodes of a rack",
            value=RACK_NODES,
            unit="nodes",
            source="Llama 3: 16 GPUs in two servers to a rack; that they share power is assumed",
        ),
        Input(name="silence → node lost", value=recovery.node_grace_s, unit="s", source="recovery.node_grace_s"),
        Input(
            name="repair of a machine", value=STANDBY_WINDOW_S, unit="s", source="assumed: a day, as `standby: auto`"
        ),
    )


def failure_scale(nodes: int, per_1000_node_days: float) -> float:
    """Failures of a run over those of Llama 3's."""
    return nodes / NODES * per_1000_node_days / LLAMA_RATE


def causes(
    *, scale: float = 1.0, step_s: float = STEP_S, looks_every_s: float = LOOKS_EVERY_S, recovery: Recovery = RECOVERY
) -> tuple[FaultKind, ...]:
    """The faults of a run with `scale` times the failures of Llama 3's, at which a person looks so often.

    Counts are of Llama 3's table 5. Assumed: switches, cables and system processors hang the run; half of the
    corruptions show as NaN within a step, and of the rest a person learns within three looks; a hot GPU slows the run;
    a failed power supply takes its rack.
    """
    a_person_sees = Detection(delay=Delay(high_s=looks_every_s), kind=None)
    moved = Detection(
        delay=Delay(low_s=STRAGGLER_STEPS * step_s, high_s=STRAGGLER_STEPS * step_s), kind=FailureKind.STRAGGLING
    )
    compared = Detection(delay=Delay(high_s=recovery.verify_every_steps * step_s), kind=FailureKind.CORRUPTED)
    damaged = Detection(delay=Delay(high_s=step_s), kind=FailureKind.NUMBERS_DAMAGED, names_node=False)
    grace_s = recovery.node_grace_s
    lost = Detection(delay=Delay(low_s=grace_s, high_s=grace_s), kind=FailureKind.NODE_LOST)
    hangs = _hangs(recovery, step_s)

    def exits(kind: FailureKind, error: str) -> Detection:
        """The fault begins somewhere in a step, and ends a rank when the step uses the device."""
        return Detection(delay=Delay(low_s=EXIT_S, high_s=step_s + EXIT_S), kind=kind, code=1, error=error)

    def llama(
        name: str,
        count: float,
        detection: Detection,
        *,
        effect: FaultEffect = FaultEffect.STOPS,
        persists: float = 0.0,
        detector: str = "",
        watched: Detection | None = None,
        hits_rack: bool = False,
    ) -> FaultKind:
        return FaultKind(
            name=name,
            per_day=count / LLAMA_DAYS * scale,
            effect=effect,
            persists=persists,
            slowdown=SLOWDOWN if effect is FaultEffect.SLOWS else 0.0,
            detection=detection,
            detector=detector,
            watched=watched,
            hits_rack=hits_rack,
        )

    return (
        llama(
            "faulty GPU",
            148,
            exits(FailureKind.GPU_ERROR_UNCLEAR, _CUDA),
            persists=PERSISTENT,
            detector="devices",
            watched=exits(FailureKind.GPU_FAILED, _CUDA),
        ),
        llama("GPU memory", 72, exits(FailureKind.GPU_MEMORY_FAILED, _ECC), persists=PERSISTENT),
        llama("software bug", 54, exits(FailureKind.CRASHED, "RuntimeError: a bug")),
        llama("switch or cable", 35, _TIMES_OUT, persists=PERSISTENT, detector="hangs", watched=hangs),
        llama("unplanned maintenance of a host", 32, lost),
        llama("GPU SRAM", 19, exits(FailureKind.GPU_MEMORY_FAILED, _ECC), persists=PERSISTENT),
        llama("GPU system processor", 17, _TIMES_OUT, persists=PERSISTENT, detector="hangs", watched=hangs),
        llama(
            "network adapter",
            7,
            exits(FailureKind.NCCL_SYSTEM_CALL_FAILED, _NCCL),
            persists=PERSISTENT,
            detector="devices",
            watched=exits(FailureKind.NIC_FAILED, _NCCL),
        ),
        llama("hang of unknown cause", 7, _TIMES_OUT, detector="hangs", watched=hangs),
        llama(
            "corruption that shows as NaN",
            3,
            a_person_sees,
            effect=FaultEffect.DAMAGES,
            persists=PERSISTENT,
            detector="numbers",
            watched=damaged,
        ),
        llama(
            "silent corruption",
            3,
            Detection(delay=Delay(high_s=3 * looks_every_s), kind=None),
            effect=FaultEffect.DAMAGES,
            persists=PERSISTENT,
            detector="comparison",
            watched=compared,
        ),
        llama(
            "hot GPU",
            6,
            a_person_sees,
            effect=FaultEffect.SLOWS,
            persists=1.0,
            detector="stragglers",
            watched=moved,
        ),
        llama("power of a rack", 3, lost, hits_rack=True),
        llama("SSD, chassis, board, CPU, memory", 11, lost),
        llama("dependency", 2, exits(FailureKind.CRASHED, "RuntimeError: a dependency failed")),
        FaultKind(
            name="slow node",
            per_day=SLOW_NODES * NODES / SLOW_NODES_DAYS * scale,
            effect=FaultEffect.SLOWS,
            persists=1.0,
            slowdown=SLOWDOWN,
            detection=a_person_sees,
            detector="stragglers",
            watched=moved,
        ),
    )


def _hangs(recovery: Recovery, step_s: float) -> Detection:
    """How holdfast detects a hang in a step, and in the first step of an attempt."""
    timeouts = StepTimeouts(step_timeout_s=recovery.step_timeout_s or "auto")
    low_s = 3 * P99_STEP * step_s if timeouts.step_timeout_s == "auto" else timeouts.step_timeout_s
    first_s = timeouts.first_step_s(RESTART_S)
    return Detection(
        delay=Delay(low_s=low_s, high_s=low_s + HANG_MARGIN_S),
        kind=FailureKind.HUNG,
        names_node=False,
        again=Delay(low_s=first_s, high_s=first_s),
    )


DETECTORS = frozenset(cause.detector for cause in causes() if cause.detector)


def fleet(
    *,
    nodes: int = NODES,
    gpus_per_node: int = GPUS_PER_NODE,
    scale: float = 1.0,
    step_s: float = STEP_S,
    standbys: int | None = None,
    checkpoint_every_s: float | None = None,
    recovery: Recovery = RECOVERY,
) -> Fleet:
    """A run with these nodes; by default it has as many standbys and checkpoints as `auto` gives."""
    past = FailureHistory(nodes=nodes, failures=LLAMA_INTERRUPTIONS, node_s=nodes * LLAMA_DAYS * DAY_S / scale)
    return Fleet(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        step_s=step_s,
        checkpoint_every_s=checkpoint_every_s or young_interval_s(past, cost_s=SAVE_STALL_S, took_s=0.0),
        checkpoint_cost_s=SAVE_STALL_S,
        restart_s=RESTART_S + FANOUT_S,
        requeue_s=REQUEUE_S + FANOUT_S,
        checks_s=CHECKS_S,
        person_s=PERSON_RESTARTS_S,
        standbys=standby_count(nodes) if standbys is None else standbys,
        repair_s=STANDBY_WINDOW_S,
        recovery=recovery,
    )
