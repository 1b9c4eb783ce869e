"""What a Session costs a step on the device's clock, and whether a step profile tells the truth there.

Blocks of bare steps (A), of steps with a Session that reports to an agent's socket (B), and of bare ones again (A'), in
an order that changes. A block's figure is the time between its first and its last mark over its steps.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import torch

from bench.gpu.device import Device, open_device
from bench.gpu.promises import OVERHEAD_LEFT, OVERHEAD_READ, PARTS_ADD_UP, PROFILE_COST
from bench.gpu.section import Place, measured
from bench.paired_stats import OURS, PEER, PEER_AGAIN, Round, estimate, interleave
from bench.result_file import Figure, Peer, Result
from bench.session_overhead import READER
from holdfast.metrics.step_breakdown import StepPart, breakdown_metric
from holdfast.train import RankConfig, Session
from holdfast.train.metrics.profiler import STEPS as PROFILED_STEPS
from holdfast.train.metrics.profiler import Profiler

GOAL_MS = 0.2
ROUNDS, STEPS = 8, 200
TINY_ROUNDS, TINY_STEPS = 1, 5
WIDTH, LAYERS, BATCH = 2048, 4, 2048
TINY_WIDTH, TINY_BATCH = 32, 8
ADDS_UP = 0.02
"""How far the sum of a profile's parts may be from the step's time."""


class Loop:
    """A step of a few milliseconds on a GPU: short, so that what a Session adds is not hidden."""

    def __init__(self, place: Place, device: Device) -> None:
        width = TINY_WIDTH if place.tiny else WIDTH
        with device.torch:
            self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
            self._batch = torch.randn(TINY_BATCH if place.tiny else BATCH, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> torch.Tensor:
        """One optimizer step; returns its loss, which is still on the device."""
        self.optimizer.zero_grad()
        loss = (self.model(self._batch) - self._batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure_overhead(place: Place) -> Iterator[Result]:
    """The cost of a Session, for loops that read their loss and loops that do not."""
    device = open_device(place.device)
    loop = Loop(place, device)
    socket = place.folder / "rank"
    reader = subprocess.Popen([sys.executable, "-c", READER, socket], stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline(), "the reader has failed"
        session = Session(model=loop.model, optimizer=loop.optimizer, config=RankConfig(rank_socket=socket))

        def read(loss: torch.Tensor) -> None:
            loss.item()
            session.commit(loss=loss)

        yield _overhead(OVERHEAD_READ, place, device, loop, torch.Tensor.item, read)
        yield _overhead(OVERHEAD_LEFT, place, device, loop, lambda loss: None, lambda loss: session.commit(loss=loss))
    finally:
        reader.kill()
        reader.wait()


def _overhead(
    claim: str,
    place: Place,
    device: Device,
    loop: Loop,
    bare: Callable[[torch.Tensor], object],
    ours: Callable[[torch.Tensor], object],
) -> Result:
    steps = TINY_STEPS if place.tiny else STEPS
    ends = {PEER: bare, OURS: ours, PEER_AGAIN: bare}

    def block(end: Callable[[torch.Tensor], object]) -> float:
        device.synchronize()
        begin = device.mark()
        for _ in range(steps):
            end(loop.step())
        return device.elapsed_ms(begin, device.mark()) / steps

    for end in ends.values():
        block(end)
    sides = {side: (lambda end=end: block(end)) for side, end in ends.items()}
    rounds = interleave(sides, TINY_ROUNDS if place.tiny else ROUNDS, unit="ms a step")
    added = estimate([_added_ms(each) for each in rounds])
    floor = estimate([each[PEER_AGAIN] - each[PEER] for each in rounds])
    bare_ms = estimate([each[PEER] for each in rounds]).median
    return measured(
        claim,
        difference=Figure(value=added.median, low=added.low, high=added.high, unit="ms", decimals=3),
        floor=Figure(value=floor.median, low=floor.low, high=floor.high, unit="ms", decimals=3),
        peer=Peer(name="the bare step", figure=Figure(value=bare_ms, unit="ms", decimals=2)),
        goal=f"≤ {GOAL_MS} ms",
        met=added.median <= GOAL_MS,
        conditions=f"{len(rounds)} rounds of {steps} steps",
    )


def _added_ms(one: Round) -> float:
    return one[OURS] - (one[PEER] + one[PEER_AGAIN]) / 2


def measure_profile(place: Place) -> Iterator[Result]:
    """A profile of a few steps: the sum of its parts compared with the device's clock, and what it costs."""
    device = open_device(place.device)
    loop = Loop(place, device)
    for _ in range(2):
        loop.step().item()

    def steps_s() -> float:
        device.synchronize()
        begin = device.mark()
        for _ in range(PROFILED_STEPS):
            loop.step().item()
        return device.elapsed_ms(begin, device.mark()) / PROFILED_STEPS / 1e3

    ordinary_s = steps_s()
    profiler = Profiler()
    _profile(profiler, loop)  # the first one loads the tracing library
    profiler.start()
    device.synchronize()
    begin, parts = device.mark(), dict[str, float]()
    marks = [begin]
    for _ in range(PROFILED_STEPS):
        loop.step().item()
        marks.append(device.mark())
        parts |= profiler.step(last=False)
    assert parts, [finding.evidence for finding in profiler.take_findings()]
    profiled_s = device.elapsed_ms(marks[0], marks[-1]) / PROFILED_STEPS / 1e3
    shares = {part.value: parts[breakdown_metric(part)] for part in StepPart}
    total_s = sum(shares.values())
    again_s = steps_s()
    yield measured(
        PARTS_ADD_UP,
        Figure(value=total_s / profiled_s, unit="×", decimals=3),
        goal=f"1 ± {ADDS_UP}",
        met=abs(total_s / profiled_s - 1) <= ADDS_UP,
        conditions=f"{PROFILED_STEPS} steps of {1e3 * profiled_s:.2f} ms",
        details={part: f"{share / total_s:.1%}" for part, share in shares.items() if share},
    )
    yield measured(
        PROFILE_COST,
        Figure(value=profiled_s / ((ordinary_s + again_s) / 2), unit="×", decimals=2),
        floor=Figure(value=again_s / ordinary_s, unit="×", decimals=2),
        conditions=f"ordinary steps of {1e3 * ordinary_s:.2f} ms",
    )


def _profile(profiler: Profiler, loop: Loop) -> None:
    profiler.start()
    for _ in range(PROFILED_STEPS):
        loop.step().item()
        profiler.step(last=False)
    profiler.take_findings()
