"""Owns TorchFT as the session uses it, and what has to be mended of it; merging.py and peerlinks.py know it too.

Its manager finds who takes part in a step (a quorum), asks all ranks of this replica whether the step may be
committed, and lets a replica that is behind take what the others have from their memory. Refuses to own what that is,
and when it is asked for (replicas.py). What differs from TorchFT 0.2.0, with the reason, stands at each place.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from torchft.manager import Manager

from holdfast.errors import ExitCode, failure
from holdfast.events.rank import Doing
from holdfast.findings import Fault, Finding, Severity
from holdfast.train.environment import Environment
from holdfast.train.managing import OneThread, OwnWord
from holdfast.train.peerlinks import WAIT, Gloo, Nccl, Transport, store_at
from holdfast.train.ranks import Ranks

State = dict[str, Any]
"""What a replica that is behind takes: anything that pickles, tensors in dicts."""

CONNECT = timedelta(seconds=60)
DONOR = timedelta(seconds=5)
"""Longest that a replica tries to reach its donor, which may have died since: all others wait for it meanwhile."""
FOR_OTHERS = timedelta(days=7)
"""Longest that a replica waits until enough of them are there: as long as a run may take."""
QUORUM_RETRIES = 6_000_000
"""Of a quorum service that does not answer, such as one that is being restarted: TorchFT spreads them over that."""
ASIDE_S = 0.25
"""Seconds of waiting for other replicas after which the agent is told: the wait is none of a step's."""
SAY_S = 10.0
"""The same, after which people are told."""
LOOK_S = 0.1
"""Between two looks at the time while other replicas are waited for."""
KNOWN_S = 0.2
"""Seconds after which the quorum service knows of a loss as well; no replica that is lost is back so soon."""
TAKE_S = 5.0
"""Seconds that a state may still take to come when one of the quorum is lost: its donor may never get to give it."""


class _Told(Exception):
    """This process was told to end, and the others do not come."""


class News(Protocol):
    """Where a rank hears of other replicas, and says what it noticed (liaison.py)."""

    def fileno(self) -> int | None:
        """Readable when there may be something to hear; None where nobody tells anything."""
        ...

    def lost(self) -> frozenset[int]:
        """Replicas that were said to be lost since the last call."""
        ...

    def turn(self, to: Doing) -> None:
        """Say what follows."""
        ...

    def found(self, finding: Finding) -> None: ...

    def patience_s(self) -> float:
        """Seconds for which others may still be waited for, where this process is to leave; else without end."""
        ...


class Peers:
    """The replicas that train together, and the step that they have in hand."""

    def __init__(
        self,
        told: Environment,
        ranks: Ranks,
        news: News,
        *,
        nccl: bool,
        give: Callable[[], State],
        take: Callable[[State], None],
    ) -> None:
        """Called by all ranks of a replica; `give` and `take` are called for those of other replicas and for this."""
        self._ranks = ranks
        self._news = news
        host = told.address or socket.gethostname()
        here = _address_towards(host)
        # A store of its own: a replica of one rank may have none, and torchrun's may be shared by all replicas.
        self._store = store_at(here) if ranks.rank == 0 else None
        port = ranks.from_first(self._store.port if self._store else 0)
        self._group = Nccl(timeout=WAIT) if nccl else Gloo(timeout=WAIT)
        self._transport = Transport(here)
        try:
            self._manager: Any = _Manager(
                pg=self._group,
                load_state_dict=self._bring,
                state_dict=give,
                min_replica_size=told.min_replicas,
                use_async_quorum=False,  # it would read the state of a donor that computes on, and FSDP2 dies of that
                timeout=WAIT,
                quorum_timeout=FOR_OTHERS,
                connect_timeout=CONNECT,
                rank=ranks.rank,
                world_size=ranks.world_size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=told.lighthouse,
                replica_id=str(told.replica),
                hostname=host,
                checkpoint_transport=self._transport,
                quorum_retries=QUORUM_RETRIES,
            )
        except RuntimeError as error:
            raise failure(
                "quorum-service-unreachable",
                f"the quorum service at {told.lighthouse} does not answer",
                exit_code=ExitCode.STORAGE,
                where="TORCHFT_LIGHTHOUSE",
                evidence=(str(error),),
                remedy="see whether it runs, and whether this node reaches it",
                fault=Fault.CLUSTER,
            ) from error
        if ranks.world_size == 1:
            self._manager._client = OwnWord(self._manager._client)
        self._manager._executor = OneThread()
        self._manager._connect_timeout = DONOR  # from here on it is for donors alone
        self._manager.peers = self
        self._waiting = _waiting(told)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Rings when something that was sent has arrived, or cannot."""
        self._travelling: list[torch.futures.Future[Any]] = []
        self._take = take
        self._brought: State | None = None
        """What another replica gave this rank in the meeting in hand."""
        self._quorum = -1
        self._all = told.replica_count
        self._agreed = False
        """Whether the last step was committed."""
        self._lost: dict[int, float] = {}
        """When each replica was last said to be lost, in monotonic seconds."""

    @property
    def count(self) -> int:
        """Replicas that take part in the step in hand."""
        return self._manager.num_participants()

    @property
    def place(self) -> int:
        """Of this replica among them, from 0."""
        return self._manager.participating_rank()

    def stand(self, standing: int) -> bool:
        """Whether the replicas of the last step are all there for the next: then the quorum service is not asked.

        Where all of them train nobody can join, and a word among themselves takes a fraction of the time. It fails
        where one is lost, or could not commit the last step and has left the group. All ranks call it.
        """
        if not self._agreed or self.count < self._all or not isinstance(self._group, Gloo):
            return False
        place = torch.tensor([standing])
        self.send(place)
        with suppress(_Told):  # the others are still met where they come in time
            self.await_others(self._settled, self._heed)
        together = self._settled() and self._sound and place.item() == standing * self._all
        self._travelling = []
        if self._ranks.all(together):
            return True
        if self._sound:
            self._fail(ConnectionError("not all replicas are there"))
        return self.agree()

    def gather(self, standing: int) -> bool:
        """Find who takes part in the step that follows; who stands behind others takes what they have.

        Where all stand at 0, they take what one of them has. Waits until enough replicas are there: False where this
        process is told to end first, after which nothing more can be asked of the others. All ranks call it.
        """
        try:
            self._gather(standing)
        except _Told:
            return False
        return True

    def listen(self) -> None:
        """Hear who is lost while the replicas of a step connect and catch up, and do not wait for what cannot come."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        now = time.monotonic()
        self._lost.update(dict.fromkeys(self._news.lost(), now))
        known = self._group.began - KNOWN_S
        lost = {each: at for each in self._group.members if (at := self._lost.get(each, 0.0)) > known}
        if lost:
            error = ConnectionError(f"lost: replica {', '.join(map(str, sorted(lost)))}")
            self._group.connecting.give_up(error)
            if now - min(lost.values()) > TAKE_S:
                self._transport.taking.give_up(error)

    def _gather(self, standing: int) -> None:
        said = ""
        while not self._meet(standing):
            why = str(self._manager.errored() or "another rank of this replica could not")
            if why != said:
                self._news.found(_met_in_vain(why))
                said = why
            self._group.leave()
            self._manager.should_commit()

    def _meet(self, standing: int) -> bool:
        self._news.lost()  # what is heard before belongs to a quorum that is no more
        self._manager.load_state_dict({"step": standing, "batches_committed": 0})
        self._brought = None
        self._manager.start_quorum()
        met, self._quorum = self._quorum, self._manager._quorum_id
        # Only where something has changed could one rank have failed to connect, or to be brought its state, alone.
        if met != self._quorum and not self._ranks.all(self._sound):
            return False
        if self._brought is not None:
            self._take(self._brought)
        return True

    def _bring(self, state: State) -> None:
        self._brought = state

    def agree(self) -> bool:
        """Whether the step in hand may be committed: the same on all ranks of this replica, which all ask, once."""
        self._agreed = self._manager.should_commit()
        if not self._agreed:
            self._group.leave()  # so that those who committed learn of it
        return self._agreed

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to replace a tensor by its sum over the replicas; nothing happens once the step has failed."""
        if not self._sound:
            return
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        try:
            work: Any = self._group.allreduce([tensor], options)
        except RuntimeError as error:
            self._fail(error)
            return
        arriving = work.get_future()
        arriving.add_done_callback(self.ring)
        self._travelling.append(arriving)

    def arrived(self) -> bool:
        """Wait for all that was sent; False where the step has failed: then this replica takes no part in it.

        TorchFT's hook waits for each bucket, and fails an assertion when a peer is gone. This one waits once, for
        the peers or for the word that one of them is lost, whichever comes first.
        """
        while not self._settled():
            self._listen()
        self._travelling = []
        return self._sound

    def _settled(self) -> bool:
        """Whether all that was sent has arrived, or the step has failed."""
        try:
            for each in self._travelling:
                if each.done():
                    each.wait()  # raises what went wrong; of NCCL's, the stream waits and not this thread
        except RuntimeError as error:
            self._fail(error)
        return not self._sound or all(each.done() for each in self._travelling)

    def await_others(self, over: Callable[[], bool], hear: Callable[[], None]) -> None:
        """Wait for other replicas, and say so: it is none of a step's time. Raises _Told where this one is to leave."""
        began = time.monotonic()
        aside_at, say_at, leave_at = began + ASIDE_S, began + ASIDE_S + SAY_S, math.inf
        while not over():
            self._ears().poll(LOOK_S * 1000)  # in this frame: stacks tell by its name what is waited for
            now = time.monotonic()
            hear()
            if now >= aside_at:
                aside_at = math.inf
                self._news.turn(Doing.ASIDE)
            if now >= say_at:
                say_at = math.inf
                self._news.found(self._waiting)
            leave_at = min(leave_at, now + self._news.patience_s())
            if now >= leave_at:
                raise _Told
        if aside_at == math.inf:
            self._news.turn(Doing.STEPS)

    @property
    def manager(self) -> Any:
        """TorchFT's, for what else of it is used (merging.py)."""
        return self._manager

    def _listen(self) -> None:
        """Wait until something has arrived or a replica of this step is said to be lost."""
        self._ears().poll()
        self._heed()

    def _heed(self) -> None:
        """Take in what is said of the replicas of this step."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if lost := self._news.lost() & self._group.members:
            self._fail(ConnectionError(f"lost: replica {', '.join(map(str, sorted(lost)))}"))

    def _ears(self) -> select.poll:
        """Readable when something was rung for, or the agent may have said something."""
        ears = select.poll()
        for source in (self._bell, self._news.fileno()):
            if source is not None:
                ears.register(source, select.POLLIN)
        return ears

    def ring(self, _: object) -> None:
        """Have whoever waits look."""
        os.eventfd_write(self._bell, 1)

    @property
    def _sound(self) -> bool:
        return self._manager.errored() is None

    def _fail(self, error: Exception) -> None:
        self._manager.report_error(error)
        self._group.leave()


class _Manager(Manager):
    """A manager that says when it has to wait for other replicas."""

    peers: Peers

    def wait_quorum(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        """Wait for others, also for the word that one of them is lost, or that this process is to end."""
        quorum = cast("Future[None]", self._quorum_future)
        if not quorum.done():
            quorum.add_done_callback(self.peers.ring)
        self.peers.await_others(quorum.done, self.peers.listen)
        super().wait_quorum()

    def allreduce(  # pyright: ignore[reportIncompatibleVariableOverride] - theirs is decorated
        self, tensor: torch.Tensor, *_: Any, **__: Any
    ) -> _Mean:
        """For LocalSGD and DiLoCo: theirs would not hear that a replica is lost."""
        self.peers.send(tensor)
        return _Mean(self.peers, tensor)


class _Mean:
    """A tensor that is on its way to become the mean over the replicas."""

    def __init__(self, peers: Peers, tensor: torch.Tensor) -> None:
        self._peers = peers
        self._tensor = tensor

    def wait(self, *_: Any) -> bool:
        if self._peers.arrived():
            self._tensor.div_(self._peers.count)
        return True


def _address_towards(host: str) -> str:
    """This machine's address in the network where a host is; nothing is sent."""
    family, _, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def _met_in_vain(why: str) -> Finding:
    return Finding(
        code="replicas-not-joined",
        severity=Severity.WARNING,
        what="this replica could not join the others, or not take their state, and tries again",
        evidence=(why,),
        remedy="Nothing, if one was lost just now. Else see whether each node reaches the others at any port.",
        fault=Fault.CLUSTER,
    )


def _waiting(told: Environment) -> Finding:
    return Finding(
        code="waiting-for-replicas",
        severity=Severity.WARNING,
        what="fewer replicas are there than training goes on with, or one of them is slow to come",
        where="recovery.min_replicas",
        evidence=(f"it needs {told.min_replicas} of {told.replica_count}",),
        remedy="Nothing: it goes on by itself once enough of them are there.",
        fault=Fault.CLUSTER,
    )
