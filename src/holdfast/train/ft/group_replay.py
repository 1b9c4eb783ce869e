"""A rank's part in a replay: a group of nodes repeats the steps after a checkpoint, and leaves a digest of its state.

Groups of one size make the same steps with the same samples and random numbers, so healthy ones end in equal states.
Who compares them: watch/dual_phase.py.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from holdfast.protocol.replay_env import MAX_STEPS, digest_file
from holdfast.train.ft.state_digest import StateDigest
from holdfast.train.session.control_group import ControlGroup
from holdfast.train.session.rank_config import RankConfig


class GroupReplay:
    """One rank's part in a replay; all ranks of the group make the same calls."""

    def __init__(
        self, *, last_step: int, file: Path, model: nn.Module, optimizer: Optimizer, ranks: ControlGroup
    ) -> None:
        self._last_step = last_step
        self._file = file
        self._digest = StateDigest(model, optimizer)
        self._ranks = ranks

    @classmethod
    def of(
        cls, config: RankConfig, step: int, model: nn.Module, optimizer: Optimizer, ranks: ControlGroup
    ) -> GroupReplay | None:
        """The replay from the state after `step`, of one step at least and `MAX_STEPS` at most; None without one."""
        if config.replay_until is None or config.replay_folder is None:
            return None
        last_step = min(max(config.replay_until, step + 1), step + MAX_STEPS)
        file = config.replay_folder / digest_file(config.rank)
        return cls(last_step=last_step, file=file, model=model, optimizer=optimizer, ranks=ranks)

    def is_over(self, step: int, total: int | None) -> bool:
        """Whether this step was the last one."""
        return step >= self._last_step or step == total

    def leave_digest(self) -> None:
        """Write the digest of this rank's state; no rank ends before all have done so."""
        weights, optimizer = self._digest.compute()
        self._file.write_text(f"{weights} {optimizer}\n")
        self._ranks.all(True)
