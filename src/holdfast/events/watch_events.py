"""Events about ranks and nodes that still run: what monitors and detectors have observed, on which the policy acts."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.events.agent_events import DeviceFault
from holdfast.events.base import Event
from holdfast.events.ranges import Ranges
from holdfast.findings import Finding


class DeviceFaultObserved(Event, frozen=True, kw_only=True):
    """An agent's monitor saw a device of its node fail, whether or not a rank has noticed."""

    node: int
    generation: int
    fault: DeviceFault
    device: str = ""
    """The device, such as `GPU 3` or `mlx5_0 port 1`."""
    finding: Finding


class TrafficStopped(Event, frozen=True, kw_only=True):
    """The ranks on a node exchanged data with other nodes, and have not for ten minutes."""

    node: int
    finding: Finding


class MonitorsStarted(Event, frozen=True, kw_only=True):
    """An agent reads the sources that its node has, from its first ranks on."""

    node: int
    generation: int
    sources: tuple[str, ...]
    missing: dict[str, str] = {}
    """Why each other source is not read."""


class NumericFault(StrEnum):
    """What is wrong with a rank's numbers."""

    NON_FINITE = "non-finite"
    """A NaN or an infinity."""
    SPIKE = "spike"
    """A value far above its running median."""


class NumericFaultObserved(Event, frozen=True, kw_only=True):
    """A rank's loss, gradients or weights are not finite, or spiked; one event per step and replica, of the first rank.

    The other ranks receive the values of the first in the next all-reduce.
    """

    node: int
    replica: int
    attempt: int
    rank: int
    step: int
    fault: NumericFault
    quantity: str
    """`loss`, `gradient`, `weights` or `optimizer`."""
    parameter_group: str = ""
    """The first group of parameters, in the order of the optimizer, whose values are affected; empty if unknown."""
    damaged: bool = False
    """Whether weights or optimizer state are not finite, so that the run cannot continue from them."""
    is_origin: bool = True
    """Whether the rank's own numbers show that it began there, and not what other ranks gave it in a reduction."""
    finding: Finding


class CorruptionObserved(Event, frozen=True, kw_only=True):
    """A rank holds or computes other numbers than the ranks that must be equal to it, and no device reported an error.

    One event per replica, of the rank that is wrong or, without proof, of the first that may be.
    """

    node: int
    replica: int
    attempt: int
    rank: int
    step: int
    """Steps finished when it was found."""
    agreed_step: int
    """The last step after which all ranks agreed; later checkpoints are set aside."""
    quantity: str
    """`weights`, `optimizer state` or `gradients`."""
    certain: bool
    """Whether the other ranks prove that this one is wrong."""
    continues: bool = False
    """Whether it has received the state of the others, as a replica among several does, and needs no restart."""
    finding: Finding


class StragglerObserved(Event, frozen=True, kw_only=True):
    """One rank computes slower than the others of its replica, which wait for it."""

    node: int
    replica: int
    attempt: int
    rank: int
    phase: str
    """Where it loses the time: `data`, `forward`, `backward`, `optimizer`, `communication` or `host`."""
    slowdown: float
    """Its own time for a step, divided by the median of the others."""
    first_step: int
    last_step: int
    finding: Finding


class RankStepTime(msgspec.Struct, frozen=True, array_like=True):
    """How long one rank takes for a step by itself: until its gradients are ready, without waiting for others."""

    rank: int
    own_s: float
    phase: str
    """Where it takes the most seconds beyond the median of the ranks."""
    beyond_s: float
    """How many those are."""


class StepTimesCompared(Event, frozen=True, kw_only=True):
    """How long the ranks of a replica take for a step; an attempt has one after 2 s, later one every 120 s."""

    replica: int
    attempt: int
    first_step: int
    last_step: int
    ranks: int
    """Ranks that have measured their steps."""
    step_p50_s: float
    """Of a whole step, in which fast ranks wait for slow ones; the median over the ranks."""
    step_p99_s: float
    own_p50_s: float
    """Of what the ranks take by themselves."""
    own_p99_s: float
    phases_s: dict[str, float] = {}
    """The median of each phase: `data`, `forward`, `backward`, `optimizer`, `communication`, `host`."""
    slowest: tuple[RankStepTime, ...] = ()
    """By their own time, the slowest first; at most 32."""

    def lag_of(self, one: RankStepTime) -> float:
        """By which share of the median a rank's own time exceeds it."""
        return one.own_s / self.own_p50_s - 1 if self.own_p50_s > 0 else 0.0


class EqualStacks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ranks of a hang whose training threads have the same frames."""

    ranks: Ranges
    frames: tuple[str, ...]
    """Innermost first."""


class StacksCompared(Event, frozen=True, kw_only=True):
    """The stacks of a replica's ranks, compared with one another: after a hang, or in dumps of a slow run."""

    replica: int
    attempt: int
    groups: tuple[EqualStacks, ...]
    """The largest first; at most eight."""
    more_groups: int = 0
    missing: Ranges = ()
    """Ranks whose stack could not be read."""
    suspects: Ranges = ()
    """Ranks for which the others wait."""
    nodes: Ranges = ()
    """The nodes of those that reported."""
    origin: str = ""
    """The smallest parallel group that covers the suspects, such as `tp group of ranks 8-15`."""
    affected: str = ""
    """The smallest one that covers all ranks outside the largest group, where that is another."""
    rounds: int = 1
    """Dumps of running ranks; the groups are those of one of them."""
    times: int = 0
    """Of several dumps, those in which the others waited for the suspects."""
