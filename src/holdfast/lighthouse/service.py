"""The Lighthouse service: records heartbeats and quorum requests of TorchFT's managers, and answers them.

It is served over gRPC under the Lighthouse's names, so that managers need no change. It cannot authenticate callers, so
it listens on the job's own address only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from msgspec.structs import asdict

from holdfast.lighthouse import lighthouse_pb2 as pb
from holdfast.lighthouse.quorum import Member, PendingRequest, Quorum, QuorumState, compute_quorum, next_quorum_id

log = logging.getLogger("holdfast.lighthouse")

TICK_S = 0.05
"""Seconds between two checks whether waiting alone has made a quorum possible."""

SERVICE = "torchft.LighthouseService"
_NUMBERED = re.compile(r"(\d+)$")


class Lighthouse:
    """Heartbeats, requests and the latest quorum."""

    def __init__(self, *, min_replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_replicas = min_replicas
        self._clock = clock
        # Ids are never reused, not even by a restarted service: stores keep the keys written under one.
        self._first_quorum_id = int(time.time() * 1000)
        self._last_heartbeat: dict[str, float] = {}
        self._requests: dict[str, PendingRequest] = {}
        self._failed: set[str] = set()
        """Replica ids whose ranks have ended or are being stopped."""
        self._replica_by_store: dict[str, int] = {}
        """The replica of each attempt ever reported, by its store's address."""
        self._live_stores: Mapping[int, str] = {}
        """Each replica's current attempt, as its store's address; empty if it has none."""
        self._replica_by_id: dict[str, int] = {}
        self._previous: Quorum | None = None
        self._formed = asyncio.Event()
        """Set and replaced with every quorum."""

    def update_liveness(self, live_stores: Mapping[int, str]) -> None:
        """Update which replicas have ranks, and their stores; the previous attempt of a changed replica has ended."""
        ended = {replica for replica, store in self._live_stores.items() if live_stores.get(replica) != store}
        self._live_stores = live_stores
        self._replica_by_store.update((store, replica) for replica, store in live_stores.items() if store)
        for name in [name for name, replica in self._replica_by_id.items() if replica in ended]:
            log.info("%s is lost", name)
            self._mark_failed(name)
        self.try_form()

    def heartbeat(self, name: str) -> None:
        if name not in self._failed:
            self._last_heartbeat[name] = self._clock()

    async def quorum(self, member: Member) -> Quorum | None:
        """The next quorum that includes this member; None if the member's attempt is over."""
        name = member.replica_id
        replica = self._resolve_replica(member)
        over = member.store_address in self._replica_by_store and self._live_stores.get(replica) != member.store_address
        if name in self._failed or over:
            self._mark_failed(name)
            return None
        self._replica_by_id[name] = replica
        self.heartbeat(name)
        request = self._requests[name] = PendingRequest(member=member, since=self._clock())
        self.try_form()
        try:
            while name not in self._failed:
                if self._requests.get(name) is not request:
                    return self._previous if self._previous and name in self._previous.replica_ids else None
                await self._formed.wait()
            return None
        finally:
            if self._requests.get(name) is request:
                del self._requests[name]

    def try_form(self) -> None:
        """Form a quorum if one is possible now."""
        expected = sum(1 for store in self._live_stores.values() if store)
        state = QuorumState(
            min_replicas=self._min_replicas,
            last_heartbeat=self._last_heartbeat,
            requests=self._requests,
            expected_replicas=expected,
            previous=self._previous,
        )
        members = compute_quorum(state, self._clock())
        if isinstance(members, str):
            return
        quorum_id = next_quorum_id(self._previous, members, self._first_quorum_id)
        if self._previous is None or quorum_id != self._previous.quorum_id:
            log.info("quorum %s: %s", quorum_id, ", ".join(f"{one.replica_id} at step {one.step}" for one in members))
        self._previous = Quorum(quorum_id=quorum_id, members=members, created_at=time.time())
        for member in members:
            del self._requests[member.replica_id]
        self._notify()

    async def tick_loop(self) -> None:
        """Check regularly whether waiting alone has made a quorum possible."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._requests:
                self.try_form()

    def _resolve_replica(self, member: Member) -> int:
        """The member's replica: by its attempt's store, else by the number at the end of its id."""
        known = self._replica_by_store.get(member.store_address)
        numbered = _NUMBERED.search(member.replica_id.partition(":")[0])
        return known if known is not None else int(numbered[1]) if numbered else -1

    def _mark_failed(self, name: str) -> None:
        self._failed.add(name)
        for known in (self._last_heartbeat, self._requests, self._replica_by_id):
            known.pop(name, None)
        self._notify()

    def _notify(self) -> None:
        self._formed.set()
        self._formed = asyncio.Event()


def to_member(message: pb.Member) -> Member:
    """The member that a message describes; both have the same fields."""
    return Member(**{field.name: getattr(message, field.name) for field in pb.Member.DESCRIPTOR.fields})


def to_response(quorum: Quorum) -> pb.QuorumResponse:
    """The message that answers a request."""
    seconds, rest = divmod(quorum.created_at, 1)
    return pb.QuorumResponse(
        quorum=pb.Quorum(
            quorum_id=quorum.quorum_id,
            participants=[pb.Member(**asdict(member)) for member in quorum.members],
            created=pb.Timestamp(seconds=int(seconds), nanos=int(rest * 1e9)),
        )
    )


async def listen(lighthouse: Lighthouse, address: str) -> tuple[grpc.aio.Server, int]:
    """Serve on `HOST:PORT`, where port 0 is any free one; return the server and its port."""

    async def quorum(request: pb.QuorumRequest, context: Any) -> pb.QuorumResponse:
        if (formed := await lighthouse.quorum(to_member(request.requester))) is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the controller has ended this attempt")
            raise AssertionError("abort raises")
        return to_response(formed)

    async def heartbeat(request: pb.HeartbeatRequest, _: Any) -> bytes:
        lighthouse.heartbeat(request.replica_id)
        return b""

    handler: Any = grpc.unary_unary_rpc_method_handler
    methods = {
        "Quorum": handler(quorum, pb.QuorumRequest.FromString, pb.QuorumResponse.SerializeToString),
        "Heartbeat": handler(heartbeat, pb.HeartbeatRequest.FromString),
    }
    server: Any = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
