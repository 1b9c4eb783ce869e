"""Finds where in the input one run ends and the next begins: by jobs, long pauses, and restarted launchers.

A launcher's attempts are one run: only its own end and its next start separate two. Pure.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from holdfast.diagnose.fact import Fact, ProcessRef
from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.rule import Role
from holdfast.diagnose.rules.torchrun import LAUNCHER_STARTED

RUN_GAP_S = 12 * 3600.0
"""Failures this far apart belong to two runs, or are unrelated; a smaller gap may be a time zone."""
RESTART_GAP_S = 1800.0
"""A launcher that restarts its ranks does so within this time; after that it is another launcher."""

# torch.distributed.elastic.multiprocessing.errors.ChildFailedError:      once, after the last attempt
# subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.
# [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1
# srun: error: n1: task 3: Exited with exit code 1
# slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO JOB REQUEUE ***
_LAUNCHER_EXIT = re.compile(
    r"ChildFailedError|Root Cause \(first|returned non-zero exit status|exits with return code|srun: error: |"
    r"CANCELLED AT |: line \d+: +\d+ +Killed|^Killed"
)
# logs/slurm-4711.out   train-4711.err   train_4711_n0.out
_JOB = re.compile(r"(?:^|/)(?:slurm|[\w.]+)[-_](?P<job>\d{3,12})(?:_\w+)?\.(?:out|err)(?:\.gz|\.zst)?$")
_NODE_CLASSES = frozenset({FailureClass.GPU_XID, FailureClass.OOM_HOST, FailureClass.NODE_LOST, FailureClass.DRIVER})

Times = Mapping[int, float]
"""The times of facts, by their `id`, without those that show nothing."""


def is_failure(fact: Fact) -> bool:
    """Whether it reports a failure, or a consequence of one."""
    return fact.rule.role is not Role.CONTEXT and not fact.rule.performance_only


def split_into_runs(facts: Sequence[Fact]) -> list[list[Fact]]:
    """The facts of each run in the order of the runs; the last one has begun and may show no failure.

    Facts from another time that only node logs have come first: the diagnosed run is the last of the program's own.
    """
    moments = _times(facts)
    jobs = _by_jobs(facts, moments)
    return jobs if len(jobs) > 1 else _of_one_job(facts, moments)


def _of_one_job(facts: Sequence[Fact], moments: Times) -> list[list[Fact]]:
    paused = _by_pauses(facts, moments)
    own = [part for part in paused if not _is_node_log(part)] or paused[-1:]
    others = [part for part in paused if all(part is not each for each in own)]
    return [*others, *(run for part in own for run in _by_launchers(part, moments))]


def _by_jobs(facts: Sequence[Fact], moments: Times) -> list[list[Fact]]:
    """The runs of each scheduler job that files are named after, the job that began last at the end.

    Facts in other files may concern any job; they join the last.
    """
    jobs: dict[int, list[Fact]] = {}
    for fact in facts:
        if job := _JOB.search(fact.source):
            jobs.setdefault(int(job["job"]), []).append(fact)
    numbers = sorted(job for job, own in jobs.items() if any(map(is_failure, own)))
    if len(numbers) < 2:
        return []
    jobs[numbers[-1]] += [fact for fact in facts if _JOB.search(fact.source) is None]
    return [run for number in numbers for run in _of_one_job(jobs[number], moments)]


def _is_node_log(facts: Iterable[Fact]) -> bool:
    """Whether only kernels and clusters report a failure, such as in a node's log of three weeks."""
    return all(
        fact.process.rank is None and fact.rule.role is Role.CAUSE and fact.rule.classes[0] in _NODE_CLASSES
        for fact in facts
        if is_failure(fact)
    )


def _times(facts: Sequence[Fact]) -> Times:
    """The time of each fact: by its own clock, else by the nearest of its source."""
    found: dict[int, float] = {}
    for source in _by_source(facts).values():
        last = next((at for fact in source if (at := _logged_at(fact)) is not None), None)
        for fact in source:
            at = _logged_at(fact)
            last = last if at is None else at
            if last is not None:
                found[id(fact)] = last
    return found


def _logged_at(fact: Fact) -> float | None:
    return fact.at_of_previous_line if fact.at is None else fact.at


def _by_source(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    """The facts of each source, in the order of its lines."""
    found: dict[str, list[Fact]] = {}
    for fact in facts:
        found.setdefault(fact.source, []).append(fact)
    return {source: sorted(each, key=lambda fact: fact.line) for source, each in found.items()}


def _by_pauses(facts: Sequence[Fact], moments: Times) -> list[list[Fact]]:
    """Facts without a long pause between them; facts on the environment before any failure join the next group."""
    waits = (int(timeout_ms) / 1000 for fact in facts if (timeout_ms := fact.values.get("timeout_ms", "")).isdecimal())
    pause = max(RUN_GAP_S, 2 * max(waits, default=0.0))
    times = sorted(moments.values())
    cuts = [later for sooner, later in pairwise(times) if later - sooner > pause]
    parts: list[list[Fact]] = [[] for _ in range(len(cuts) + 1)]
    for fact in facts:
        at = moments.get(id(fact))
        parts[-1 if at is None else bisect_right(cuts, at)].append(fact)
    return _merge_until_failure(parts)


def _merge_until_failure(parts: Iterable[list[Fact]]) -> list[list[Fact]]:
    """The parts of which each except the last shows a failure."""
    found: list[list[Fact]] = []
    waiting: list[Fact] = []
    for part in parts:
        waiting += part
        if any(map(is_failure, part)):
            found.append(waiting)
            waiting = []
    return [*found, waiting] if waiting or not found else found


def _by_launchers(facts: Sequence[Fact], moments: Times) -> list[list[Fact]]:
    """Facts of one stretch of time, split where launchers had ended and start again."""
    cuts = {source: [fact.line for fact in _run_starts(each, moments)] for source, each in _by_source(facts).items()}
    leader = max(cuts, key=lambda source: len(cuts[source]), default="")
    if not cuts.get(leader):
        return [list(facts)]
    begun = [moments.get(id(fact)) for fact in facts if fact.source == leader and fact.line in cuts[leader]]
    times = sorted(at for at in begun if at is not None)
    count = len(cuts[leader])
    parts: list[list[Fact]] = [[] for _ in range(count + 1)]
    for fact in facts:
        own, at = cuts[fact.source], moments.get(id(fact))
        if own:
            number = count - len(own) + bisect_right(own, fact.line)
        else:
            number = count if at is None or len(times) < count else bisect_right(times, at)
        parts[min(number, count)].append(fact)
    return _merge_until_failure(parts)


def _run_starts(facts: Iterable[Fact], moments: Times) -> Iterator[Fact]:
    """The facts of one source with which a run begins after another has failed."""
    begun: set[ProcessRef] = set()
    lives: dict[tuple[str | None, int | None], int | None] = {}
    failed: Fact | None = None
    ended = False
    for fact in facts:
        if is_failure(fact):
            failed, ended = fact, ended or _LAUNCHER_EXIT.search(fact.text) is not None
            continue
        writer = ProcessRef(host=fact.process.host, node=fact.process.node)
        if fact.rule is LAUNCHER_STARTED:
            again = ended or (writer in begun and writer != ProcessRef())
            begun.add(writer)
        elif fact.rule.code == "comm-rank":
            alive = fact.process.host, fact.process.rank
            new = lives.setdefault(alive, fact.process.pid) != fact.process.pid
            lives[alive] = fact.process.pid
            again = new and (ended or _is_long_after(fact, failed, moments))
        else:
            continue
        if failed is not None and again:
            yield fact
            failed, ended, begun = None, False, {writer}


def _is_long_after(fact: Fact, failed: Fact | None, moments: Times) -> bool:
    at, before = moments.get(id(fact)), moments.get(id(failed))
    return at is not None and before is not None and at - before > RESTART_GAP_S
