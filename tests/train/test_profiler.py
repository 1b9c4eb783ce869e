"""A step's time by its parts, as real ranks measure it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from holdfast.metrics.metric_catalog import sticky_metrics
from holdfast.metrics.step_breakdown import StepPart, breakdown_metric
from holdfast.protocol.rank_messages import CheckpointAndExitNow, FindingReported, ProfileStepsNow, RankStep
from holdfast.train import RankConfig, Session
from holdfast.train.metrics.profiler import STEPS

HEAVY = Path(__file__).with_name("profiled_loop.py")
CASES = {
    "plain:communication": (StepPart.COMMUNICATION, StepPart.COMMUNICATION),
    "ddp:forward": (StepPart.FORWARD, StepPart.FORWARD),
    "ddp:optimizer": (StepPart.OPTIMIZER, StepPart.OPTIMIZER),
    "ddp:straggler": (StepPart.COMMUNICATION, StepPart.DATA),
    "fsdp:backward": (StepPart.BACKWARD, StepPart.BACKWARD),
    "fsdp:straggler": (StepPart.COMMUNICATION, StepPart.DATA),
}
"""What is heavy, and where rank 0 and rank 1 must see it."""
OWN = set(StepPart) - {StepPart.COMMUNICATION}


def told(step: RankStep) -> dict[StepPart, float]:
    return {part: step.metrics[breakdown_metric(part)] for part in StepPart}


@pytest.mark.slow
def test_heavy_part_of_two_ranks_shows_in_its_row_and_the_parts_add_up(agent, tmp_path: Path):
    ranks = subprocess.Popen([sys.executable, HEAVY, tmp_path, *CASES])
    try:
        for case, expected in CASES.items():
            lines = sorted((agent.accept() for _ in range(2)), key=lambda line: line.next().rank)
            steps: list[list[RankStep]] = [[], []]
            lines[0].await_(RankStep)
            lines[1].ask(ProfileStepsNow())
            for line, seen in zip(lines, steps, strict=True):
                while not seen or not sticky_metrics(seen[-1].metrics):
                    seen.append(line.await_(RankStep))
                line.ask(CheckpointAndExitNow())
            # Asked of one, all ranks tell of the same steps.
            assert steps[0][-1].step == steps[1][-1].step, case
            for seen, part in zip(steps, expected, strict=True):
                spent, took_s = told(seen[-1]), [step.ended - step.started for step in seen[-STEPS:]]
                # A rank that waits for the other does so in the communication, however late a busy machine makes it.
                own = {each: s for each, s in spent.items() if each in (part, *OWN)}
                assert max(own, key=own.__getitem__) is part, (case, spent)
                assert own[part] > sum(own.values()) / 2, (case, spent)
                # The profiler starts within the first step.
                assert 0.8 * sum(took_s[1:]) < STEPS * sum(spent.values()) < 1.2 * sum(took_s), (case, spent, took_s)
            for line in lines:
                assert not [each for each in line.rest() if isinstance(each, FindingReported)]
                line.close()
        assert ranks.wait(120) == 0
    finally:
        ranks.kill()
        ranks.wait()


@pytest.mark.slow
def test_gradient_norm_of_sharded_parameters_is_that_of_the_whole_model(agent, tmp_path: Path):
    ranks = subprocess.Popen([sys.executable, HEAVY, tmp_path, "fsdp:norm"])
    try:
        lines = [agent.accept() for _ in range(2)]
        for line in lines:
            told = line.await_(RankStep).metrics
            assert told["grad_norm"] == pytest.approx(told["whole_norm"], rel=1e-5)
            assert told["grad_norm"] > 1.001 * told["own_norm"] > 0
            line.ask(CheckpointAndExitNow())
        assert ranks.wait(120) == 0
        for line in lines:
            line.close()
    finally:
        ranks.kill()
        ranks.wait()


PAUSE_S = 0.05
"""Much longer than what the session does between two steps, which is in a profile too."""


def loop(steps: int, pause_s: float = 0.0, **told: object) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model=model, optimizer=optimizer, config=RankConfig(**told))
    for _ in session.steps(steps):
        model(torch.ones(2)).sum().backward()
        time.sleep(pause_s)
        optimizer.step()
        session.commit(loss=1.0)


def test_step_profile_from_the_environment_is_printed_without_holdfast(capsys):
    loop(9, profile_after_step=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "profiled" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"step {2 + STEPS}: ")
    assert "forward" in lines[0]


def test_profile_that_the_last_step_cuts_short_is_of_the_steps_there_were(agent):
    loop(4, PAUSE_S, rank_socket=agent.path, profile_after_step=2)
    steps = [message for message in agent.accept().rest() if isinstance(message, RankStep)]
    assert [step.step for step in steps if sticky_metrics(step.metrics)] == [4]
    assert PAUSE_S < sum(told(steps[-1]).values()) < steps[-1].ended - steps[2].started


def test_profile_beside_another_is_refused_and_training_continues(agent):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loop(9, rank_socket=agent.path, profile_after_step=2)
    messages = agent.accept().rest()
    found = [message.finding.code for message in messages if isinstance(message, FindingReported)]
    assert found == ["step-profile-failed"]
    assert max(message.step for message in messages if isinstance(message, RankStep)) == 9


def test_nothing_of_torch_is_changed_once_a_profile_is_over(agent):
    before = torch.autograd.backward
    loop(9, rank_socket=agent.path, profile_after_step=2)
    assert torch.autograd.backward is before
    assert not torch.autograd._profiler_enabled()
