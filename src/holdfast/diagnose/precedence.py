"""Decides which of several failures came first: the one set of rules for a live run and for logs.

control/root_cause.py feeds it what a run saw, root_cause_analysis.py what lines of logs suggest. Of two failures, the
first of these rules that applies decides:

1. One that ends a run ranks before one that only slows it.
2. One of the rank that the run saw fail first ranks before one of another rank.
3. A rank's own error ranks before one about a connection, and that before one about a lost peer, if the failure of
   a process explains them: it ended that process, and not clearly later.
4. Stronger evidence ranks before weaker.
5. The clearly earlier one ranks first if it is as deep, or certain.
6. The deeper one ranks first: a lost GPU explains a hang, never a hang a lost GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Generic, TypeVar

from msgspec import Struct

from holdfast.diagnose.failure_classes import Confidence

_T = TypeVar("_T")

_CONFIDENCE_ORDER = {each: order for order, each in enumerate(Confidence)}


class PeerSymptom(IntEnum):
    """How likely an error is a symptom of a failure elsewhere."""

    NONE = 0
    NETWORK = 1
    """It mentions a connection, perhaps to a peer."""
    PEER = 2
    """It mentions a peer that is gone."""


class Clocks(Struct, frozen=True, kw_only=True):
    """How far the times of failures can be trusted."""

    skew_s: float
    """Two failures may have happened in either order if their times differ by no more."""
    report_lag_s: float
    """A failure may be reported this much later than the errors of its peers."""


class Suspect(Struct, Generic[_T], frozen=True, kw_only=True):
    """A failure that may have come first, as far as it matters for the order."""

    failure: _T
    at: float | None
    layer: int
    """Its depth among causes; the deepest is 0."""
    confidence: Confidence
    ends_process: bool
    """Whether it ended a process, so that its peers reported a lost one."""
    symptom: PeerSymptom = PeerSymptom.NONE
    is_of_other_rank: bool = False
    """Whether the run saw another rank fail first."""
    slows_only: bool = False
    is_indirect: bool = False
    """Whether, of two that are otherwise equal, the other shows more."""
    line: tuple[str, int] | None = None
    """Its source and line, for lines without a time."""


def first_cause(suspects: Sequence[Suspect[_T]], clocks: Clocks) -> Suspect[_T] | None:
    """The failure that came first; of equals the earliest, and of those the first in the sequence."""
    explained = set(map(id, explained_among(suspects, clocks)))

    def weight(one: Suspect[_T]) -> tuple[bool, bool, int, int]:
        symptom = one.symptom if id(one) in explained else PeerSymptom.NONE
        return one.slows_only, one.is_of_other_rank, symptom, _CONFIDENCE_ORDER[one.confidence]

    ranked = sorted(suspects, key=lambda one: (weight(one), one.layer, one.is_indirect))
    if not ranked:
        return None
    first = ranked[0]
    equals = [one for one in ranked if weight(one) == weight(first)]
    while earlier := [one for one in equals if _is_before(one, first, clocks.skew_s) and _may_precede(one, first)]:
        first = earlier[0]
        equals = [one for one in equals if one is not first]  # times and line numbers may contradict one another
    return first


def explained_among(suspects: Sequence[Suspect[_T]], clocks: Clocks) -> list[Suspect[_T]]:
    """Those that only report the loss of a peer, where another failure ended a process before."""
    killers = {
        symptom: [one for one in suspects if one.ends_process and one.symptom < symptom] for symptom in PeerSymptom
    }
    return [
        one
        for one in suspects
        if any(not _is_before(one, other, clocks.report_lag_s) for other in killers[one.symptom])
    ]


def by_likelihood(suspects: Sequence[Suspect[_T]], nearest: _T, clocks: Clocks) -> list[_T]:
    """The failures between which nothing decides: `nearest`, then by what ends a run, evidence, time and depth."""
    began = min((one.at for one in suspects if one.at is not None), default=0.0)

    def weight(one: Suspect[_T]) -> tuple[bool, bool, int, int, int]:
        late = 0 if one.at is None else int((one.at - began) // clocks.skew_s)
        return one.failure is not nearest, one.slows_only, _CONFIDENCE_ORDER[one.confidence], late, one.layer

    return [one.failure for one in sorted(suspects, key=weight)]


def _is_before(one: Suspect[_T], other: Suspect[_T], by_s: float) -> bool:
    if one.at is not None and other.at is not None:
        return one.at < other.at - by_s
    return one.line is not None and other.line is not None and one.line[0] == other.line[0] and one.line < other.line


def _may_precede(one: Suspect[_T], other: Suspect[_T]) -> bool:
    """Whether being earlier is enough."""
    return one.layer <= other.layer or one.confidence is Confidence.CERTAIN
