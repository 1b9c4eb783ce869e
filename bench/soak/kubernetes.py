"""Soak on the lab: one job of two nodes, which loses parts and machines at given steps in every way a cluster has.

The plan is drawn from the seed: the kinds of faults (kills, a failed device, preemptions, drains and evictions), their
order and their steps. After each fault the ranks wait at a gate until its recovery was seen. At the end, state and
samples must be bit-exact with those of a run without faults, and nothing may be left in the cluster after `cancel`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import lab_cluster, lab_disruptions
from bench.contenders import PROGRAMS
from bench.paired_stats import percentile, say, table
from bench.soak.faults import SHOWN, RunStuck
from bench.soak.ledger import SoakOutcome
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentConnected,
    AnyEvent,
    AttemptStarted,
    CheckpointCommitted,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    RanksStarted,
    RunFinished,
    StepCommitted,
)
from holdfast.run_dir import RunDir
from lab import NodeState

FIRST_STEP, GAP_STEPS, ROOM_STEPS = 15, (3, 25), 12
"""Of the plan: the first fault's step, steps from a gate to the next fault, and from a fault to the gate after it."""
BATCH, STEP_S = 16, 0.05
"""Samples that each rank takes in a step, and the duration of a step."""
RECOVERED_S = 1200.0
"""Longest time for a recovery, on a machine with other load."""
STOP_GRACE_S = 5
"""Grace period of ranks that are stopped: they wait at a gate, where they cannot save."""
NODES = 2


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the plan."""

    what: str
    index: int
    step: int

    @property
    def gate(self) -> int:
        """The step before which the ranks wait until they have recovered from it."""
        return self.step + ROOM_STEPS

    def __str__(self) -> str:
        return f"{self.what} {self.index} at step {self.step}"


def plan(seed: int, count: int) -> tuple[Fault, ...]:
    """The faults of a seed: every kind comes once before one repeats."""
    chance, step, drawn = random.Random(seed), FIRST_STEP, list[Fault]()
    kinds = itertools.chain.from_iterable(chance.sample(tuple(KINDS), len(KINDS)) for _ in itertools.count())
    for what in itertools.islice(kinds, count):
        drawn.append(Fault(what=what, index=chance.randrange(NODES), step=step))
        step = drawn[-1].gate + chance.randint(*GAP_STEPS)
    return tuple(drawn)


# The kinds


def _rank(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
    del site
    api.inject_fault(run, target=FaultTarget.RANK, index=fault.index, action=FaultAction.KILL)


def _node(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
    del run
    site.lab.set_state(site.machine(site.pods("node")[fault.index]), NodeState.OFF)


def _controller(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
    del run, fault
    if there := site.pods("controller"):  # it may be gone already
        site.kubectl("delete", "pod", *there, "--grace-period=0", "--force")


def _device(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
    del site
    api.inject_fault(run, target=FaultTarget.GPU, index=fault.index, action=FaultAction.FAIL)


def _disruption(kind: str) -> Callable[[lab_cluster.LabSite, RunDir, Fault], None]:
    def disrupt(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
        del run
        lab_disruptions.KINDS[kind](site, site.pods("node")[fault.index])

    return disrupt


def _apiserver(site: lab_cluster.LabSite, run: RunDir, fault: Fault) -> None:
    del run
    site.lab.kill("kube-apiserver")
    time.sleep(1.0 + 3.0 * fault.index)
    site.lab.start("kube-apiserver")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault."""

    do: Callable[[lab_cluster.LabSite, RunDir, Fault], None]
    restarts: bool
    """Whether its ranks restart."""


KINDS: Mapping[str, Kind] = {
    "kill rank": Kind(do=_rank, restarts=True),
    "kill node": Kind(do=_node, restarts=True),
    "kill controller": Kind(do=_controller, restarts=False),
    "kill apiserver": Kind(do=_apiserver, restarts=False),
    "fail device": Kind(do=_device, restarts=True),
    **{kind: Kind(do=_disruption(kind), restarts=True) for kind in lab_disruptions.KINDS},
}


def soak(options: argparse.Namespace, _: Path) -> SoakOutcome:
    """Soak, and print the outcome."""
    faults = plan(options.seed, options.faults)
    with lab_cluster.site(options.state and options.state.absolute()) as site:
        shutil.copy(PROGRAMS / "gated.py", site.folder)
        lab_disruptions.prepare(site)
        unfailed = _unfailed(site, faults)
        run, out = _soaked(site, faults)
        problems = [*_unequal(unfailed, out), *_unsampled(out, _steps(faults))]
        with contextlib.suppress(HoldfastError):
            api.cancel(run)  # it may have ended already
        for _ in api.follow(run):
            pass
        lab_cluster.until(lambda: not site.left(), lab_cluster.CLEANUP_TIMEOUT_S, lambda: f"left: {site.left()}")
        return _tell(_done(site), problems, faults)


def _steps(faults: Sequence[Fault]) -> int:
    return faults[-1].gate + ROOM_STEPS


def _started(site: lab_cluster.LabSite, name: str, faults: Sequence[Fault], step_s: float) -> tuple[RunDir, Path]:
    """The run of this name with its directory: found, or started."""
    out = site.folder / name
    if found := [run for run in api.runs() if run.run_id.startswith(name)]:
        api.restart_controller(found[0])
        return found[0], out
    out.mkdir(exist_ok=True)
    words = (out, _steps(faults), BATCH, step_s, *(fault.gate for fault in faults))
    fields = {
        "queue": lab_disruptions.QUEUE,
        "resources.cpu": lab_disruptions.CPUS_PER_NODE,
        "checkpoint": "{path: " + name + ", every_steps: 5}",
        "recovery.stop_grace_s": STOP_GRACE_S,
    }
    job = site.job("python", "gated.py", *map(str, words), name=name, **fields)
    return api.start(job, "lab", base=site.folder), out


def _unfailed(site: lab_cluster.LabSite, faults: Sequence[Fault]) -> Path:
    """The run without faults."""
    out, cleared = site.folder / "unfailed", site.folder / "cleared"
    if not _ended(out):
        run, out = _started(site, "unfailed", faults, 0.0)
        _open(out, faults)
        _until_ended(run, out)
    if not cleared.exists():
        site.clear()
        cleared.touch()
    return out


def _open(out: Path, faults: Iterable[Fault]) -> None:
    """Open the gates after these faults."""
    for fault in faults:
        (out / f"gate-{fault.gate}").touch()


def _until_ended(run: RunDir, out: Path) -> None:
    lab_cluster.until(lambda: _ended(out), RECOVERED_S, lambda: _story(run))


def _ended(out: Path) -> bool:
    return all((out / f"end-{rank}.pt").exists() for rank in range(NODES))


def _soaked(site: lab_cluster.LabSite, faults: Sequence[Fault]) -> tuple[RunDir, Path]:
    """The run after all of its faults; one that an interruption left half done is repeated."""
    run, out = _started(site, "soak", faults, STEP_S)
    done = _done(site)
    _repair(site)
    _open(out, faults[: len(done)])
    for number, fault in list(enumerate(faults))[len(done) :]:
        lab_cluster.until(lambda: len(site.pods("node")) == NODES, RECOVERED_S, lambda: _story(run))
        _until(run, lambda events, fault=fault: _step(events) >= fault.step)
        before = api.events(run)
        began = time.monotonic()
        KINDS[fault.what].do(site, run, fault)
        _until(run, lambda events, fault=fault, before=before: _recovered(run, fault, before, events[len(before) :]))
        seconds = time.monotonic() - began
        with (site.folder / "done.jsonl").open("a") as file:
            file.write(json.dumps({"what": fault.what, "seconds": seconds}) + "\n")
        say(f"  {number + 1:3d}/{len(faults)}  {fault}: at the gate after {seconds:.1f} s")
        _repair(site, (fault.what,))
        _open(out, [fault])
    _until_ended(run, out)
    return run, out


def _repair(site: lab_cluster.LabSite, kinds: Collection[str] = tuple(KINDS)) -> None:
    """Every machine takes pods again after faults of these kinds."""
    if "kill node" in kinds:
        for machine in site.kubectl("get", "nodes", "-o", "name").split():
            site.lab.set_state(machine.removeprefix("node/"), NodeState.ON)
    if not lab_disruptions.KINDS.keys().isdisjoint(kinds):
        lab_disruptions.restore(site)
    if "fail device" in kinds:
        for machine in api.machines("lab", base=site.folder).machines:
            with contextlib.suppress(HoldfastError):  # nothing is held against it
                api.release_machine(machine.name, "lab", base=site.folder)


def _done(site: lab_cluster.LabSite) -> list[dict[str, Any]]:
    """The faults that the run has recovered from."""
    path = site.folder / "done.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _step(events: Sequence[AnyEvent]) -> int:
    return max((event.step for event in events if isinstance(event, StepCommitted)), default=0)


def _recovered(run: RunDir, fault: Fault, before: Sequence[AnyEvent], new: Sequence[AnyEvent]) -> bool:
    """Whether the ranks have reached the gate, in a new attempt where the fault causes one, with every pod present."""
    saved = any(isinstance(event, CheckpointCommitted) and event.step >= fault.gate - 1 for event in (*before, *new))
    # A machine that loses power does not report the last step that it took.
    saved = saved or any(
        f"resumed after step {fault.gate - 1} " in path.read_text() for path in run.logs.glob("attempt-*/rank-0.log")
    )
    attempt = max((event.attempt for event in before if isinstance(event, AttemptStarted)), default=0)
    if KINDS[fault.what].restarts:
        before, attempt = (), attempt + 1
    came = any(
        isinstance(event, StepCommitted) and event.attempt >= attempt and event.step >= fault.gate - 1
        for event in (*before, *new)
    )
    if saved and KINDS[fault.what].restarts:
        # Ranks with a stop order have saved right before the gate. The next attempt commits no step until it is
        # opened; that it waits there is seen by the step of the next fault.
        began = {event.node for event in new if isinstance(event, RanksStarted) and event.attempt >= attempt}
        came = came or len(began) == NODES
    if fault.what != "kill controller":
        return came
    lives = [index for index, event in enumerate(new) if isinstance(event, ControllerStarted)]
    joined = {event.node for event in new[lives[0] :] if isinstance(event, AgentConnected)} if lives else set[int]()
    return came and len(joined) == NODES


def _until(run: RunDir, reached: Callable[[Sequence[AnyEvent]], bool]) -> None:
    """Wait until a run's log meets a condition."""

    def shown() -> bool:
        events = api.events(run)
        if any(isinstance(event, RunFinished) for event in events):
            raise RunStuck(f"the run has ended\n{_story(run)}")
        return reached(events)

    lab_cluster.until(shown, RECOVERED_S, lambda: _story(run))


def _story(run: RunDir) -> str:
    told = [event for event in api.events(run) if not isinstance(event, StepCommitted | CheckpointCommitted)]
    return "\n".join(map(event_line, told[-SHOWN:]))


# Outcome


def _unequal(unfailed: Path, soaked: Path) -> list[str]:
    """Where the last states differ from those of the run without faults."""
    digests = {
        end.name: [_digest(folder / end.name) for folder in (unfailed, soaked)] for end in unfailed.glob("end-*.pt")
    }
    return [f"{name} differs" for name, (wanted, found) in digests.items() if wanted != found]


def _digest(end: Path) -> str:
    import torch

    model, optimizer = torch.load(end)
    tensors = [*model.values(), *(value for state in optimizer["state"].values() for value in state.values())]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


def _unsampled(out: Path, steps: int) -> list[str]:
    """Samples that were not in exactly one kept step: that of the last attempt that took it."""
    kept: dict[int, tuple[int, list[int]]] = {}
    for path in out.glob("samples-*-*.txt"):
        attempt = int(path.name.split("-")[1])
        for text in path.read_text().splitlines():
            step, first, last = map(int, text.split())
            known, samples = kept.get(step, (attempt, []))
            if attempt >= known:
                kept[step] = (attempt, [*(samples if attempt == known else ()), *range(first, last)])
    counts = Counter(itertools.chain.from_iterable(samples for _, samples in kept.values()))
    wanted = range(steps * BATCH * NODES)
    wrong = [sample for sample in wanted if counts[sample] != 1] + [each for each in counts if each not in wanted]
    return [f"{len(wrong)} samples were not in exactly one step, such as {wrong[:5]}"] if wrong else []


def _tell(done: Sequence[Mapping[str, Any]], problems: Sequence[str], faults: Sequence[Fault]) -> SoakOutcome:
    rows = [
        (
            what,
            str(len(seconds := [each["seconds"] for each in done if each["what"] == what])),
            f"{percentile(seconds, 50):.1f} s",
            f"{max(seconds):.1f} s",
        )
        for what in sorted({each["what"] for each in done})
    ]
    say("")
    say(f"recovered {len(done)}/{len(faults)}; state {'differs' if problems else 'bit-exact'}; nothing left")
    say(table(("fault", "times", "until at the gate, median", "longest"), rows))
    for problem in problems:
        say(f"\nFAILED: {problem}")
    return SoakOutcome(
        faults=Counter(each["what"] for each in done),
        recoveries=len(done),
        failed=len(faults) - len(done),
        wrong=len(problems),
        steps=_steps(faults),
        minutes=round(sum(each["seconds"] for each in done) / 60, 1),
    )
