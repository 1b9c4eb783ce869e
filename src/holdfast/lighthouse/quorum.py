"""Owns the decision which replicas take the next step together; pure, with the time as an argument.

The rules are those that TorchFT's managers rely on (its Lighthouse): a quorum is answered when the members of the one
before, or all who are known to live, ask for it; a joiner is taken in with the next; the number rises when the members
change or one could not commit. What is added is certainty: the controller knows whose ranks have ended, so nobody is
waited for until his heartbeats are missed, and at the start and after a restart it is known who is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which a member that nobody has said to be lost is not waited for."""

START_WAIT_S = 60.0
"""Longest, in seconds, that the first to ask for a step wait for replicas that have been started and not asked yet; and
those that are back where all were lost."""

RESTART_WAIT_S = 0.5
"""The same for a service that is new to a training that goes on: those at work ask within milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A replica as its manager describes it; the fields are the protocol's."""

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 0
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Those who take a step together, in the order of their names."""

    quorum_id: int
    members: tuple[Member, ...]
    created_at: float
    """Unix seconds."""

    @property
    def replica_ids(self) -> frozenset[str]:
        return frozenset(member.replica_id for member in self.members)


@dataclass(frozen=True, kw_only=True)
class PendingRequest:
    """A member that asks for a quorum, and since when (seconds)."""

    member: Member
    since: float


@dataclass(frozen=True, kw_only=True)
class QuorumState:
    """All that is known; times are on one clock, in seconds."""

    min_replicas: int
    last_heartbeat: Mapping[str, float] = field(default_factory=dict[str, float])
    """When each was heard last; those that are known to be lost are not among them."""
    requests: Mapping[str, PendingRequest] = field(default_factory=dict[str, PendingRequest])
    expected_replicas: int = 0
    """How many replicas have ranks, as far as the controller has said."""
    previous: Quorum | None = None


def compute_quorum(state: QuorumState, now: float) -> tuple[Member, ...] | str:
    """The members of the next quorum, or what is waited for."""
    alive = {name for name, at in state.last_heartbeat.items() if now - at < HEARTBEAT_TIMEOUT_S}
    requests = {name: one for name, one in sorted(state.requests.items()) if name in alive}
    members = tuple(one.member for one in requests.values())
    if not members:
        return "nobody asks"
    before = state.previous.replica_ids if state.previous else frozenset[str]()
    if any(member.shrink_only for member in members):
        members = tuple(member for member in members if member.replica_id in before)
    if len(members) < state.min_replicas:
        return f"{len(members)} of at least {state.min_replicas} replicas ask"
    if before and all(name in requests for name in before):
        return members
    if 2 * len(requests) <= len(alive):
        return f"{len(requests)} of {len(alive)} replicas that live ask"
    if missing := alive & before - requests.keys():
        return f"{', '.join(sorted(missing))} have yet to ask"
    waited_s = now - min(one.since for one in requests.values())
    max_wait_s = RESTART_WAIT_S if any(member.step for member in members) else START_WAIT_S
    # Where none of the last quorum is left all begin anew, each with what it finds: the most is that of one of them.
    if not alive & before and len(requests) < state.expected_replicas and waited_s < max_wait_s:
        return f"{state.expected_replicas - len(requests)} replicas that were started have yet to ask"
    return members


def next_quorum_id(previous: Quorum | None, members: tuple[Member, ...], first_id: int) -> int:
    """The number of a quorum of these members: another one wherever connections must be made anew."""
    if previous is None:
        return first_id
    changed = previous.replica_ids != frozenset(member.replica_id for member in members)
    failed = any(member.commit_failures > 0 for member in members)
    return previous.quorum_id + (changed or failed)
