"""Compares the data-parallel ranks of a replica from time to time, so that no wrong bit spreads unnoticed.

DDP keeps weights and optimizer state equal on all ranks: their digests are compared at due steps and before each save.
A wrong gradient reaches all ranks alike, and leaves the digests equal. So at due steps a rank on another node repeats
this rank's first pass, just before the optimizer's step, and the digests of both gradients are compared. The decision:
culprit.py; the passes: step_replay.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import CorruptionReported
from holdfast.train.ft import culprit
from holdfast.train.ft.culprit import Corruption, Repetition
from holdfast.train.ft.state_digest import StateDigest
from holdfast.train.ft.step_replay import MAX_PAYLOAD_BYTES, PassRecorder, RecordedPass
from holdfast.train.ft.wrappers import shares_all_weights
from holdfast.train.session.rank_config import RankConfig
from holdfast.train.session.rank_coordinator import RankCoordinator
from holdfast.train.weak_method import weakly

_NO_DIGEST = 0


@dataclass(frozen=True, kw_only=True)
class AgreedSteps:
    """Tells the checkpoints which steps all ranks agreed on; all ranks make the same calls."""

    keep: Callable[[int], None]
    """The newest checkpoint up to this step is kept."""
    set_aside_after: Callable[[int], None]
    """Checkpoints after this step may hold wrong numbers."""


class RankVerifier:
    """One rank's part in the comparison; all ranks make the same calls. Does nothing where ranks need not be equal."""

    def __init__(
        self,
        config: RankConfig,
        model: nn.Module,
        optimizer: Optimizer,
        coordinator: RankCoordinator,
        agreed: AgreedSteps,
    ) -> None:
        self._coordinator, self._ranks, self._agreed = coordinator, coordinator.ranks, agreed
        self._every = config.verify_every_steps
        world_size = self._ranks.world_size
        self.is_active = bool(
            self._every and world_size > 1 and config.replica_count == 1 and shares_all_weights(model, world_size)
        )
        self._digest = StateDigest(model, optimizer)
        self._compares_optimizer, self._optimizer_agreed, self._weights_agreed = True, False, False
        self._distance = culprit.partner_distance(world_size, world_size // config.nodes)
        self._device = next(model.parameters(), torch.empty(0)).device
        replays = self.is_active and isinstance(model, DistributedDataParallel)
        self._recorder = PassRecorder(model) if replays and isinstance(model, DistributedDataParallel) else None
        self._repeats_itself = False
        """Whether the program was seen to repeat its own passes bit for bit, on all ranks."""
        self._first_step = self._step = 0
        self._due = self._awaits_optimizer = False
        self._state_step = self._agreed_step = 0
        """Steps after which the states were equal, and after which gradients were found right as well."""
        if self.is_active:
            hook: Any = torch.compiler.disable(weakly(self._before_optimizer))
            optimizer.register_step_pre_hook(hook)

    def restored(self, step: int) -> None:
        """Training continues from a checkpoint of this step, which all ranks have read."""
        self._state_step = self._agreed_step = step
        self._first_step = step + 1
        if self.is_active:
            self._agreed.keep(step)

    def begin_step(self, step: int, total: int) -> None:
        """Prepare this step, which is verified if it is due: the first one, the last one, and every so many."""
        if not self.is_active:
            return
        self._step = step
        self._due = self._awaits_optimizer = step == self._first_step or step % self._every == 0 or step >= total
        if self._due and self._recorder is not None:
            self._recorder.arm()

    def end_step(self, *, saves: bool) -> None:
        """Compare the state after a step that is due or saved. Raises HoldfastError if ranks differ."""
        if self._awaits_optimizer and self._recorder is not None:
            self._recorder.disarm()  # the loop has skipped the optimizer's step, as loss scaling does
        if self.is_active and (self._due or saves):
            repeated = self._due and not self._awaits_optimizer
            self._compare_state(self._step)
            if self.is_active and (repeated or self._recorder is None):
                self._agreed_step = self._step
                self._agreed.keep(self._step)

    def _before_optimizer(self, *_: object) -> None:
        """Verify a due step between its backward pass and the change of weights."""
        if not self._awaits_optimizer or not self.is_active:
            return
        self._awaits_optimizer = False
        self._compare_state(self._step - 1)
        if self._recorder is not None and self.is_active:
            self._repeat_passes(self._recorder)

    def _compare_state(self, step: int) -> None:
        own = self._digest.compute(weights_only=not self._compares_optimizer)
        rows = self._ranks.all_gather((own.weights, own.optimizer))
        weights, optimizer = ([row[each] for row in rows] for each in range(2))
        if (found := culprit.outvoted(weights)) is not None:
            if not self._weights_agreed:
                self._give_up(culprit.never_equal(weights))
                return
            self._stop(found, step, self._state_step, "weights", culprit.digest_lines(weights))
        if (found := culprit.outvoted(optimizer)) is not None:
            if self._optimizer_agreed:
                self._stop(found, step, self._state_step, "optimizer state", culprit.digest_lines(optimizer))
            self._compares_optimizer = False  # each rank has a part of it, as in ZeroRedundancyOptimizer
        self._weights_agreed = True
        self._optimizer_agreed = self._compares_optimizer and optimizer[0] != _NO_DIGEST
        self._state_step = step

    def _repeat_passes(self, recorder: PassRecorder) -> None:
        """Have each rank's first pass repeated by its partner, and at the first time by itself."""
        taken, packed = _packed(recorder.take())
        if len(packed) > MAX_PAYLOAD_BYTES:
            taken = f"a pass has {len(packed) >> 20} MiB, more than {MAX_PAYLOAD_BYTES >> 20}"
        kind = crc32(_device_kind(self._device).encode())
        rows = self._ranks.all_gather((not isinstance(taken, str), kind, len(packed)))
        if not all(row[0] for row in rows):
            problem = self._ranks.first_not_none(taken if isinstance(taken, str) else None)
            self._stop_repeating(problem or "")
            return
        if len({row[1] for row in rows}) > 1:
            self._stop_repeating("the ranks run on devices of different types, which may round differently")
            return
        assert not isinstance(taken, str)
        own, digest = taken
        theirs = RecordedPass.unpack(self._exchange(packed, [row[2] for row in rows]), self._device)
        by_partner = self._try_repeat(recorder, theirs)
        by_itself = digest if self._repeats_itself else self._try_repeat(recorder, own)
        answers = self._ranks.all_gather(
            (digest, by_itself or 0, by_partner or 0, by_itself is not None and by_partner is not None)
        )
        if not all(row[3] for row in answers):
            self._stop_repeating("repeating a pass raised an error, such as for lack of memory")
            return
        if all(row[0] == row[1] for row in answers) and self._judge(answers) is None:
            self._repeats_itself = True
            return
        if self._repeats_itself:
            again = self._ranks.all_gather((self._try_repeat(recorder, own) or 0,))
            answers = [(row[0], mine[0], row[2], 1) for row, mine in zip(answers, again, strict=True)]
        found = self._judge(answers)
        if found is None or (not self._repeats_itself and any(row[0] != row[1] for row in answers)):
            self._stop_repeating("a rank that repeats its own pass gets other gradients")
            return
        self._stop(found, self._step, self._agreed_step, "gradients", _pair_lines(answers, self._distance))

    def _judge(self, answers: Sequence[Sequence[int]]) -> Corruption | None:
        """Answers: of each rank the digest of its pass, that of its repetition, and that of the pass it got."""
        return culprit.judge_repetitions(
            [
                Repetition(row[0] == row[1], row[0] == answers[(rank + self._distance) % len(answers)][2])
                for rank, row in enumerate(answers)
            ],
            self._distance,
        )

    def _try_repeat(self, recorder: PassRecorder, given: RecordedPass) -> int | None:
        """The digest of a repeated pass; None if it fails, as it may for lack of memory."""
        try:
            return recorder.repeat(given)
        except Exception:  # whatever it is, the other ranks wait for an answer
            return None

    def _exchange(self, packed: bytes, sizes: Sequence[int]) -> bytearray:
        """Send this rank's pass to its partner, and receive the one to repeat."""
        ranks = self._ranks
        source = (ranks.rank - self._distance) % ranks.world_size
        received = bytearray(sizes[source])
        sent = ranks.send(
            torch.frombuffer(bytearray(packed), dtype=torch.uint8), (ranks.rank + self._distance) % ranks.world_size
        )
        ranks.receive(torch.frombuffer(received, dtype=torch.uint8), source)
        sent()
        return received

    def _stop_repeating(self, why: str) -> None:
        self._recorder = None
        self._coordinator.report_finding(culprit.not_repeatable(why))

    def _give_up(self, finding: Finding) -> None:
        self.is_active = False
        self._coordinator.report_finding(finding)

    def _stop(self, found: Corruption, step: int, agreed_step: int, quantity: str, evidence: Sequence[str]) -> NoReturn:
        """Set aside the checkpoints since the last agreement, report, and end all ranks."""
        if found.certain and len(found.suspects) == 1:
            finding = culprit.corrupted(found.suspects[0], step, agreed_step, quantity, evidence)
        else:
            finding = culprit.differ(found.suspects, step, agreed_step, quantity, evidence)
        self._agreed.set_aside_after(agreed_step)
        if self._ranks.rank == found.suspects[0]:
            self._coordinator.report_corruption(
                CorruptionReported(
                    step=step,
                    agreed_step=agreed_step,
                    quantity=quantity,
                    certain=finding.code == "silent-corruption",
                    finding=finding,
                )
            )
        self._ranks.all(True)  # the report precedes the end of the other ranks
        raise HoldfastError((finding,), ExitCode.CANNOT_RUN_HERE)


def _packed(taken: tuple[RecordedPass, int] | str) -> tuple[tuple[RecordedPass, int] | str, bytes]:
    """A recorded pass, or why there is none, and its bytes."""
    if isinstance(taken, str):
        return taken, b""
    try:
        return taken, taken[0].pack()
    except Exception as error:  # whatever a program gives to its model, training continues
        return f"the model's arguments cannot be sent to another rank: {type(error).__name__}", b""


def _pair_lines(answers: Sequence[Sequence[int]], distance: int) -> list[str]:
    """A line for each pass whose repetition differs."""
    lines = list[str]()
    for rank, row in enumerate(answers):
        partner = (rank + distance) % len(answers)
        if row[0] != answers[partner][2]:
            lines.append(f"rank {partner} repeated a pass of rank {rank}, and got other gradients")
        if row[0] != row[1]:
            lines.append(f"rank {rank} repeated its own pass, and got other gradients")
    return lines[: culprit.MAX_DIGESTS]


def _device_kind(device: torch.device) -> str:
    """What decides how a device rounds: its model and, of a CPU, its vector units and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
