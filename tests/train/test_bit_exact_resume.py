"""Two ranks killed without warning at the worst moments end bit-exact with two that were not."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.train import loop
from tests.train.fork_context import forks

STEPS = 14
FAULTS = ("1:6:computing", "0:8:unsealed", "0:12:unnamed")
DEADLINE_S = 200.0


def run(folder: Path, name: str, fault: str = "-1:-1:never") -> list[int | None]:
    """Two ranks to their end; when one of them kills itself the other is killed too, as an agent does it."""
    variables = {
        "WORLD_SIZE": "2",
        "RENDEZVOUS": str(folder / f"meet-{name}-{fault}"),
        "FAULT": fault,
        "HOLDFAST_CHECKPOINT_PATH": str(folder / name),
        "HOLDFAST_CHECKPOINT_EVERY_STEPS": "4",
    }
    given = [(variables | {"RANK": str(rank)}, folder / name) for rank in range(2)]
    ranks = [forks.Process(target=train, args=each) for each in given]
    for rank in ranks:
        rank.start()
    doomed = int(fault.partition(":")[0])
    if doomed >= 0:
        ranks[doomed].join(DEADLINE_S)
        ranks[1 - doomed].kill()
    for rank in ranks:
        rank.join(DEADLINE_S)
    return [rank.exitcode for rank in ranks]


def train(variables: Mapping[str, str], out: Path) -> None:
    """The loop in a fork."""
    os.environ.update(variables)
    loop.main(STEPS, str(out))


@pytest.mark.slow
def test_weights_after_kills_in_a_step_and_in_saves_equal_those_of_an_unfailed_run(tmp_path: Path):
    assert run(tmp_path, "unfailed") == [0, 0]
    for fault in FAULTS:
        assert run(tmp_path, "failed", fault)[int(fault[0])] == -signal.SIGKILL
    assert run(tmp_path, "failed") == [0, 0]

    for rank in range(2):
        unfailed = torch.load(tmp_path / f"unfailed.{rank}")
        failed = torch.load(tmp_path / f"failed.{rank}")
        assert all(torch.equal(one, other) for one, other in zip(unfailed, failed, strict=True))
    assert not list((tmp_path / "failed").glob("writing-*/*"))
