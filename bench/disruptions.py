"""Announced disruptions on the lab: whether steps are lost, and whether the run resumes bit-exact.

.venv/bin/python -m bench.disruptions [--times 24 | --quick] [--json FILE]

One run of two nodes in a queue of Kueue, disrupted in each way in turn: preempted by a job of higher priority, quota
that it borrowed is reclaimed, its workload is deactivated, a machine is drained (`kubectl drain`), a pod is evicted
(the eviction API), a pod is deleted, a machine gets a NoExecute taint, and a machine gets a taint that announces its
end, as before the end of a spot instance. The run saves no checkpoint otherwise. Each rank records the digest of its
state in each step. A step is lost if it is computed twice. A resumption is bit-exact if all steps until the next
disruption have the digests of a run without disruptions.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import lab_cluster, lab_disruptions, result_file
from bench.contenders import PROGRAMS
from bench.paired_stats import headline, percentile, say, table
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.errors import HoldfastError
from holdfast.events import CheckpointCommitted, StepCommitted
from holdfast.run_dir import RunDir

TIMES, QUICK_TIMES = 24, 8
STEP_S = 0.1
NODES = 2
STEPS = 1_000_000
"""More than any run gets to."""
STEPS_BETWEEN = 15
"""Steps of both ranks before each disruption."""
RESUMED_S = 300.0
"""Longest time for a resumption, on a machine with other load."""
SHOWN = 40
"""Log lines that are shown for a run that does not resume."""


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    rank: int
    attempt: int
    number: int
    digest: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Disruption:
    """One disruption, after which the run resumed."""

    kind: str
    attempt: int
    """The first attempt after it."""
    resumed_s: float
    """Seconds until a step of the next attempt, by all ranks."""


def recorded(out: Path) -> list[Step]:
    """The steps that the ranks have recorded, in order."""
    steps = list[Step]()
    for rank in range(NODES):
        with contextlib.suppress(FileNotFoundError):
            for text in (out / f"steps-{rank}.txt").read_text().splitlines():
                attempt, number, digest, at = text.split()
                steps.append(Step(rank, int(attempt), int(number), digest, float(at)))
    return steps


def lost(steps: Sequence[Step], attempt: int) -> int:
    """Steps before an attempt that it, or a later one, computed again."""
    before = {(step.rank, step.number) for step in steps if step.attempt < attempt}
    return len({number for rank, number in before if (rank, number) in _since(steps, attempt)})


def _since(steps: Sequence[Step], attempt: int) -> set[tuple[int, int]]:
    return {(step.rank, step.number) for step in steps if step.attempt >= attempt}


def main() -> int:
    """Disrupt, and print what was lost."""
    parser = argparse.ArgumentParser(prog="bench.disruptions", description=__doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_TIMES} times, once in each way")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    times = QUICK_TIMES if options.quick else options.times
    headline(f"{times} announced disruptions of a run of {NODES} nodes, real Kueue and Kubernetes, no checkpoint else")
    with _site() as site:
        done, steps = _disrupted(site, list(itertools.islice(itertools.cycle(lab_disruptions.KINDS), times)))
        wanted = _undisturbed(site, max(step.number for step in steps))
    return _tell(done, steps, wanted, options.json)


@contextlib.contextmanager
def _site() -> Generator[lab_cluster.LabSite]:
    with lab_cluster.site() as site:
        shutil.copy(PROGRAMS / "recorded_loop.py", site.folder)
        lab_disruptions.prepare(site)
        yield site


def _start(site: lab_cluster.LabSite, name: str, steps: int, step_s: float) -> tuple[RunDir, Path]:
    out = site.out()
    fields = {
        "queue": lab_disruptions.QUEUE,
        "resources.cpu": lab_disruptions.CPUS_PER_NODE,
        "checkpoint": "{path: " + name + ", every_steps: 1000000}",
    }
    job = site.job("python", "recorded_loop.py", str(out), str(steps), str(step_s), name=name, **fields)
    return api.start(job, "lab", base=site.folder), out


def _disrupted(site: lab_cluster.LabSite, kinds: Sequence[str]) -> tuple[list[Disruption], list[Step]]:
    run, out = _start(site, "disrupted", STEPS, STEP_S)
    done = list[Disruption]()
    attempt = -1
    for number, kind in enumerate(kinds):
        attempt = _until_steps(run, out, attempt)
        pod = site.pods("node")[number // len(lab_disruptions.KINDS) % NODES]
        began = time.time()
        lab_disruptions.KINDS[kind](site, pod)
        after = _until_steps(run, out, attempt, 1)
        resumed_s = max(
            min(s.at for s in recorded(out) if (s.rank, s.attempt) == (rank, after)) for rank in range(NODES)
        )
        done.append(Disruption(kind=kind, attempt=after, resumed_s=resumed_s - began))
        again = lost(recorded(out), after)
        say(f"  {number + 1:3d}/{len(kinds)}  {kind}: {again} steps lost, resumed after {done[-1].resumed_s:.1f} s")
        if again:
            say(_story(run))
        lab_disruptions.restore(site)
        attempt = after - 1
    _until_steps(run, out, attempt)
    steps = recorded(out)
    api.cancel(run)
    for _ in api.follow(run):
        pass
    site.clear()
    return done, steps


def _until_steps(run: RunDir, out: Path, after: int, count: int = STEPS_BETWEEN) -> int:
    """Wait until all ranks have taken steps in one attempt after another; return its number."""

    def attempts() -> list[int]:
        steps = [step for step in recorded(out) if step.attempt > after]
        known = {step.attempt for step in steps}
        done = {
            each: min(sum((s.attempt, s.rank) == (each, rank) for s in steps) for rank in range(NODES))
            for each in known
        }
        return [each for each, taken in done.items() if taken >= count]

    lab_cluster.until(lambda: bool(attempts()), RESUMED_S, lambda: _story(run))
    return max(attempts())


def _story(run: RunDir) -> str:
    told = [event for event in api.events(run) if not isinstance(event, StepCommitted | CheckpointCommitted)]
    return "\n".join(map(event_line, told[-SHOWN:]))


def _undisturbed(site: lab_cluster.LabSite, steps: int) -> Mapping[tuple[int, int], str]:
    """The digest of each step of each rank in a run without disruptions."""
    run, out = _start(site, "undisturbed", steps, 0.0)
    with contextlib.suppress(HoldfastError):
        for _ in api.follow(run):
            pass
    return {(step.rank, step.number): step.digest for step in recorded(out)}


def _tell(
    done: Sequence[Disruption], steps: Sequence[Step], wanted: Mapping[tuple[int, int], str], path: Path | None
) -> int:
    again = {each.attempt: lost(steps, each.attempt) for each in done}
    ends = [*(each.attempt for each in done[1:]), sys.maxsize]
    exact = {
        each.attempt: all(
            wanted.get((step.rank, step.number)) == step.digest for step in steps if each.attempt <= step.attempt < end
        )
        for each, end in zip(done, ends, strict=True)
    }
    rows = [
        (
            kind,
            str(len(those := [each for each in done if each.kind == kind])),
            str(sum(again[each.attempt] for each in those)),
            f"{sum(exact[each.attempt] for each in those)}/{len(those)}",
            f"{percentile([each.resumed_s for each in those], 50):.1f} s",
        )
        for kind in lab_disruptions.KINDS
        if any(each.kind == kind for each in done)
    ]
    say("")
    say(table(("disruption", "times", "steps lost", "resumed bit-exact", "until all ranks step, median"), rows))
    claim = f"{len(done)} times preempted, drained or evicted"
    wrong = sum(not each for each in exact.values())
    results = [
        result_file.absolute(f"{claim}: steps lost", sum(again.values()), "steps", goal=0, decimals=0),
        result_file.absolute(f"{claim}: not resumed bit-exact", wrong, "times", goal=0, decimals=0),
    ]
    result_file.save(path, "Announced disruptions on Kubernetes", results)
    return 1 if wrong or any(again.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
