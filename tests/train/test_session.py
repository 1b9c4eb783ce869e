from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tests.train.conftest import Line
from tests.train.forged_manifests import rewrite

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Severity
from holdfast.protocol.rank_messages import (
    Activity,
    CheckpointAndExitNow,
    ExitingOnRequest,
    FindingReported,
    Hello,
    RankCheckpointCommitted,
    RankStep,
    RankToAgent,
    TakeCheckpointNow,
    TransferAndExitNow,
)
from holdfast.protocol.validation import MAX_METRICS
from holdfast.train import RankConfig, Session
from holdfast.train.checkpoint import manifest_file, staging
from holdfast.train.ft.replica_strategy import ReplicaStrategy, StoppedWhileWaiting, TrainingProgress
from holdfast.train.metrics.step_meter import StepMeter
from holdfast.train.session.rank_coordinator import STATE_TRANSFER_S, STOP_WAIT_S, RankCoordinator

LOOP = Path(__file__).with_name("loop.py")


def session(**told: object) -> Session:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Session(model=model, optimizer=optimizer, config=RankConfig(**told))


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_package_import_loads_no_torch():
    code = "import sys, holdfast.train; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_environment_of_a_bare_process_is_one_rank_without_checkpoints():
    assert RankConfig.from_env({"HOLDFAST_CHECKPOINT_PATH": ""}) == RankConfig()


def test_zero_turns_the_comparison_of_replicas_off_and_nothing_means_every_100_steps():
    every = [RankConfig.from_env({"HOLDFAST_VERIFY_EVERY_STEPS": value}).verify_every_steps for value in ("0", "", "7")]
    assert every == [0, 100, 7]


def test_environment_is_read_by_its_documented_names():
    variables = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "HOLDFAST_BATCH_WORLD_SIZE": "6",
        "HOLDFAST_LEARNING_RATE_FACTOR": "0.5",
        "HOLDFAST_RANK_SOCKET": "/run/3.sock",
        "TORCH_FR_DUMP_TEMP_FILE": "/run/flight-",
        "HOLDFAST_CHECKPOINT_PATH": "/ckpt",
        "HOLDFAST_CHECKPOINT_LOCAL": "/nvme",
        "HOLDFAST_CHECKPOINT_EVERY_STEPS": "10",
        "HOLDFAST_CHECKPOINT_EVERY_S": "0.5",
        "HOLDFAST_CHECKPOINT_EVERY": "auto",
        "GROUP_WORLD_SIZE": "2",
        "HOLDFAST_RESUMED_STEP": "7",
        "HOLDFAST_CHECKPOINT_KEEP": "2",
        "HOLDFAST_CHECKPOINT_KEEP_EVERY_STEPS": "100",
        "HOLDFAST_PROFILE_AFTER_STEP": "5",
    }
    assert RankConfig.from_env(variables) == RankConfig(
        rank=3,
        world_size=4,
        batch_world_size=6,
        learning_rate_factor=0.5,
        rank_socket=Path("/run/3.sock"),
        flight_dump_prefix="/run/flight-",
        checkpoint_path=Path("/ckpt"),
        checkpoint_local=Path("/nvme"),
        checkpoint_every_steps=10,
        checkpoint_every_s=0.5,
        checkpoint_auto=True,
        nodes=2,
        resumed_step=7,
        checkpoint_keep=2,
        checkpoint_keep_every_steps=100,
        profile_after_step=5,
    )


def test_flight_recorders_that_are_off_are_not_dumped():
    variables = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/run/flight-"}
    assert RankConfig.from_env(variables) == RankConfig()


def test_store_without_a_folder_on_the_node_is_refused():
    assert RankConfig.from_env(
        {"HOLDFAST_CHECKPOINT_PATH": "s3://b/r", "HOLDFAST_CHECKPOINT_LOCAL": "/n"}
    ) == RankConfig(checkpoint_path="s3://b/r", checkpoint_local=Path("/n"))
    with pytest.raises(HoldfastError) as refused:
        RankConfig.from_env({"HOLDFAST_CHECKPOINT_PATH": "s3://b/r"})
    assert refused.value.findings[0].code == "checkpoint-local-missing"


@pytest.mark.parametrize("value", ["ten", "0", "-1", "2.5"])
def test_environment_with_a_bad_number_names_the_variable(value: str):
    with pytest.raises(HoldfastError) as refused:
        RankConfig.from_env({"HOLDFAST_CHECKPOINT_EVERY_STEPS": value})
    assert refused.value.findings[0].where == "HOLDFAST_CHECKPOINT_EVERY_STEPS"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no checkpoint is taken: HOLDFAST_CHECKPOINT_PATH is not set"),
        ({"HOLDFAST_CHECKPOINT_EVERY_STEPS": "5"}, "no checkpoint is taken: HOLDFAST_CHECKPOINT_PATH is not set"),
        ({"HOLDFAST_CHECKPOINT_PATH": "/c"}, "checkpoints go to /c: at the end"),
        (
            {"HOLDFAST_CHECKPOINT_PATH": "c", "HOLDFAST_CHECKPOINT_EVERY_STEPS": "5"},
            f"checkpoints go to {Path.cwd()}/c: at the end, every 5 steps",
        ),
        (
            {"HOLDFAST_CHECKPOINT_PATH": "/c", "HOLDFAST_CHECKPOINT_EVERY_S": "2.5"},
            "checkpoints go to /c: at the end, every 2.5 s",
        ),
        (
            {
                "HOLDFAST_CHECKPOINT_PATH": "s3://b/r",
                "HOLDFAST_CHECKPOINT_LOCAL": "/n",
                "HOLDFAST_CHECKPOINT_EVERY": "auto",
            },
            "checkpoints go to s3://b/r: at the end, at the interval that loses the least time",
        ),
    ],
)
def test_where_checkpoints_go_is_told_in_words(variables: dict[str, str], words: str):
    assert RankConfig.from_env(variables).checkpoint_summary == words


def test_session_that_runs_alone_says_where_its_checkpoints_go(agent, tmp_path: Path, capsys):
    session(checkpoint_path=tmp_path, checkpoint_every_steps=2)
    assert capsys.readouterr().err.endswith(f"holdfast: checkpoints go to {tmp_path}: at the end, every 2 steps\n")
    session(checkpoint_path=tmp_path / "other", rank_socket=agent.path)
    assert "checkpoints go" not in capsys.readouterr().err


def test_cadence_that_is_not_auto_is_refused():
    with pytest.raises(HoldfastError) as refused:
        RankConfig.from_env({"HOLDFAST_CHECKPOINT_EVERY": "100"})
    assert refused.value.findings[0].code == "environment-invalid-auto"


def test_speed_of_a_device_counts_the_devices_of_all_replicas(agent):
    coordinator = RankCoordinator(RankConfig(rank_socket=agent.path), StepMeter(flops_per_token=1e12))
    coordinator.report_step(1, total=None, metrics={"tokens": 64, "replicas": 2})
    step = agent.accept().await_(RankStep)
    assert step.metrics["tflops_full"] * (step.ended - step.started) == pytest.approx(32)


def test_each_commit_is_reported_with_adjoining_times_and_finite_metrics(agent):
    loop = session(rank=5, rank_socket=agent.path)
    for step in loop.steps(2):
        loop.commit(loss=torch.tensor(2.5, requires_grad=True), tokens=64, grad_norm=float("nan") if step == 2 else 1.0)
    line = agent.accept()
    hello = line.next()
    assert isinstance(hello, Hello)
    assert (hello.rank, hello.pid, hello.clock is not None) == (5, os.getpid(), True)
    first, second = line.await_(RankStep), line.await_(RankStep)
    assert first.metrics.pop("host_memory_peak_bytes") > 2**20
    assert (first.step, first.metrics) == (1, {"loss": 2.5, "tokens": 64.0, "grad_norm": 1.0, "total_steps": 2.0})
    assert second.metrics.keys() == {"loss", "tokens", "total_steps", "host_memory_peak_bytes"}
    assert second.step == 2
    assert first.started < first.ended == second.started < second.ended


def test_metrics_that_no_event_can_hold_never_cost_the_step_and_are_named_once(agent, capsys):
    loop = session(rank_socket=agent.path)
    bad = {"n" * 200: 1.0, "torn\ud800": 1.0, "phase": "warm-up", "norms": torch.ones(3)}
    for _ in loop.steps(3):
        loop.commit(loss=2.0, tokens=float("nan"), replicas=0, **bad)
    sent = list(until_step(agent.accept(), 3))
    steps = [message for message in sent if isinstance(message, RankStep)]
    assert [step.step for step in steps] == [1, 2]
    assert all(step.metrics["loss"] == 2.0 and not bad.keys() & step.metrics.keys() for step in steps)
    codes = [message.finding.code for message in sent if isinstance(message, FindingReported)]
    assert sorted(codes) == ["metric-dropped"] * len(bad) + ["metric-not-finite"]
    assert capsys.readouterr().err.count("[metric-dropped]") == len(bad)


def test_metrics_beyond_what_a_step_may_have_are_left_out(agent):
    loop = session(rank_socket=agent.path)
    for _ in loop.steps(1):
        loop.commit(loss=1.0, **{f"m{number}": number for number in range(500)})
    metrics = agent.accept().await_(RankStep).metrics
    assert len(metrics) == MAX_METRICS
    assert (metrics["loss"], metrics["total_steps"], metrics["m0"]) == (1.0, 1.0, 0.0)


def test_checkpoints_come_every_steps_and_after_the_last_and_are_reported(agent, tmp_path: Path):
    folder = tmp_path / "ckpt"
    loop = session(rank_socket=agent.path, checkpoint_path=folder, checkpoint_every_steps=2)
    for _ in loop.steps(5):
        loop.commit()
    assert saved(folder) == ["step-00000002", "step-00000004", "step-00000005"]
    line = agent.accept()
    told = [line.await_(RankCheckpointCommitted) for _ in range(3)]
    assert [(each.step, each.path) for each in told] == [(step, str(folder / f"step-{step:08d}")) for step in (2, 4, 5)]
    assert all(each.took_s > 0 for each in told)
    for each in told:
        files = [file for file in Path(each.path).iterdir() if file.name != manifest_file.NAME]
        assert each.size_bytes == sum(file.stat().st_size for file in files)


def test_time_that_the_loop_stood_still_for_a_checkpoint_is_reported_with_the_next_step(agent, tmp_path: Path):
    loop = session(rank_socket=agent.path, checkpoint_path=tmp_path / "ckpt", checkpoint_every_steps=1)
    for _ in loop.steps(2):
        loop.commit()
    line = agent.accept()
    assert line.await_(RankStep).checkpoint_s == 0
    assert line.await_(RankStep).checkpoint_s > 0


def test_a_second_session_continues_after_the_first(tmp_path: Path, capsys):
    first = session(checkpoint_path=tmp_path)
    for _ in first.steps(3):
        first.commit()
    second = session(checkpoint_path=tmp_path)
    assert list(second.steps(3)) == []
    assert next(second.steps(5)) == 4
    assert "resumed after step 3" in capsys.readouterr().err


class _DrawingStore(MemoryFileSystem):
    """A store whose client draws random numbers, as libraries do that are imported for it."""

    protocol = "drawing"
    cachable = False

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        draw()

    def ls(self, path: str, detail: bool = True, **options: object) -> list[Any]:
        draw()
        return super().ls(path, detail, **options)


def draw() -> list[float]:
    return [random.random(), float(numpy.random.random()), torch.rand(1).item()]


def test_a_session_leaves_its_programs_random_numbers_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation(_DrawingStore.protocol, _DrawingStore, clobber=True)

    def numbers(*, through: bool) -> list[list[float]]:
        """Those of a program after its seeds, and after a checkpoint from which it resumes if it saves one."""
        model = torch.nn.Linear(2, 2)
        given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        told = (
            {"checkpoint_path": f"drawing:/{tmp_path}/store", "checkpoint_local": tmp_path / "node"} if through else {}
        )
        for seed in (random.seed, numpy.random.seed, torch.manual_seed):
            seed(3)
        first = Session(**given, config=RankConfig(**told))
        found = [draw()]
        for _ in first.steps(3):
            first.commit()
        if through:
            Session(**given, config=RankConfig(**told))
        return [*found, draw()]

    assert numbers(through=True) == numbers(through=False)


def test_seconds_between_checkpoints_are_counted(tmp_path: Path):
    loop = session(checkpoint_path=tmp_path, checkpoint_every_s=1e-9)
    for _ in loop.steps(2):
        loop.commit()
    assert saved(tmp_path) == ["step-00000001", "step-00000002"]


class SecondReplica(ReplicaStrategy):
    """As the second of replicas, for which the first saves."""

    replica_index = 1


def test_replica_that_does_not_save_stands_aside_once_each_time_that_a_checkpoint_is_due(tmp_path: Path, monkeypatch):
    loop = session(checkpoint_path=tmp_path, checkpoint_every_s=3600)
    monkeypatch.setattr(loop, "_replicas", SecondReplica(torch.nn.Linear(2, 2)))
    monkeypatch.setattr(loop._coordinator, "_saved_at", time.monotonic() - 7200)
    turns: list[Activity] = []
    monkeypatch.setattr(loop._coordinator, "set_activity", turns.append)
    for step in loop.steps(4):
        loop.commit()
        if step == 3:
            assert turns.count(Activity.BETWEEN_STEPS) == 1
    assert saved(tmp_path) == []


class LostPeers(ReplicaStrategy):
    """Like a rank that receives a stop while it waits for the others, after step 3."""

    def begin_step(self, progress: TrainingProgress, *, total: int) -> TrainingProgress:
        if progress.step == 3:
            raise StoppedWhileWaiting(progress)
        return progress


def test_replica_that_is_told_to_end_while_it_waits_for_others_saves_what_it_has_and_leaves(
    tmp_path: Path, monkeypatch
):
    loop = session(checkpoint_path=tmp_path)
    monkeypatch.setattr(loop, "_replicas", LostPeers(torch.nn.Linear(2, 2)))
    with pytest.raises(SystemExit) as left:
        go_on(loop)
    assert left.value.code == ExitCode.CHECKPOINTED_AND_EXITED
    assert saved(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize(
    ("word", "patience_s"),
    [
        (None, math.inf),
        (TransferAndExitNow(), STATE_TRANSFER_S),
        (CheckpointAndExitNow(reason="cancelled"), STOP_WAIT_S),
    ],
)
def test_others_are_waited_for_a_while_longer_by_one_that_is_to_leave(agent, tmp_path: Path, word, patience_s: float):
    loop = session(rank_socket=agent.path, checkpoint_path=tmp_path / "ckpt")
    line = agent.accept()
    if word is not None:
        line.ask(word)
    assert loop._coordinator.wait_limit_s() == patience_s


def test_auto_cadence_is_chosen_from_the_first_save_and_said(agent, tmp_path: Path):
    loop = session(rank_socket=agent.path, checkpoint_path=tmp_path / "ckpt", checkpoint_auto=True)
    line = agent.accept()
    for step in loop.steps(2):
        if step == 1:
            line.ask(TakeCheckpointNow())
        loop.commit()
    assert line.await_(FindingReported).finding.code == "checkpoint-interval"


def test_checkpoint_request_is_met_at_the_end_of_the_step_in_hand(agent, tmp_path: Path):
    folder = tmp_path / "ckpt"
    loop = session(rank_socket=agent.path, checkpoint_path=folder)
    line = agent.accept()
    for step in loop.steps(3):
        if step == 2:
            line.ask(TakeCheckpointNow())
        loop.commit()
    assert saved(folder) == ["step-00000002", "step-00000003"]


def go_on(loop: Session, *, told_at: int = 0, tell: Callable[[], None] = int) -> None:
    for step in loop.steps(10):
        if step == told_at:
            tell()
        loop.commit()


def ask_the_agent(line) -> None:
    line.ask(CheckpointAndExitNow(reason="cancelled"))


def send_sigterm(_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("stop", [ask_the_agent, send_sigterm])
def test_stop_is_met_with_a_checkpoint_and_its_exit_code(agent, tmp_path: Path, stop):
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "ckpt"
    loop = session(rank_socket=agent.path, checkpoint_path=folder)
    line = agent.accept()
    with pytest.raises(SystemExit) as left:
        go_on(loop, told_at=4, tell=lambda: stop(line))
    assert left.value.code == ExitCode.CHECKPOINTED_AND_EXITED
    line.await_(ExitingOnRequest)
    assert saved(folder) == ["step-00000004"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_is_the_programs_own_again_once_the_loop_was_left_and_ours_in_the_next(tmp_path: Path):
    told = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        loop = session(checkpoint_path=tmp_path / "ckpt")
        for _ in loop.steps(3):
            loop.commit()
            break
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == [signal.SIGTERM]
        with pytest.raises(SystemExit) as left:
            go_on(loop, told_at=2, tell=lambda: send_sigterm(None))
        assert (left.value.code, saved(tmp_path / "ckpt"), len(told)) == (
            ExitCode.CHECKPOINTED_AND_EXITED,
            ["step-00000002"],
            1,
        )
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(told) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_weights_that_are_other_ones_aside_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    aside, copy = threading.Event(), staging._copy

    def copy_late(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        aside.wait(0.3)  # in vain, where that waits
        copy(pairs)

    monkeypatch.setattr(staging, "_copy", copy_late)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    told = RankConfig(checkpoint_path=tmp_path, checkpoint_every_steps=1)
    loop = Session(model=model, optimizer=optimizer, config=told)
    was = dict[int, torch.Tensor]()
    for step in loop.steps(3):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        was[step] = model.weight.detach().clone()
        aside.clear()
        loop.commit()
        with loop.untimed():
            model.weight.data.fill_(step)
            aside.set()
    shutil.rmtree(tmp_path / "step-00000003")
    again = torch.nn.Linear(64, 64)
    assert Session(model=again, optimizer=torch.optim.AdamW(again.parameters()), config=told).step == 2
    assert torch.equal(again.weight, was[2])


def test_failed_checkpoint_is_found_and_training_continues(agent, tmp_path: Path):
    folder = tmp_path / "file"
    loop = session(rank_socket=agent.path, checkpoint_path=folder, checkpoint_every_steps=1)
    shutil.rmtree(folder)
    folder.touch()
    loop.commit()
    loop.commit()
    loop.commit()
    line = agent.accept()
    found = line.await_(FindingReported).finding
    assert found.code == "checkpoint-failed"
    assert found.remedy.endswith("are untouched, and the next is tried when it is due.")
    assert line.await_(RankStep).step == 3


def test_failed_last_checkpoint_is_an_error(tmp_path: Path):
    folder = tmp_path / "file"
    loop = session(checkpoint_path=folder)
    shutil.rmtree(folder)
    folder.touch()
    steps = loop.steps(1)
    next(steps)
    with pytest.raises(HoldfastError) as raised:
        loop.commit()
    (finding,) = raised.value.findings
    assert finding.remedy.endswith(
        "are untouched, but this was the last: what none of them holds is done again at the next start."
    )
    assert "when it is due" not in finding.remedy


def test_last_checkpoint_that_the_store_does_not_take_is_an_error(tmp_path: Path):
    store = tmp_path / "store"
    loop = session(checkpoint_path=store.as_uri(), checkpoint_local=tmp_path / "node")
    shutil.rmtree(store)
    store.touch()
    steps = loop.steps(1)
    next(steps)
    with pytest.raises(HoldfastError) as raised:
        loop.commit()
    (finding,) = raised.value.findings
    assert (finding.code, finding.severity) == ("checkpoint-upload-failed", Severity.ERROR)


def train(loop: Session, steps: int, batch: int = 4) -> list[range]:
    """The samples of each micro-batch, in order."""
    seen: list[range] = []
    for _ in loop.steps(steps):
        seen.extend(micro.samples for micro in loop.micro_batches(batch))
        loop.commit()
    return seen


def test_rank_that_is_left_alone_takes_the_samples_of_all_and_says_how_many(agent):
    loop = session(rank_socket=agent.path, batch_world_size=3)
    assert train(loop, 2) == [range(4), range(4, 8), range(8, 12), range(12, 16), range(16, 20), range(20, 24)]
    assert agent.accept().await_(RankStep).metrics["global_batch"] == 12


def test_samples_continue_from_a_checkpoint_whatever_the_batch_is_then(tmp_path: Path):
    assert train(session(checkpoint_path=tmp_path, batch_world_size=2), 1) == [range(4), range(4, 8)]
    assert train(session(checkpoint_path=tmp_path), 3) == [range(8, 12), range(12, 16)]


def test_samples_of_a_checkpoint_that_counts_none_are_those_of_its_steps(tmp_path: Path):
    loop = session(checkpoint_path=tmp_path)
    for _ in loop.steps(3):
        loop.commit()
    assert train(session(checkpoint_path=tmp_path), 4) == [range(12, 16)]


class Count:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"count": 1}


@pytest.mark.parametrize(
    ("deals", "own", "evidence"),
    [(True, False, []), (False, False, ["the loop takes"]), (True, True, ["`state`"]), (False, True, ["the", "`"])],
)
def test_another_number_of_ranks_is_said_once_and_only_where_something_does_not_continue_as_it_was(
    agent, tmp_path: Path, capsys, deals: bool, own: bool, evidence: list[str]
):
    def loop(**told: Any) -> Session:
        made = torch.nn.Linear(1, 1)
        environment = RankConfig(checkpoint_path=tmp_path, **told)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        state = {"average": torch.nn.Linear(1, 1)} | ({"count": Count()} if own else {})
        return Session(model=made, optimizer=optimizer, state=state, config=environment)

    for _ in (saved := loop()).steps(2):
        saved.commit()
    seal = tmp_path / "step-00000002" / "manifest.json"
    rewrite(seal, {"world_size": 3})
    again = loop(rank_socket=agent.path)
    assert "which 3 took; the number of ranks is 1 now" in capsys.readouterr().err
    for _ in again.steps(4):
        if deals:
            list(again.micro_batches(4))
        again.commit()
    line = agent.accept()
    told = [message.finding for message in until_step(line, 4) if isinstance(message, FindingReported)]
    assert [finding.code for finding in told] == ["world-size-changed"] * bool(evidence)
    for finding in told:
        assert all(words.startswith(begun) for words, begun in zip(finding.evidence, evidence, strict=True))
    line.close()


def until_step(line: Line, step: int) -> Iterator[RankToAgent]:
    while not (isinstance(message := line.next(), RankStep) and message.step == step):
        yield message


@pytest.mark.parametrize(("micro_batches", "stepped"), [(True, -0.05), (False, -0.1)])
def test_learning_rate_is_scaled_during_steps_of_a_dealt_batch_and_nowhere_else(micro_batches: bool, stepped: float):
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = torch.nn.Module()
    model.weight = weight
    loop = Session(model=model, optimizer=optimizer, config=RankConfig(learning_rate_factor=0.5))
    for _ in loop.steps(1):
        if micro_batches:
            list(loop.micro_batches(1))
        weight.grad = torch.ones(())
        optimizer.step()
        loop.commit()
    assert weight.item() == pytest.approx(stepped)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_step_that_is_not_committed_is_an_error():
    with pytest.raises(HoldfastError) as refused:
        list(session().steps(2))
    assert refused.value.findings[0].code == "step-not-committed"


def test_session_of_several_ranks_without_a_process_group_is_an_error():
    with pytest.raises(HoldfastError) as refused:
        session(world_size=2)
    assert refused.value.findings[0].code == "process-group-missing"


def run_loop(*command: str, steps: int, out: Path, **variables: str) -> subprocess.Popen[str]:
    unset = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    command = (*command, str(LOOP), str(steps), str(out))
    return subprocess.Popen(command, env=unset | variables, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_session_under_bare_python_trains_saves_and_resumes(tmp_path: Path):
    folder = tmp_path / "ckpt"
    variables = {"HOLDFAST_CHECKPOINT_PATH": str(folder), "HOLDFAST_CHECKPOINT_EVERY_STEPS": "4"}
    for steps, said in ((6, "the session runs alone"), (8, "resumed after step 6")):
        process = run_loop(sys.executable, steps=steps, out=tmp_path / "weights", **variables)
        assert said in process.communicate(timeout=200)[1]
        assert process.returncode == 0
    assert saved(folder) == ["step-00000004", "step-00000006", "step-00000008"]


@pytest.mark.slow
def test_requests_to_one_rank_under_torchrun_are_met_by_all_after_the_same_step(agent, tmp_path: Path):
    folder = tmp_path / "ckpt"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    variables = {"HOLDFAST_CHECKPOINT_PATH": str(folder), "HOLDFAST_RANK_SOCKET": str(agent.path)}
    process = run_loop(*torchrun, steps=10**9, out=tmp_path / "weights", **variables)
    lines = {}
    for line in (agent.accept(), agent.accept()):
        lines[line.await_(Hello).rank] = line

    lines[1].await_(RankStep, lambda step: step.step == 3)
    lines[1].ask(TakeCheckpointNow())
    asked = lines[0].await_(RankCheckpointCommitted)
    lines[1].ask(CheckpointAndExitNow())
    with ThreadPoolExecutor() as reading:  # at once: torchrun ends a rank that another has left behind
        rests = dict(zip(lines, reading.map(Line.rest, lines.values()), strict=True))
    _, said = process.communicate(timeout=200)

    assert process.returncode == 1, said  # torchrun's own, for ranks that left early
    assert f"exitcode  : {ExitCode.CHECKPOINTED_AND_EXITED.value}" in said
    last = {rank: max(each.step for each in rest if isinstance(each, RankStep)) for rank, rest in rests.items()}
    assert last[0] == last[1] > asked.step
    assert [each.step for each in rests[0] if isinstance(each, RankCheckpointCommitted)] == [last[0]]
    assert saved(folder) == [f"step-{step:08d}" for step in (asked.step, last[0])]
