"""Owns the service that TorchFT's managers ask: it keeps who asks and who lives, and answers when it is decided.

Over gRPC, with the Lighthouse's names, so that managers need not know the difference. Nothing here can tell who calls:
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

from holdfast.quorum.codec import read_heartbeat, read_request, write_response
from holdfast.quorum.decision import Asking, Member, Quorum, Room, decide, number

log = logging.getLogger("holdfast.quorum")

TICK_S = 0.05
"""How often it is looked whether waiting alone has made a quorum possible."""

_PREFIX = "/torchft.LighthouseService/"
_NUMBERED = re.compile(r"(\d+)$")


class Lighthouse:
    """Who asks, who lives, and the answer."""

    def __init__(self, *, min_replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_replicas = min_replicas
        self._clock = clock
        # No number is ever used twice, not even by a successor: stores keep what was written under one.
        self._first = int(time.time() * 1000)
        self._heard: dict[str, float] = {}
        self._asking: dict[str, Asking] = {}
        self._lost: set[str] = set()
        """Names whose ranks have ended, or are being ended."""
        self._stores: dict[str, int] = {}
        """The replica of each attempt that was ever told of, by its store's address."""
        self._alive: Mapping[int, str] = {}
        """Each replica's attempt in hand, as its store's address; empty where it has none."""
        self._replica_of: dict[str, int] = {}
        self._previous: Quorum | None = None
        self._formed = asyncio.Event()
        """Set, and made anew, with every quorum."""

    def told(self, alive: Mapping[int, str]) -> None:
        """Take in which replicas have ranks, and where their stores are; whoever was there before has ended."""
        ended = {replica for replica, store in self._alive.items() if alive.get(replica) != store}
        self._alive = alive
        self._stores.update((store, replica) for replica, store in alive.items() if store)
        for name in [name for name, replica in self._replica_of.items() if replica in ended]:
            log.info("%s is lost", name)
            self._lose(name)
        self.consider()

    def heartbeat(self, name: str) -> None:
        if name not in self._lost:
            self._heard[name] = self._clock()

    async def quorum(self, member: Member) -> Quorum | None:
        """The next quorum that this member is in; None for one whose attempt is over."""
        name = member.replica_id
        replica = self._place(member)
        over = member.store_address in self._stores and self._alive.get(replica) != member.store_address
        if name in self._lost or over:
            self._lose(name)
            return None
        self._replica_of[name] = replica
        self.heartbeat(name)
        asked = self._asking[name] = Asking(member=member, since=self._clock())
        self.consider()
        try:
            while name not in self._lost:
                if self._asking.get(name) is not asked:
                    return self._previous if self._previous and name in self._previous.names else None
                await self._formed.wait()
            return None
        finally:
            if self._asking.get(name) is asked:
                del self._asking[name]

    def consider(self) -> None:
        """Form a quorum if one is possible now."""
        expected = sum(1 for store in self._alive.values() if store)
        room = Room(
            min_replicas=self._min_replicas,
            heard=self._heard,
            asking=self._asking,
            expected=expected,
            previous=self._previous,
        )
        members = decide(room, self._clock())
        if isinstance(members, str):
            return
        fresh = number(self._previous, members, self._first)
        if self._previous is None or fresh != self._previous.quorum_id:
            log.info("quorum %s: %s", fresh, ", ".join(f"{one.replica_id} at step {one.step}" for one in members))
        self._previous = Quorum(quorum_id=fresh, members=members, created_at=time.time())
        for member in members:
            del self._asking[member.replica_id]
        self._wake()

    async def watch(self) -> None:
        """Look now and then whether waiting alone has made a quorum possible."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._asking:
                self.consider()

    def _place(self, member: Member) -> int:
        """The replica that a member is: by its attempt's store, else by the number at the end of its name."""
        known = self._stores.get(member.store_address)
        numbered = _NUMBERED.search(member.replica_id.partition(":")[0])
        return known if known is not None else int(numbered[1]) if numbered else -1

    def _lose(self, name: str) -> None:
        self._lost.add(name)
        for known in (self._heard, self._asking, self._replica_of):
            known.pop(name, None)
        self._wake()

    def _wake(self) -> None:
        self._formed.set()
        self._formed = asyncio.Event()


class Handler(grpc.GenericRpcHandler):
    """The Lighthouse's two methods."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse
        method: Any = grpc.unary_unary_rpc_method_handler
        self._methods: dict[str, Any] = {
            f"{_PREFIX}Quorum": method(self._quorum, request_deserializer=read_request),
            f"{_PREFIX}Heartbeat": method(self._heartbeat, request_deserializer=read_heartbeat),
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method)

    async def _quorum(self, member: Member, context: Any) -> bytes:
        if (quorum := await self._lighthouse.quorum(member)) is not None:
            return write_response(quorum)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the controller has ended this attempt")
        raise AssertionError("an aborted call goes no further")

    async def _heartbeat(self, name: str, context: Any) -> bytes:
        self._lighthouse.heartbeat(name)
        return b""


async def listen(lighthouse: Lighthouse, address: str) -> tuple[grpc.aio.Server, int]:
    """Serve on `HOST:PORT`, where port 0 is any free one; the server, and its port."""
    server: Any = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((Handler(lighthouse),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, port
