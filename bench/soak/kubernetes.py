"""Soak on the lab: one job of two nodes, killed at given steps in every way a cluster has.

The plan is drawn from the seed: the kinds of kills, their order and their steps. After each kill the ranks wait at a
gate until its recovery was seen. At the end, state and samples must be bit-exact with those of a run without faults,
and nothing may be left in the cluster after `cancel`.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import lab_cluster
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

FIRST_STEP, GAP_STEPS, ROOM_STEPS = 15, (3, 25), 12
"""Of the plan: the first kill's step, steps from a gate to the next kill, and from a kill to the gate after it."""
BATCH, STEP_S = 16, 0.05
"""Samples that each rank takes in a step, and the duration of a step."""
RECOVERED_S = 1200.0
"""Longest time for a recovery, on a machine with other load."""
STOP_GRACE_S = 5
"""Grace period of ranks that are stopped: they wait at a gate, where they cannot save."""
NODES = 2


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill of the plan."""

    what: str
    index: int
    step: int

    @property
    def gate(self) -> int:
        """The step before which the ranks wait until they have recovered from it."""
        return self.step + ROOM_STEPS

    def __str__(self) -> str:
        return f"{self.what} {self.index} at step {self.step}"


def plan(seed: int, kills: int) -> tuple[Kill, ...]:
    """The kills of a seed: every kind comes once before one repeats."""
    chance, step, drawn = random.Random(seed), FIRST_STEP, list[Kill]()
    kinds = itertools.chain.from_iterable(chance.sample(tuple(KINDS), len(KINDS)) for _ in itertools.count())
    for what in itertools.islice(kinds, kills):
        drawn.append(Kill(what=what, index=chance.randrange(NODES), step=step))
        step = drawn[-1].gate + chance.randint(*GAP_STEPS)
    return tuple(drawn)


# The kinds


def _rank(site: lab_cluster.LabSite, run: RunDir, kill: Kill) -> None:
    del site
    api.inject_fault(run, target=FaultTarget.RANK, index=kill.index, action=FaultAction.KILL)


def _pod(site: lab_cluster.LabSite, run: RunDir, kill: Kill) -> None:
    del run
    site.kubectl("delete", "pod", _pods(site, "node")[kill.index], "--wait=false")


def _node(site: lab_cluster.LabSite, run: RunDir, kill: Kill) -> None:
    del run
    site.lab.set_power(_machine(site, _pods(site, "node")[kill.index]), on=False)


def _controller(site: lab_cluster.LabSite, run: RunDir, kill: Kill) -> None:
    del run, kill
    if there := _pods(site, "controller"):  # it may be gone already
        site.kubectl("delete", "pod", *there, "--grace-period=0", "--force")


def _apiserver(site: lab_cluster.LabSite, run: RunDir, kill: Kill) -> None:
    del run
    site.lab.kill("kube-apiserver")
    time.sleep(1.0 + 3.0 * kill.index)
    site.lab.start("kube-apiserver")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of kill."""

    do: Callable[[lab_cluster.LabSite, RunDir, Kill], None]
    restarts: bool
    """Whether its ranks restart."""


KINDS: Mapping[str, Kind] = {
    "rank": Kind(do=_rank, restarts=True),
    "pod": Kind(do=_pod, restarts=True),
    "node": Kind(do=_node, restarts=True),
    "controller": Kind(do=_controller, restarts=False),
    "apiserver": Kind(do=_apiserver, restarts=False),
}


def soak(options: argparse.Namespace, _: Path) -> SoakOutcome:
    """Soak, and print the outcome."""
    kills = plan(options.seed, options.faults)
    with lab_cluster.site(options.state and options.state.absolute()) as site:
        shutil.copy(PROGRAMS / "gated.py", site.folder)
        unfailed = _unfailed(site, kills)
        run, out = _soaked(site, kills)
        problems = [*_unequal(unfailed, out), *_unsampled(out, _steps(kills))]
        with contextlib.suppress(HoldfastError):
            api.cancel(run)  # it may have ended already
        for _ in api.follow(run):
            pass
        lab_cluster.until(lambda: not site.left(), lab_cluster.CLEANUP_TIMEOUT_S, lambda: f"left: {site.left()}")
        return _tell(_done(site), problems, kills)


def _steps(kills: Sequence[Kill]) -> int:
    return kills[-1].gate + ROOM_STEPS


def _started(site: lab_cluster.LabSite, name: str, kills: Sequence[Kill], step_s: float) -> tuple[RunDir, Path]:
    """The run of this name with its directory: found, or started."""
    out = site.folder / name
    if found := [run for run in api.runs() if run.run_id.startswith(name)]:
        api.restart_controller(found[0])
        return found[0], out
    out.mkdir(exist_ok=True)
    words = (out, _steps(kills), BATCH, step_s, *(kill.gate for kill in kills))
    fields = {"checkpoint": "{path: " + name + ", every_steps: 5}", "recovery.stop_grace_s": STOP_GRACE_S}
    job = site.job("python", "gated.py", *map(str, words), name=name, **fields)
    return api.start(job, "lab", base=site.folder), out


def _unfailed(site: lab_cluster.LabSite, kills: Sequence[Kill]) -> Path:
    """The run without faults."""
    out, cleared = site.folder / "unfailed", site.folder / "cleared"
    if not _ended(out):
        run, out = _started(site, "unfailed", kills, 0.0)
        _open(out, kills)
        _until_ended(run, out)
    if not cleared.exists():
        site.clear()
        cleared.touch()
    return out


def _open(out: Path, kills: Iterable[Kill]) -> None:
    """Open the gates after these kills."""
    for kill in kills:
        (out / f"gate-{kill.gate}").touch()


def _until_ended(run: RunDir, out: Path) -> None:
    lab_cluster.until(lambda: _ended(out), RECOVERED_S, lambda: _story(run))


def _ended(out: Path) -> bool:
    return all((out / f"end-{rank}.pt").exists() for rank in range(NODES))


def _soaked(site: lab_cluster.LabSite, kills: Sequence[Kill]) -> tuple[RunDir, Path]:
    """The run after all of its kills; one that an interruption left half done is repeated."""
    run, out = _started(site, "soak", kills, STEP_S)
    done = _done(site)
    _switch_on(site)
    _open(out, kills[: len(done)])
    for number, kill in list(enumerate(kills))[len(done) :]:
        lab_cluster.until(lambda: len(_pods(site, "node")) == NODES, RECOVERED_S, lambda: _story(run))
        _until(run, lambda events, kill=kill: _step(events) >= kill.step)
        before = api.events(run)
        began = time.monotonic()
        KINDS[kill.what].do(site, run, kill)
        _until(run, lambda events, kill=kill, before=before: _recovered(run, kill, before, events[len(before) :]))
        seconds = time.monotonic() - began
        with (site.folder / "done.jsonl").open("a") as file:
            file.write(json.dumps({"what": kill.what, "seconds": seconds}) + "\n")
        say(f"  {number + 1:3d}/{len(kills)}  {kill}: at the gate after {seconds:.1f} s")
        _switch_on(site)
        _open(out, [kill])
    _until_ended(run, out)
    return run, out


def _switch_on(site: lab_cluster.LabSite) -> None:
    for machine in site.kubectl("get", "nodes", "-o", "name").split():
        site.lab.set_power(machine.removeprefix("node/"), on=True)


def _done(site: lab_cluster.LabSite) -> list[dict[str, Any]]:
    """The kills that the run has recovered from."""
    path = site.folder / "done.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _step(events: Sequence[AnyEvent]) -> int:
    return max((event.step for event in events if isinstance(event, StepCommitted)), default=0)


def _recovered(run: RunDir, kill: Kill, before: Sequence[AnyEvent], new: Sequence[AnyEvent]) -> bool:
    """Whether the ranks have reached the gate, in a new attempt where the kill causes one, with every pod present."""
    saved = any(isinstance(event, CheckpointCommitted) and event.step >= kill.gate - 1 for event in (*before, *new))
    # A machine that loses power does not report the last step that it took.
    saved = saved or any(
        f"resumed after step {kill.gate - 1} " in path.read_text() for path in run.logs.glob("attempt-*/rank-0.log")
    )
    attempt = max((event.attempt for event in before if isinstance(event, AttemptStarted)), default=0)
    if KINDS[kill.what].restarts:
        before, attempt = (), attempt + 1
    came = any(
        isinstance(event, StepCommitted) and event.attempt >= attempt and event.step >= kill.gate - 1
        for event in (*before, *new)
    )
    if saved and KINDS[kill.what].restarts:
        # Ranks with a stop order have saved right before the gate. The next attempt commits no step until it is
        # opened; that it waits there is seen by the step of the next kill.
        began = {event.node for event in new if isinstance(event, RanksStarted) and event.attempt >= attempt}
        came = came or len(began) == NODES
    if kill.what != "controller":
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


def _pods(site: lab_cluster.LabSite, part: str) -> list[str]:
    """Names of the permanent pods of a part, in order."""
    found = json.loads(site.kubectl("get", "pods", "-l", f"holdfast/part={part}", "-o", "json"))["items"]
    there = [pod for pod in found if pod["status"]["phase"] in ("Pending", "Running")]
    return sorted(pod["metadata"]["name"] for pod in there if "deletionTimestamp" not in pod["metadata"])


def _machine(site: lab_cluster.LabSite, pod: str) -> str:
    return site.kubectl("get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")


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


def _tell(done: Sequence[Mapping[str, Any]], problems: Sequence[str], kills: Sequence[Kill]) -> SoakOutcome:
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
    say(f"recovered {len(done)}/{len(kills)}; state {'differs' if problems else 'bit-exact'}; nothing left")
    say(table(("killed", "times", "until at the gate, median", "longest"), rows))
    for problem in problems:
        say(f"\nFAILED: {problem}")
    return SoakOutcome(
        faults=Counter(f"kill {each['what']}" for each in done),
        recoveries=len(done),
        failed=len(kills) - len(done),
        wrong=len(problems),
        steps=_steps(kills),
        minutes=round(sum(each["seconds"] for each in done) / 60, 1),
    )
