"""Real runs of replicas that train together (tests/programs/replica_trainer.py), and the checks at their end."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch
from tests.runs.conftest import Runs, WatchedRun

from holdfast.events import AttemptStarted, Outcome, StepCommitted

SHARE = 6
"""Samples of a step, of all replicas together, in the program."""

WARMUP_STEPS = 10
"""Steps after which the step time is known."""

REPLICA_TRAINER = Path(__file__).parents[1] / "programs" / "replica_trainer.py"


def start_and_step(
    runs: Runs, replicas: int, *overrides: str, beyond: int = WARMUP_STEPS, target: str = "local"
) -> WatchedRun:
    """Start replicas of one rank each, and return when all have committed steps together.

    Several steps: before there are any, a timeout derived from a rank's own steps is ten minutes.
    """
    watched = start_replicas(runs, replicas, *overrides, target=target)
    for replica in range(replicas):
        wait_for_step(watched, replica, 0, beyond=beyond)
    return watched


def start_replicas(
    runs: Runs, replicas: int, *overrides: str, target: str = "local", program: Path = REPLICA_TRAINER
) -> WatchedRun:
    """Start replicas of one rank each."""
    command = (sys.executable, str(program), "0.05", str(runs.base))
    given = (f"recovery.replicas={replicas}", *overrides)
    return runs.start(*command, nodes=replicas, target=target, overrides=given)


def wait_for_step(watched: WatchedRun, replica: int, attempt: int, beyond: int = 0) -> int:
    """Wait until a replica has committed a step of an attempt; the step."""

    def fits(step: StepCommitted) -> bool:
        return (step.replica, step.attempt) == (replica, attempt) and step.step > beyond

    known = [step for step in watched.all(StepCommitted) if fits(step)]
    return (known[0] if known else watched.wait_for(StepCommitted, fits)).step


def finish_identical(runs: Runs, watched: WatchedRun, replicas: int) -> None:
    """End the training: all replicas have bit-exact weights, and each step and sample counted once."""
    (runs.base / "enough").touch()
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    (step, weights), *others = (torch.load(runs.base / f"{replica}.end") for replica in range(replicas))
    for other_step, other in others:
        assert other_step == step
        assert all(torch.equal(weights[name], other[name]) for name in weights)
    committed = {number for one in watched.all(StepCommitted) for number in range(one.first, one.step + 1)}
    assert committed == set(range(1, step + 1))


def assert_counted_once(runs: Runs, replicas: int) -> None:
    """No attempt repeated a step, no sample was in it twice, and no replica continued from another version of it.

    A step has two versions if a replica commits it and dies before any other knows: the others repeat the step.
    """
    shares: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    """Samples of each version of each step; a version is a digest of the weights."""
    continued: set[tuple[int, str]] = set()
    of_step = SHARE // replicas * replicas
    for note in runs.base.glob("*.commits"):
        commits = [line.split(" ") for line in note.read_text().splitlines()]
        steps = [int(step) for step, *_ in commits]
        assert steps == sorted(set(steps)), f"{note.name} repeats a step"
        for step, _, digest, samples in commits:
            shares[int(step), digest] += map(int, filter(None, samples.split(",")))
        continued |= {(int(step), digest) for step, _, digest, _ in commits[:-1]}
    assert len(continued) == len({step for step, _ in continued}), "replicas continued from two versions of a step"
    for (step, _), samples in shares.items():
        assert len(samples) == len(set(samples)), f"step {step} has a sample twice: {samples}"
        assert set(samples) <= set(range(of_step * (step - 1), of_step * step)), f"step {step} has another's: {samples}"


def attempts(watched: WatchedRun) -> list[tuple[int, int]]:
    return sorted((event.replica, event.attempt) for event in watched.all(AttemptStarted))
