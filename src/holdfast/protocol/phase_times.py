"""How a rank spends its steps, by phase: measured in ranks, gathered by agents, compared in the controller."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """What a rank does at a moment of a step; every moment is in exactly one."""

    DATA = "data"
    """It waits for samples that come through the session."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """From the end of the gradients' reduction to the end of the optimizer's step: clipping is in it."""
    COMMUNICATION = "communication"
    """From its last local gradient to the last reduced one: it sends, or waits for other ranks."""
    HOST = "host"
    """Everything else that the loop does."""


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a typical step of one rank, in some consecutive steps."""

    rank: int = 0
    first_step: int = 0
    last_step: int = 0
    phases: tuple[float, ...] = ()
    """Seconds of each phase, in the order of `Phase`."""
    arrived: float = 0.0
    """Mean of the Unix seconds at which its own gradients of a step were ready; 0: not known."""
    longest_wait_s: float = 0.0
    """Its longest wait for samples in one of these steps."""
    cpu_wait_s: float = 0.0
    """Seconds of a step, in none of the phases, in which its thread waited for a CPU that others used."""
    loader: str = ""
    """What it waited for then."""

    @property
    def steps(self) -> int:
        """How many steps these are."""
        return self.last_step - self.first_step + 1

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return sum(self.phases)

    @property
    def own_s(self) -> float:
        """Seconds that the rank takes by itself: all but communication, in which it may wait for others."""
        return self.step_s - self.of(Phase.COMMUNICATION)

    def of(self, phase: Phase) -> float:
        """Seconds of a phase."""
        return self.phases[_PLACES[phase]]

    @property
    def is_valid(self) -> bool:
        """Whether it can be what a rank has measured; a message may be of another version."""
        sound = all(0.0 <= seconds < _MAX_S for seconds in (*self.phases, self.longest_wait_s, self.cpu_wait_s))
        return sound and len(self.phases) == len(_PLACES) and 0 <= self.first_step <= self.last_step


_MAX_S = 1e6
_PLACES = {phase: place for place, phase in enumerate(Phase)}


def merged(earlier: PhaseTimes, later: PhaseTimes) -> PhaseTimes:
    """The times of both, of one rank, weighted by their steps."""
    share = later.steps / (earlier.steps + later.steps)
    slower = max(earlier, later, key=lambda each: each.longest_wait_s)
    return PhaseTimes(
        rank=later.rank,
        first_step=earlier.first_step,
        last_step=later.last_step,
        phases=tuple(a + share * (b - a) for a, b in zip(earlier.phases, later.phases, strict=True)),
        arrived=earlier.arrived + share * (later.arrived - earlier.arrived),
        longest_wait_s=slower.longest_wait_s,
        loader=slower.loader,
        cpu_wait_s=earlier.cpu_wait_s + share * (later.cpu_wait_s - earlier.cpu_wait_s),
    )
