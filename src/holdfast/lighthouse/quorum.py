"""Decides which replicas take the next step together; pure, with the time as an argument.

The rules are those that TorchFT's managers expect of a Lighthouse. A quorum forms when all members of the previous one
request it, or all replicas known to be alive; a joiner enters with the next quorum. The quorum id rises when the
members change or one could not commit. holdfast adds certainty: the controller knows whose ranks have ended, so the
quorum does not wait for their heartbeats to time out. At the start and after a restart it also knows which replicas are
still to come.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

HEARTBEAT_TIMEOUT_S = 5.0
"""Seconds without a heartbeat after which the quorum does not wait for a member, even if no loss is reported."""

START_WAIT_S = 60.0
"""Longest that the first requesters wait for replicas that have started but not requested yet, in seconds.

It also applies to replicas that return after all were lost.
"""

RESTART_WAIT_S = 0.5
"""The same for a new service during training: running replicas request within milliseconds."""


class Member(Struct, frozen=True, kw_only=True):
    """A replica as its manager describes it; the fields are the protocol's."""

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 0
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0


class Quorum(Struct, frozen=True, kw_only=True):
    """The replicas that take a step together, sorted by id."""

    quorum_id: int
    members: tuple[Member, ...]
    created_at: float
    """Unix seconds."""

    @property
    def replica_ids(self) -> frozenset[str]:
        return frozenset(member.replica_id for member in self.members)


class PendingRequest(Struct, frozen=True, kw_only=True):
    """A member's request for a quorum, and its time (seconds)."""

    member: Member
    since: float


class QuorumState(Struct, frozen=True, kw_only=True):
    """Input to the decision; times are on one clock, in seconds."""

    min_replicas: int
    last_heartbeat: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time of each replica's last heartbeat, without replicas that are known to be lost."""
    requests: Mapping[str, PendingRequest] = field(default_factory=dict[str, PendingRequest])
    expected_replicas: int = 0
    """Number of replicas with ranks, according to the controller."""
    previous: Quorum | None = None


def compute_quorum(state: QuorumState, now: float) -> tuple[Member, ...] | str:
    """The members of the next quorum, or the reason to wait."""
    alive = {name for name, at in state.last_heartbeat.items() if now - at < HEARTBEAT_TIMEOUT_S}
    requests = {name: one for name, one in sorted(state.requests.items()) if name in alive}
    members = tuple(one.member for one in requests.values())
    if not members:
        return "no replica asks"
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
    # If no member of the last quorum is left, each replica starts from its own checkpoint. Wait for all of them:
    # one has the highest step.
    if not alive & before and len(requests) < state.expected_replicas and waited_s < max_wait_s:
        return f"{state.expected_replicas - len(requests)} replicas that were started have yet to ask"
    return members


def next_quorum_id(previous: Quorum | None, members: tuple[Member, ...], first_id: int) -> int:
    """The id of a quorum of these members: a new one whenever connections must be rebuilt."""
    if previous is None:
        return first_id
    changed = previous.replica_ids != frozenset(member.replica_id for member in members)
    failed = any(member.commit_failures > 0 for member in members)
    return previous.quorum_id + (changed or failed)
