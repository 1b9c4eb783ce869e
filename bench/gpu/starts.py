"""From a start, and from `kill -9`, to the end of the first step on the device, through a real `holdfast run`.

Cold: `holdfast run` compared with `python` (A, A'), then kills with `recovery.prewarm: false`. Prewarmed: kills of a
run with its imports done. The section's own process never opens the GPU: an agent waits for GPUs that others use.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median

from bench.contenders import Contender, ContenderFailed, Running, holdfast, redirected
from bench.gpu.promises import KILL_COLD, KILL_PREWARMED, LAUNCH
from bench.gpu.section import Place, measured, skipped
from bench.paired_stats import OURS, PEER, PEER_AGAIN, interleave, say
from bench.result_file import Figure, Peer, Result
from holdfast.events import RanksPrewarmed
from holdfast.events.log import read_events

PROGRAM = "gpu_loop.py"
START_S, RECOVER_S, PREWARM_S = 180.0, 90.0, 180.0
SETTLED_STEPS = 12
"""Steps before a kill: more than between two checkpoints."""
COLD_KILLS, PREWARMED_KILLS, TINY_KILLS = 1, 2, 1
WIDTH, TINY_WIDTH = 1024, 16
PHASES = ("born", "imported", "device", "resumed", "step")


@dataclass(frozen=True)
class Start:
    """When one process of the rank reached each mark."""

    pid: int
    marks: dict[str, float]
    steps: int

    def phases(self, since: float) -> dict[str, float]:
        """Seconds between marks."""
        reached = [since, *(self.marks[name] for name in PHASES)]
        return {name: at - before for name, before, at in zip(PHASES, reached, reached[1:], strict=False)}


def measure(place: Place) -> Iterator[Result]:
    """Starts and kills, cold first; in tiny only the prewarmed ones, for each cold start imports torch."""
    if place.tiny:
        yield skipped(LAUNCH, "each cold start takes seconds of CPU time")
        yield skipped(KILL_COLD, "each cold start takes seconds of CPU time")
    else:
        yield from _cold(place)
    with _run(place, prewarm=True) as running:
        _settle(running, None)
        _wait(running, lambda: _prewarmed(running), PREWARM_S, "no prewarmed start")
        killed = [_kill(running) for _ in range(TINY_KILLS if place.tiny else PREWARMED_KILLS)]
    yield _recovery(KILL_PREWARMED, killed)


def _cold(place: Place) -> Iterator[Result]:
    phases: dict[str, list[dict[str, float]]] = {}
    killed: list[dict[str, float]] = []

    def first_step_s(side: Contender, name: str) -> float:
        with side() as running:
            start = _settle(running, None)
            phases.setdefault(name, []).append(start.phases(running.started))
            if name == OURS:
                killed.extend(_kill(running) for _ in range(COLD_KILLS))
            return start.marks["step"] - running.started

    def python() -> float:
        return first_step_s(lambda: redirected(PROGRAM, str(WIDTH)), PEER)

    def ours() -> float:
        return first_step_s(lambda: _run(place, prewarm=False), OURS)

    (done,) = interleave({PEER: python, OURS: ours, PEER_AGAIN: python}, 1, unit="s")
    bare_s = (done[PEER] + done[PEER_AGAIN]) / 2
    yield measured(
        LAUNCH,
        Figure(value=done[OURS], unit="s", decimals=2),
        difference=Figure(value=done[OURS] - bare_s, unit="s", decimals=2),
        floor=Figure(value=abs(done[PEER] - done[PEER_AGAIN]), unit="s", decimals=2),
        peer=Peer(name="python", figure=Figure(value=bare_s, unit="s", decimals=2)),
        conditions="one round",
        details=_details(phases[OURS]),
    )
    yield _recovery(KILL_COLD, killed)


def _run(place: Place, *, prewarm: bool) -> AbstractContextManager[Running]:
    settings = [f"recovery.prewarm={str(prewarm).lower()}", f"checkpoint.every_steps={SETTLED_STEPS // 2}"]
    if place.device.kind == "cuda":
        settings.append("gpus_per_node=1")
    return holdfast(PROGRAM, str(TINY_WIDTH if place.tiny else WIDTH), nodes=1, settings=settings)


def _kill(running: Running) -> dict[str, float]:
    """Kill the rank; the seconds of each phase until its first step again."""
    before = _settle(running, None)
    killed_at = time.time()
    os.kill(before.pid, signal.SIGKILL)
    phases = _settle(running, before.pid).phases(killed_at)
    say(f"  kill -9: {sum(phases.values()):.2f} s  " + "  ".join(f"{name} {took:.2f}" for name, took in phases.items()))
    return phases


def _settle(running: Running, old: int | None) -> Start:
    """Wait until a process other than `old` has taken some steps."""

    def settled() -> bool:
        start = _newest(running)
        return start is not None and start.pid != old and start.steps >= SETTLED_STEPS

    _wait(running, settled, START_S if old is None else RECOVER_S, f"no {SETTLED_STEPS} steps")
    start = _newest(running)
    assert start is not None
    return start


def _wait(running: Running, ready: Callable[[], bool], within_s: float, otherwise: str) -> None:
    if not running.wait_for(ready, within_s):
        say(running.last_words())
        raise ContenderFailed(f"{otherwise} within {within_s:g} s")


def _newest(running: Running) -> Start | None:
    path = running.out / "rank-0"
    text = path.read_text() if path.exists() else ""
    lines = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    if not lines:
        return None
    pid = lines[-1][0]
    marks: dict[str, float] = {}
    own = [(what, float(at)) for whose, what, _, at in lines if whose == pid]
    for what, at in own:
        marks.setdefault(what, at)
    return Start(int(pid), marks, sum(what == "step" for what, _ in own))


def _prewarmed(running: Running) -> bool:
    logs = running.folder.glob("home/runs/*/events.jsonl")
    return any(isinstance(event, RanksPrewarmed) for log in logs for event in read_events(log))


def _recovery(claim: str, killed: Sequence[dict[str, float]]) -> Result:
    totals = [sum(phases.values()) for phases in killed]
    return measured(
        claim,
        Figure(value=median(totals), unit="s", decimals=2),
        conditions=f"{len(killed)} kills, one rank, checkpoint loaded",
        details=_details(killed),
    )


def _details(phases: Sequence[dict[str, float]]) -> dict[str, str]:
    names = {
        "born": "until the process runs",
        "imported": "imports",
        "device": "device opened",
        "resumed": "state loaded",
        "step": "first step",
    }
    return {words: f"{median(each[name] for each in phases):.2f} s" for name, words in names.items()}
