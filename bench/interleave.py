"""Interleaves sides that run in parallel: each is frozen (SIGSTOP) except during its own blocks of time.

So sides alternate every few seconds without a start each time. A block during which other processes used more than a
few percent of the machine is repeated, a few times; its result plays no part in that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench import load_gate
from bench.contenders import ContenderFailed, Running, freeze, raise_priority, thaw
from holdfast.host.processes import by_env

SETTLING_STEPS = 2
WARM_STEPS = 15
START_S = 120.0
FOREIGN_SHARE = 0.05
"""Share of the machine that others may use during a block."""
TRIES = 2
ROLES = ("holdfast.agent", "holdfast.controller_main", "local_supervisor", "torchrun", "holdfast run")
"""Command-line substring of a supervising process."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One side's turn."""

    steps_s: list[float]
    supervisors_s: dict[str, float]
    """CPU seconds of its processes that are not ranks, by role."""
    foreign_share: float
    ranks_ms_a_step: float
    """CPU milliseconds of its ranks for a step."""


class Interleaved:
    """A side that is frozen except during its turns."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._log = running.out / "steps"
        if not running.wait_for(lambda: len(_ends(self._log)) >= WARM_STEPS, START_S):
            raise ContenderFailed(f"no {WARM_STEPS} steps within {START_S:g} s\n{running.last_words()}")
        self._pids = running.pids()
        ranks = set(by_env(self._pids, WORLD_SIZE="2"))
        self._roles = {pid: _role(pid) for pid in self._pids if pid not in ranks}
        raise_priority(self._pids)
        freeze(self._pids)

    def run_block(self, block_s: float) -> Block:
        """Run for a while, undisturbed if possible; return the steps that began and ended in the block."""
        block = self._block(block_s)
        for _ in range(TRIES - 1):
            if block.foreign_share <= FOREIGN_SHARE:
                break
            load_gate.wait_until_idle()
            block = self._block(block_s)
        return block

    def _block(self, block_s: float) -> Block:
        before = {pid: load_gate.cpu_s(pid) for pid in self._pids}
        busy_s, began = load_gate.busy_s(), time.time()
        thaw(self._pids)
        time.sleep(block_s)
        freeze(self._pids)
        ended, busy_s = time.time(), load_gate.busy_s() - busy_s
        if self._running.ended():
            raise ContenderFailed(f"a side ended\n{self._running.last_words()}")
        used = {pid: load_gate.cpu_s(pid) - seconds for pid, seconds in before.items()}
        supervisors_s: dict[str, float] = defaultdict(float)
        for pid, role in self._roles.items():
            supervisors_s[role] += used[pid]
        ends = [at for at in _ends(self._log) if began <= at <= ended]
        steps_s = [later - earlier for earlier, later in pairwise(ends)][SETTLING_STEPS:]
        if not steps_s:
            raise ContenderFailed(f"no step within {block_s:g} s\n{self._running.last_words()}")
        foreign_share = (busy_s - sum(used.values())) / (ended - began) / load_gate.CORES
        ranks_s = sum(seconds for pid, seconds in used.items() if pid not in self._roles)
        return Block(
            steps_s=steps_s,
            supervisors_s=supervisors_s,
            foreign_share=foreign_share,
            ranks_ms_a_step=1e3 * ranks_s / len(ends),
        )


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return next((role for role in ROLES if role in words), "other")


def _ends(log: Path) -> list[float]:
    text = log.read_text() if log.exists() else ""
    return [float(line) for line in text[: text.rfind("\n") + 1].splitlines()]
