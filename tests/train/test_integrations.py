"""The callbacks' answers to requests, in real Trainers: the same in each framework."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from tests.train.conftest import Agent, Line
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import (
    CheckpointAndExitNow,
    FindingReported,
    RankCheckpointCommitted,
    RankStep,
    TakeCheckpointNow,
)
from holdfast.train.checkpoint import manifest_file

pytestmark = pytest.mark.slow  # their imports are

STEPS = 6
Act = Callable[[int], None]
"""Called with each step that begins."""


class Model(torch.nn.Module):
    """Small, and takes what the Trainer of transformers gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(self.drop(inputs)).square().mean()}


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, generator=generator) for _ in range(40)]


class Train(Protocol):
    """Trains up to a step, with the checkpoints in a folder; returns the weights."""

    def __call__(self, folder: Path, steps: int = STEPS, act: Act = ..., **given: Any) -> list[float]: ...


def weights(model: Model) -> list[float]:
    return model.layer.weight.flatten().tolist()


def train_transformers(folder: Path, steps: int = STEPS, act: Act = lambda step: None, **given: Any) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from holdfast.train.integrations.transformers import HoldfastCallback

    class Acting(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            act(state.global_step + 1)

    given = {"save_strategy": "no", "per_device_train_batch_size": 2, "max_steps": steps, **given}
    args = TrainingArguments(output_dir=str(folder), report_to="none", disable_tqdm=True, use_cpu=True, **given)
    holdfast, model = HoldfastCallback(), Model()
    data: Any = [{"inputs": sample} for sample in samples()]
    trainer = Trainer(model, args, train_dataset=data, callbacks=[Acting(), holdfast])
    trainer.train(resume_from_checkpoint=holdfast.resume_path)
    return weights(model)


def train_lightning(
    folder: Path,
    steps: int = STEPS,
    act: Act = lambda step: None,
    loader: Any = None,
    optimizer: Any = torch.optim.AdamW,
    lr: float = 0.1,
    gamma: float = 1.0,
    **given: Any,
) -> list[float]:
    from lightning import LightningModule, Trainer
    from lightning.pytorch import Callback
    from torchdata.stateful_dataloader import StatefulDataLoader

    from holdfast.train.integrations.lightning import HoldfastCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch)["loss"]

        def configure_optimizers(self) -> Any:
            made = optimizer(self.parameters(), lr=lr)
            schedule = torch.optim.lr_scheduler.StepLR(made, 2, gamma)
            return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Acting(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            act(trainer.global_step + 1)

    os.environ["HOLDFAST_CHECKPOINT_PATH"] = str(folder)
    holdfast, module = HoldfastCallback(), Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(callbacks=[Acting(), holdfast], max_steps=steps, accelerator="cpu", devices=1, **quiet, **given)
    if loader is None:
        loader = StatefulDataLoader(samples(), batch_size=2)
    trainer.fit(module, loader, ckpt_path=holdfast.resume_path)
    return weights(module.model)


@pytest.fixture(params=[train_transformers, train_lightning], ids=["transformers", "lightning"])
def train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Train:
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_PATH", "")
    return request.param


@pytest.fixture
def told(agent: Agent, train: Train, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The agent of the training."""
    monkeypatch.setenv("HOLDFAST_RANK_SOCKET", str(agent.path))
    return agent


def finalized_steps(folder: Path) -> list[int]:
    return sorted(
        int(path.parent.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*/manifest.json")
    )


class Asking:
    """Asks through the agent, when a step begins; keeps the line."""

    def __init__(self, agent: Agent, at: int, request: TakeCheckpointNow | CheckpointAndExitNow) -> None:
        self.line: Line | None = None
        self._agent, self._at, self._request = agent, at, request

    def __call__(self, step: int) -> None:
        if self.line is None:
            self.line = self._agent.accept()
        if step == self._at:
            self.line.ask(self._request)


def test_checkpoint_is_taken_with_the_step_in_hand_and_told(train: Train, told: Agent, tmp_path: Path):
    asking = Asking(told, 2, TakeCheckpointNow())
    train(tmp_path / "saved", act=asking)
    assert asking.line is not None
    first, last = asking.line.await_(RankCheckpointCommitted), asking.line.await_(RankCheckpointCommitted)
    assert (first.step, first.path) == (2, str(tmp_path / "saved" / "checkpoint-2"))
    assert last.step == STEPS
    files = [file for file in Path(last.path).rglob("*") if file.is_file() and file.name != manifest_file.NAME]
    assert last.size_bytes == sum(file.stat().st_size for file in files)
    assert finalized_steps(tmp_path / "saved") == [2, STEPS]
    asking.line.close()


@pytest.mark.parametrize("by", ["signal", "agent"])
def test_stop_is_met_with_a_checkpoint_and_its_exit_code_and_training_continues_exactly(
    train: Train, told: Agent, tmp_path: Path, by: str, capsys: pytest.CaptureFixture[str]
):
    before = signal.getsignal(signal.SIGTERM)
    asking = Asking(told, 3, CheckpointAndExitNow(reason="cancelled"))

    def terminate(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        train(tmp_path / "saved", act=asking if by == "agent" else terminate)
    assert left.value.code == ExitCode.CHECKPOINTED_AND_EXITED
    assert finalized_steps(tmp_path / "saved") == [3]
    assert signal.getsignal(signal.SIGTERM) == before
    begun: list[int] = []
    capsys.readouterr()
    assert train(tmp_path / "saved", act=begun.append) == train(tmp_path / "unbroken")
    assert capsys.readouterr().err.count("holdfast: resumed after step 3 from ") == 1
    assert begun == [4, 5, 6]


def test_cadence_is_chosen_from_the_first_save_and_said(
    train: Train, told: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_EVERY", "auto")
    asking = Asking(told, 1, TakeCheckpointNow())
    train(tmp_path / "saved", act=asking)
    assert asking.line is not None
    assert asking.line.await_(FindingReported).finding.code == "checkpoint-interval"
    asking.line.close()


HOLD = """
import sys
from pathlib import Path
from holdfast.train.checkpoint.writer_fence import WriterFence, WriterId
fence = WriterFence(Path(sys.argv[1]), WriterId(run="run-1"))
fence.take_over()
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_that_another_live_run_saves_in_is_refused_before_a_step_is_taken(train: Train, tmp_path: Path):
    begun: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(HoldfastError) as refused:
            train(tmp_path, act=begun.append)
        other.stdin.close()
    (finding,) = refused.value.findings
    assert (finding.code, "run-1" in finding.what, begun) == ("checkpoints-in-use", True, [])


def test_superseded_run_writes_no_manifest_and_ends(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_RUN", "run-1")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_EVERY_STEPS", "1")

    def replaced(step: int) -> None:
        if step == 2:
            (tmp_path / "writer-0.json").write_text('{"run":"run-1","attempt":1}')

    with pytest.raises(HoldfastError) as ended:
        train(tmp_path, act=replaced)
    assert ended.value.findings[0].code == "attempt-superseded"
    assert max(finalized_steps(tmp_path), default=1) == 1


def test_loop_continues_while_a_checkpoint_is_finalized(
    train: Train, told: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    summed, past = manifest_file.checksums, threading.Event()

    def slow(files: Any) -> Any:
        assert past.wait(60)
        return summed(files)

    monkeypatch.setattr(manifest_file, "checksums", slow)
    asking = Asking(told, 2, TakeCheckpointNow())

    def act(step: int) -> None:
        asking(step)
        if step == 5:
            past.set()

    train(tmp_path, act=act)
    assert asking.line is not None
    told_steps = [asking.line.await_(RankStep).step for _ in range(4)]
    assert told_steps == [1, 2, 3, 4]
    assert asking.line.await_(RankCheckpointCommitted).step == 2
    asking.line.close()


def findings_of(agent: Agent, run: Callable[[Act], object]) -> list[Finding]:
    """What a training said before its first step."""
    asking = Asking(agent, 0, TakeCheckpointNow())
    run(asking)
    assert asking.line is not None
    found: list[Finding] = []
    while not isinstance(message := asking.line.next(), RankStep):
        if isinstance(message, FindingReported):
            found.append(message.finding)
    asking.line.close()
    return found


@pytest.mark.parametrize("train", [train_transformers], indirect=True)
@pytest.mark.parametrize(
    "given", [{"save_only_model": True}, {"ignore_data_skip": True}, {"save_total_limit": 1}], ids=str
)
def test_arguments_that_keep_a_trainer_from_being_exact_are_named(
    train: Train, told: Agent, tmp_path: Path, given: dict[str, Any]
):
    (finding,) = findings_of(told, lambda act: train(tmp_path, 1, act, **given))
    assert finding.code == "trainer-resume-not-bit-exact"
    ((name, value),) = given.items()
    assert [line.split(":")[0] for line in finding.evidence] == [f"{name}={value}"]


@pytest.fixture
def rates() -> Iterator[list[float]]:
    """The learning rate of every step that an optimizer takes."""
    taken: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: taken.append(optimizer.param_groups[0]["lr"]))
    yield taken
    hook.remove()


CHANGES: dict[str, tuple[Train, dict[str, Any], dict[str, Any], list[float], tuple[str, ...]]] = {
    "of a Trainer's optimizer": (
        train_transformers,
        {"lr_scheduler_type": "constant", "learning_rate": 0.1},
        {"lr_scheduler_type": "constant", "learning_rate": 0.2, "adam_beta1": 0.8},
        [0.2, 0.2],
        ("lr: 0.1 -> 0.2", "betas: [0.9, 0.999] -> [0.8, 0.999]"),
    ),
    "of a Trainer's schedule and batch": (
        train_transformers,
        {"learning_rate": 0.1, "max_steps": 10},
        {"learning_rate": 0.2, "max_steps": 5, "gradient_accumulation_steps": 2},
        [0.2 * 2 / 5, 0.2 / 5],
        ("lr: 0.1 -> 0.2", "batch: 2 -> 4", "linear max_steps: 10 -> 5"),
    ),
    "of Lightning's optimizer": (train_lightning, {"lr": 0.1}, {"lr": 0.2}, [0.2, 0.2], ("lr: 0.1 -> 0.2",)),
    "of Lightning's schedule": (
        train_lightning,
        {"lr": 0.1},
        {"lr": 0.1, "gamma": 0.5},
        [0.05, 0.025],
        ("StepLR gamma: 1.0 -> 0.5",),
    ),
}


@pytest.mark.parametrize(
    ("train", "change"), [(row[0], row[1:]) for row in CHANGES.values()], ids=CHANGES, indirect=["train"]
)
def test_hyperparameters_that_were_changed_are_said_and_hold_from_the_next_step_on(
    train: Train, told: Agent, tmp_path: Path, rates: list[float], change: Any
):
    before, after, expected, evidence = change
    asking = Asking(told, 3, CheckpointAndExitNow(reason="cancelled"))
    with pytest.raises(SystemExit):
        train(tmp_path, 10, asking, **before)
    assert asking.line is not None
    asking.line.close()
    assert len(rates) == 3
    findings = findings_of(told, lambda act: train(tmp_path, 5, act, **after))
    assert rates[3:] == pytest.approx(expected)
    assert {finding.code: finding.evidence for finding in findings} == {"hyperparameters-changed": evidence}


@pytest.mark.parametrize(
    ("train", "other"),
    [(train_transformers, {"optim": "sgd"}), (train_lightning, {"optimizer": torch.optim.Adam})],
    ids=["transformers", "lightning"],
    indirect=["train"],
)
def test_state_of_another_optimizer_is_not_loaded(train: Train, tmp_path: Path, other: dict[str, Any]):
    train(tmp_path, 2)
    with pytest.raises(HoldfastError) as refused:
        train(tmp_path, 4, **other)
    assert refused.value.findings[0].code == "optimizer-changed"
    assert finalized_steps(tmp_path) == [2]


class Endless(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield from samples()


def loaders() -> dict[str, Any]:
    from torch.utils.data import DataLoader, WeightedRandomSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    by_weight = WeightedRandomSampler([1.0] * 40, 40)
    return {
        "a DataLoader does not tell": DataLoader(samples(), batch_size=2),
        "a WeightedRandomSampler makes": StatefulDataLoader(samples(), batch_size=2, sampler=by_weight),
        "without a length": StatefulDataLoader(Endless(), batch_size=2),
    }


@pytest.mark.parametrize("train", [train_lightning], indirect=True)
@pytest.mark.parametrize("why", ["a DataLoader does not tell", "a WeightedRandomSampler makes", "without a length"])
def test_loader_whose_place_cannot_be_known_is_named(train: Train, told: Agent, tmp_path: Path, why: str):
    (finding,) = findings_of(told, lambda act: train(tmp_path, 1, act, loader=loaders()[why]))
    assert finding.code == "loader-resume-not-bit-exact"
    assert why in finding.evidence[0]


@pytest.mark.parametrize("train", [train_lightning], indirect=True)
def test_checkpoint_is_whole_also_where_lightning_writes_its_own_beside_the_loop(train: Train, tmp_path: Path):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    train(tmp_path, plugins=[AsyncCheckpointIO()])
    assert finalized_steps(tmp_path) == [STEPS]
    begun: list[int] = []
    train(tmp_path, STEPS + 1, begun.append)
    assert begun == [STEPS + 1]


def test_trainer_that_does_not_count_its_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from holdfast.train.integrations.transformers import HoldfastCallback

    # The result of two ranks on CPUs without ddp_backend="gloo"; the Trainer is queried before the rendezvous.
    alone = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert alone.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(HoldfastError) as refused:
        HoldfastCallback().on_init_end(alone, TrainerState(), TrainerControl())
    assert refused.value.findings[0].code == "trainer-not-distributed"


def test_replicas_that_nothing_would_bring_together_are_refused(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_REPLICA_COUNT", "2")
    with pytest.raises(HoldfastError) as refused:
        train(tmp_path)
    assert refused.value.findings[0].code == "trainer-replicas-unsupported"
