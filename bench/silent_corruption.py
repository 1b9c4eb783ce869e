"""Plants single-bit flips in one of several data-parallel ranks, and counts which are found, when, and on which rank.

.venv/bin/python -m bench.silent_corruption [--quick] [--json FILE]

Ranks are processes on one CPU, with DDP over Gloo and AdamW. Each case flips a bit on one rank after a step; a
flip in weights or optimizer state stays, and one in gradients or activations comes again in each later step, as from a
device with a defect. A flip in one step only is found if that step is verified: those cases verify every step. Then a
clean run, whose findings would all be false, and the time of a step with and without verification.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import result_file
from bench.paired_stats import headline, say, table
from holdfast.errors import HoldfastError
from holdfast.events import FaultTarget
from holdfast.protocol.rank_messages import InjectRankFault, RankFault
from holdfast.train import Session
from holdfast.train.ft.bit_flip import flip_bit
from holdfast.train.session.rank_config import RankConfig

RANKS = 3
EVERY = 5
"""Steps between two verifications."""
CLEAN_STEPS, CLEAN_EVERY = 10_000, 10
SEEDS, QUICK_SEEDS = 8, 2
WIDTH = 16
DEADLINE_S = 900.0
STATE = (FaultTarget.WEIGHTS, FaultTarget.OPTIMIZER)
COMPUTED = (FaultTarget.GRADIENT, FaultTarget.ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and what is flipped in it."""

    target: FaultTarget | None = None
    rank: int = 0
    seed: int = 0
    after: int = 7
    once: bool = False
    """Whether a computed bit is wrong in one step only."""
    every: int = EVERY
    steps: int = 20
    width: int = WIDTH
    folder: str = ""
    """Of its checkpoints, one after each step; without it there are none."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the ranks of a case found."""

    step: int = 0
    """The last step that began."""
    code: str = ""
    where: str = ""
    step_s: float = 0.0
    """Median duration of a step."""
    findings: tuple[str, ...] = ()
    """Codes of findings that ended nothing."""


class Model(nn.Module):
    """A residual network with dropout and running statistics, which a repeated pass must restore."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm, self.drop, self.head = nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.head(self.norm(x))


def train(case: Case, config: RankConfig) -> Outcome:
    """Train one case as one rank."""
    torch.manual_seed(case.seed)
    inner = Model(case.width)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(model=model, optimizer=optimizer, config=config)
    found: list[str] = []
    session._coordinator.report_finding = lambda finding, fatal=False: found.append(finding.code)  # type: ignore[method-assign]
    faults = session._coordinator._faults
    faults._flips = case.seed
    data = torch.Generator().manual_seed(1000 * case.seed + config.rank)
    step, durations = 0, list[float]()
    handle: Any = None
    try:
        for step in session.steps(case.steps):
            began = time.perf_counter()
            x = torch.randn(8, case.width, generator=data)
            optimizer.zero_grad()
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            if handle is not None:
                handle.remove()
            session.commit(loss=loss.detach())
            if step == case.after and case.rank == config.rank and case.target is not None:
                if case.once:
                    handle = _flip_once(inner, case)
                else:
                    faults.inject(InjectRankFault(fault=RankFault.BITFLIP, target=case.target.value))
            durations.append(time.perf_counter() - began)
    except HoldfastError as error:
        (finding,) = error.findings
        return Outcome(step=step, code=finding.code, where=finding.where, findings=tuple(found))
    return Outcome(step=step, step_s=median(durations), findings=tuple(found))


def _flip_once(model: Model, case: Case) -> Any:
    random = Random(case.seed)

    def flipped(*given: Any) -> torch.Tensor:
        changed = given[-1].clone()
        flip_bit(changed, random)
        handle.remove()
        return changed

    hooked: Any = model.head.weight if case.target is FaultTarget.GRADIENT else model.norm  # dropout discards no flip
    register: Any = getattr(hooked, "register_hook" if case.target is FaultTarget.GRADIENT else "register_forward_hook")
    handle: Any = register(flipped)
    return handle


def _rank(rank: int, ranks: int, store: str, cases: Sequence[Case], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        for case in cases:
            config = RankConfig(
                rank=rank,
                world_size=ranks,
                nodes=ranks,
                verify_every_steps=case.every,
                checkpoint_path=Path(case.folder) if case.folder else None,
                checkpoint_every_steps=1 if case.folder else None,
            )
            pipe.send(train(case, config))
        dist.destroy_process_group()
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def run(cases: Sequence[Case], ranks: int = RANKS) -> list[list[Outcome]]:
    """The outcome of each case on each rank. Raises RuntimeError if a rank fails otherwise."""
    # Not forks of this process: once it has computed gradients, its forks cannot.
    forks = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [forks.Pipe() for _ in range(ranks)]
        processes = [
            forks.Process(target=_rank, args=(rank, ranks, f"{folder}/store", cases, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for each in processes:
            each.start()
        try:
            return [[_received(ours) for ours, _ in pipes] for _ in cases]
        finally:
            for each in processes:
                each.kill()
                each.join()


def _received(pipe: Connection) -> Outcome:
    if not pipe.poll(DEADLINE_S):
        raise RuntimeError(f"no answer within {DEADLINE_S:g} s")
    answer = pipe.recv()
    if not isinstance(answer, Outcome):
        raise RuntimeError(answer)
    return answer


def planted(ranks: int, seeds: int) -> list[Case]:
    """One case for each target, rank and seed, at different distances from the next verification."""
    return [
        Case(target=target, rank=rank, seed=seed, after=6 + (seed + rank) % EVERY)
        for target in (*STATE, *COMPUTED)
        for rank in range(ranks)
        for seed in range(seeds)
    ] + [
        Case(target=target, rank=rank, seed=seed, after=6, once=True, every=1, steps=9)
        for target in COMPUTED
        for rank in range(ranks)
        for seed in range(seeds)
    ]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    headline("Silent corruption")
    multiprocessing.set_forkserver_preload(["bench.silent_corruption"])
    cases = planted(RANKS, QUICK_SEEDS if given.quick else SEEDS)
    steps = CLEAN_STEPS // 10 if given.quick else CLEAN_STEPS
    outcomes = run([*cases, Case(every=CLEAN_EVERY, steps=steps)])
    *flipped, clean = outcomes
    found = [each for case, each in zip(cases, flipped, strict=True) if _is_found(case, each)]
    right = [each for case, each in zip(cases, flipped, strict=True) if _is_right(case, each)]
    say(table(("flip", "planted", "found in time", "right rank", "steps until found"), _rows(cases, flipped)))
    false = sum(bool(each.code or each.findings) for each in clean)
    say(f"clean: {clean[0].step} steps of {RANKS} ranks, verified every {CLEAN_EVERY}: {false} findings")
    off, on = (each[0].step_s for each in run([Case(every=every, steps=60, width=512) for every in (0, 1)]))
    say(
        f"a step takes {1e3 * off:.2f} ms, and a verified one {1e3 * on:.2f} ms: {100 * (on / off - 1) / 100:.2f} % of "
        "the time at the default of every 100 steps"
    )
    result_file.save(
        given.json,
        "Silent corruption",
        [
            result_file.absolute("planted flips not found in time", len(cases) - len(found), "", goal=0.0, decimals=0),
            result_file.absolute(
                "planted flips without the right rank", len(cases) - len(right), "", goal=0.0, decimals=0
            ),
            result_file.absolute(f"findings in {steps} clean steps", false, "", goal=0.0, decimals=0),
        ],
    )


def _rows(cases: Sequence[Case], outcomes: Iterable[Sequence[Outcome]]) -> list[tuple[str, ...]]:
    grouped: dict[str, list[tuple[Case, Sequence[Outcome]]]] = {}
    for case, each in zip(cases, outcomes, strict=True):
        grouped.setdefault(f"{case.target}{', once' if case.once else ''}", []).append((case, each))
    return [
        (
            name,
            str(len(pairs)),
            str(sum(_is_found(*pair) for pair in pairs)),
            str(sum(_is_right(*pair) for pair in pairs)),
            f"{median(each[0].step - case.after for case, each in pairs):g} (at most "
            f"{max(each[0].step - case.after for case, each in pairs)})",
        )
        for name, pairs in grouped.items()
    ]


def _is_found(case: Case, outcome: Sequence[Outcome]) -> bool:
    return all(each.code and each.step - case.after <= case.every for each in outcome)


def _is_right(case: Case, outcome: Sequence[Outcome]) -> bool:
    return all((each.code, each.where) == ("silent-corruption", f"rank {case.rank}") for each in outcome)


if __name__ == "__main__":
    main()
