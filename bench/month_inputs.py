"""The inputs of the simulated month: faults, delays and costs, each with its source.

A source is a publication, a result of this repository (bench/results), a default of a job, or an assumption. Where
nothing is published, the assumption favours the run without Watch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from bench import result_file
from bench.failure_simulation import Cause, Delay, Detection, Effect, Fleet
from holdfast.control.policy import FailureKind
from holdfast.failure_rates import DAY_S, STANDBY_WINDOW_S, standby_count
from holdfast.job.spec import Recovery
from holdfast.job.step_timeouts import StepTimeouts
from holdfast.train.checkpoint.interval import FailureHistory, young_interval_s

NODES, GPUS_PER_NODE, DAYS = 2048, 8, 30.0
HOUR_S = 3600.0

LLAMA_DAYS, LLAMA_INTERRUPTIONS = 54.0, 419
"""The Llama 3 Herd of Models (arXiv 2407.21783), table 5: unexpected interruptions on 16,384 GPUs."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """A figure of the simulation."""

    name: str
    value: float
    unit: str
    source: str


def measured(bench: str, claim: str, detail: str = "") -> float:
    """The latest figure of a claim in bench/results, or the number that ends one of its details."""
    file = next(each for each in result_file.read_all() if each.bench == bench)
    result = next(each for each in file.results if each.claim == claim and not each.superseded)
    if detail:
        return float(result.details[detail].split(", ")[-1].removesuffix(" s"))
    assert result.figure is not None
    return result.figure.value


STEP_S = 10.0
P99_STEP = 1.05
EXIT_S = measured("recovery", "phase of a recovery: detect: kill until the agent knows how the rank exited")
FANOUT_S = measured("scale", "2,048 nodes (16,384 ranks): node lost → next attempt starts, p99")
HANG_MARGIN_S = measured("hang_eviction", "a replica hangs: last commit → killed, beyond 3 × p99 of its steps, longest")
CHECKS_S = measured("planted_faults", "faults planted for the probes: located", "silent node")
RESTART_S, REQUEUE_S = 65.0, 768.0
COLLECTIVE_TIMEOUT_S = 600.0
PERSON_RESTARTS_S = 68 * 60.0
LOOKS_EVERY_S = 8 * HOUR_S
SAVE_STALL_S = 0.59
PERSISTENT = 0.27
SLOWDOWN = 0.1
SLOW_NODES = 0.005
VERIFY_STEPS = Recovery().verify_every_steps
STRAGGLER_STEPS = 40
NODE_GRACE_S = Recovery().node_grace_s

INPUTS = (
    Input(name="step", value=STEP_S, unit="s", source="assumed; bench.event_log and bench.scale assume the same"),
    Input(name="p99 of a step over its median", value=P99_STEP, unit="×", source="assumed"),
    Input(name="rank ends → agent knows", value=EXIT_S, unit="s", source="bench.recovery"),
    Input(name="node lost → next attempt starts, 2,048 nodes", value=FANOUT_S, unit="s", source="bench.scale"),
    Input(name="hang → ranks killed, beyond 3 × p99", value=HANG_MARGIN_S, unit="s", source="bench.hang_eviction"),
    Input(name="checks and probes of the nodes", value=CHECKS_S, unit="s", source="bench.planted_faults, with a start"),
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
        source="ByteCheckpoint: 0.34 to 0.59 s; the interval follows by Young's formula, as `checkpoint.every: auto`",
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
    Input(name="steps until a straggler is named", value=STRAGGLER_STEPS, unit="steps", source="upper bound of docs"),
    Input(
        name="steps between comparisons of states",
        value=VERIFY_STEPS,
        unit="steps",
        source="default of recovery.verify_every_steps; cost: bench.replica_verify",
    ),
    Input(name="silence → node lost", value=NODE_GRACE_S, unit="s", source="default of recovery.node_grace_s"),
    Input(name="repair of a machine", value=STANDBY_WINDOW_S, unit="s", source="assumed: a day, as `standby: auto`"),
)

_TIMEOUTS = StepTimeouts(step_timeout_s="auto")
_AT_STEP_END = Delay(low_s=EXIT_S, high_s=STEP_S + EXIT_S)
"""The fault begins somewhere in a step, and ends a rank when the step uses the device."""


def _exits(kind: FailureKind, error: str) -> Detection:
    return Detection(delay=_AT_STEP_END, kind=kind, code=1, error=error)


_LOST = Detection(delay=Delay(low_s=NODE_GRACE_S, high_s=NODE_GRACE_S), kind=FailureKind.NODE_LOST)
_TIMES_OUT = Detection(
    delay=Delay(low_s=COLLECTIVE_TIMEOUT_S, high_s=COLLECTIVE_TIMEOUT_S),
    kind=FailureKind.KILLED,
    code=signal.SIGABRT,
    error="Watchdog caught collective operation timeout",
    names_node=False,
)
_HANGS = Detection(
    delay=Delay(low_s=3 * P99_STEP * STEP_S, high_s=3 * P99_STEP * STEP_S + HANG_MARGIN_S),
    kind=FailureKind.HUNG,
    names_node=False,
    again=Delay(low_s=_TIMEOUTS.first_step_s(RESTART_S), high_s=_TIMEOUTS.first_step_s(RESTART_S)),
)
_CUDA = "RuntimeError: CUDA error: unspecified launch failure"
_ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
_NCCL = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error"


def _llama(
    name: str,
    count: float,
    detection: Detection,
    *,
    effect: Effect = Effect.STOPS,
    persists: float = 0.0,
    slowdown: float = 0.0,
    detector: str = "",
    watched: Detection | None = None,
) -> Cause:
    return Cause(
        name=name,
        per_day=count / LLAMA_DAYS,
        effect=effect,
        persists=persists,
        slowdown=slowdown,
        detection=detection,
        detector=detector,
        watched=watched,
    )


_MOVED = Detection(
    delay=Delay(low_s=STRAGGLER_STEPS * STEP_S, high_s=STRAGGLER_STEPS * STEP_S), kind=FailureKind.STRAGGLING
)
_DAMAGED = Detection(delay=Delay(high_s=STEP_S), kind=FailureKind.NUMBERS_DAMAGED, names_node=False)


def causes(looks_every_s: float = LOOKS_EVERY_S) -> tuple[Cause, ...]:
    """The faults of a run at which a person looks so often.

    Counts are of Llama 3's table 5. Assumed: switches, cables and system processors hang the run; half of the
    corruptions show as NaN within a step, and of the rest a person learns within three looks; a hot GPU slows the run.
    """
    a_person_sees = Detection(delay=Delay(high_s=looks_every_s), kind=None)
    return (
        _llama(
            "faulty GPU",
            148,
            _exits(FailureKind.GPU_ERROR_UNCLEAR, _CUDA),
            persists=PERSISTENT,
            detector="devices",
            watched=_exits(FailureKind.GPU_FAILED, _CUDA),
        ),
        _llama("GPU memory", 72, _exits(FailureKind.GPU_MEMORY_FAILED, _ECC), persists=PERSISTENT),
        _llama("software bug", 54, _exits(FailureKind.CRASHED, "RuntimeError: a bug")),
        _llama("switch or cable", 35, _TIMES_OUT, persists=PERSISTENT, detector="hangs", watched=_HANGS),
        _llama("unplanned maintenance of a host", 32, _LOST),
        _llama("GPU SRAM", 19, _exits(FailureKind.GPU_MEMORY_FAILED, _ECC), persists=PERSISTENT),
        _llama("GPU system processor", 17, _TIMES_OUT, persists=PERSISTENT, detector="hangs", watched=_HANGS),
        _llama(
            "network adapter",
            7,
            _exits(FailureKind.NCCL_SYSTEM_CALL_FAILED, _NCCL),
            persists=PERSISTENT,
            detector="devices",
            watched=_exits(FailureKind.NIC_FAILED, _NCCL),
        ),
        _llama("hang of unknown cause", 7, _TIMES_OUT, detector="hangs", watched=_HANGS),
        _llama(
            "corruption that shows as NaN",
            3,
            a_person_sees,
            effect=Effect.DAMAGES,
            persists=PERSISTENT,
            detector="numbers",
            watched=_DAMAGED,
        ),
        _llama(
            "silent corruption",
            3,
            Detection(delay=Delay(high_s=3 * looks_every_s), kind=None),
            effect=Effect.DAMAGES,
            persists=PERSISTENT,
            detector="comparison",
            watched=Detection(delay=Delay(high_s=VERIFY_STEPS * STEP_S), kind=FailureKind.CORRUPTED),
        ),
        _llama(
            "hot GPU",
            6,
            a_person_sees,
            effect=Effect.SLOWS,
            persists=1.0,
            slowdown=SLOWDOWN,
            detector="stragglers",
            watched=_MOVED,
        ),
        _llama("SSD, power, chassis, board, CPU, memory", 14, _LOST),
        _llama("dependency", 2, _exits(FailureKind.CRASHED, "RuntimeError: a dependency failed")),
        Cause(
            name="slow node",
            per_day=SLOW_NODES * NODES / DAYS,
            effect=Effect.SLOWS,
            persists=1.0,
            slowdown=SLOWDOWN,
            detection=a_person_sees,
            detector="stragglers",
            watched=_MOVED,
        ),
    )


CAUSES = causes()
DETECTORS = frozenset(cause.detector for cause in CAUSES if cause.detector)


def fleet() -> Fleet:
    """The run of the month."""
    past = FailureHistory(nodes=NODES, failures=LLAMA_INTERRUPTIONS, node_s=NODES * LLAMA_DAYS * DAY_S)
    return Fleet(
        nodes=NODES,
        gpus_per_node=GPUS_PER_NODE,
        step_s=STEP_S,
        checkpoint_every_s=young_interval_s(past, cost_s=SAVE_STALL_S, took_s=0.0),
        checkpoint_cost_s=SAVE_STALL_S,
        restart_s=RESTART_S + FANOUT_S,
        requeue_s=REQUEUE_S + FANOUT_S,
        checks_s=CHECKS_S,
        person_s=PERSON_RESTARTS_S,
        standbys=standby_count(NODES),
        repair_s=STANDBY_WINDOW_S,
    )
