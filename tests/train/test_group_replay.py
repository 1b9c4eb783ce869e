"""A Session in a replay: it repeats the steps after a checkpoint, leaves a digest, and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.train import loop
from tests.train.fork_context import forks

from holdfast.errors import HoldfastError
from holdfast.protocol import replay_env
from holdfast.train.ft.group_replay import GroupReplay
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig

STEPS = 6
DEADLINE_S = 100.0


def train(variables: dict[str, str], out: str, damaged: bool) -> None:
    """The loop in a fork; damaged, one of its products is wrong by a bit in the third step."""
    os.environ.update(variables)
    if damaged:
        multiply, calls = torch.nn.functional.linear, [0]

        def linear(*given: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return multiply(*given) * (1 + 2**-20 if calls[0] == 5 else 1)

        torch.nn.functional.linear = linear
    loop.main(STEPS, out)


def run(folder: Path, world_size: int, name: str, *, damaged: bool = False, **variables: str) -> tuple[list[str], str]:
    """Some ranks to their end, and what the last of them has left: digests, or nothing."""
    left = folder / name
    left.mkdir()
    shared = {
        "WORLD_SIZE": str(world_size),
        "RENDEZVOUS": str(folder / f"meet-{name}"),
        "HOLDFAST_CHECKPOINT_PATH": str(folder / "saved"),
        "HOLDFAST_CHECKPOINT_EVERY_STEPS": "2",
        "HOLDFAST_BATCH_WORLD_SIZE": "2",
        replay_env.FOLDER: str(left),
        **variables,
    }
    ranks = [
        forks.Process(target=train, args=(shared | {"RANK": str(rank)}, str(left / "weights"), damaged))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE_S)
    assert [rank.exitcode for rank in ranks] == [0] * world_size
    return sorted(path.read_text() for path in left.glob("*.digest")), str(sorted(os.listdir(left)))


@pytest.mark.slow
def test_groups_of_one_size_end_in_equal_states_unless_one_computes_wrongly_and_checkpoints_stay(
    tmp_path: Path,
) -> None:
    run(tmp_path, 2, "trained")
    saved = tmp_path / "saved"
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    again = {replay_env.UNTIL: "5", "HOLDFAST_CHECKPOINTS_BACK": "2"}
    replays = {
        name: run(tmp_path, world_size, name, damaged=name == "damaged", **again)[0]
        for name, world_size in (("one", 1), ("other", 1), ("damaged", 1), ("two", 2))
    }
    assert [len(digests) for digests in replays.values()] == [1, 1, 1, 2]
    assert replays["one"] == replays["other"] != replays["damaged"]
    assert len({*replays["two"]}) == 1  # ranks of DDP
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before


OPTIMIZER = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
RANKS = ControlGroup()


def test_replay_has_one_step_at_least_and_some_at_most() -> None:
    def last_step(until: int, after: int) -> int:
        config = RankConfig(replay_until=until, replay_folder=Path("x"))
        replay = GroupReplay.of(config, after, torch.nn.Linear(1, 1), OPTIMIZER, RANKS)
        assert replay is not None
        return next(step for step in range(after + 1, 1000) if replay.is_over(step, None))

    assert [last_step(12, 10), last_step(7, 10), last_step(500, 10)] == [12, 11, 10 + replay_env.MAX_STEPS]


def test_replay_without_a_folder_is_none_and_a_trainer_refuses_it() -> None:
    assert GroupReplay.of(RankConfig(), 10, torch.nn.Linear(1, 1), OPTIMIZER, RANKS) is None
    with pytest.raises(HoldfastError, match="cannot be repeated"):
        RankConfig(replay_until=3).refuse_unsupported()
