"""Owns a rank's word with those who watch it: each step is reported, and what anybody wishes all ranks do alike.

The same for every loop: that of a `Session`, and those that a framework owns. Refuses to own what a checkpoint is and
how it is taken (session.py, or the framework), the agreement between ranks (ranks.py) and the wire (channel.py).
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, SupportsFloat

from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events.metrics import DroppedMetrics, within_limit
from holdfast.events.rank import (
    Befall,
    Checkpointed,
    CheckpointNow,
    Doing,
    HandOver,
    Hello,
    Leaving,
    ReplicaBack,
    ReplicaLost,
    SplitNow,
    Step,
    StopNow,
    Turned,
)
from holdfast.findings import Finding, Severity, of_replica
from holdfast.measure.catalog import DERIVED, Across, across
from holdfast.train import shutdown
from holdfast.train.cadence import Auto
from holdfast.train.channel import Channel, say
from holdfast.train.environment import Environment
from holdfast.train.finite import WITHHELD, Finite, withheld
from holdfast.train.journal import Journal
from holdfast.train.meter import Meter, numbers
from holdfast.train.misfortune import befall
from holdfast.train.profiler import Profiler
from holdfast.train.ranks import NOTHING, Agreement, Ranks, Wish

DRAIN_S = 0.05
"""Seconds a process waits when it exits, with Python's lock let go. A Gloo thread that is about to drop the tensors of
the last collective needs that lock; one that is still waiting for it when the interpreter ends aborts the process
(pytorch pull request 179291), and a run that had finished would have failed."""

STOP_S, HAND_OVER_S = 1.0, 30.0
"""Seconds that a rank which is to leave goes on waiting for other replicas: they may only be slow to come, and it would
leave after a step that it takes with them. Where it leaves for other code they start again meanwhile."""

Handler = Callable[[int, FrameType | None], object] | int | None


class Liaison:
    """Tells the agent of steps and checkpoints, and the loop what it is to do at the end of a step."""

    def __init__(self, told: Environment, meter: Meter | None = None) -> None:
        """Made by every rank, after init_process_group; without a meter nothing is known of the model."""
        self._channel = Channel.open(told.rank_socket, rank=told.rank)
        self._agent = told.rank_socket, told.rank
        self._clock = Clock()
        self._channel.send(Hello(rank=told.rank, pid=os.getpid(), clock=self._clock.anchor))
        self.ranks = Ranks.join(announced=told.world_size)
        self._agreement = Agreement(self.ranks)
        self.meter = meter or Meter()
        self._profiler = Profiler()
        self._split_after = told.split_after_step
        self._finite = Finite(self.ranks.rank, told.replica)
        self._dropped = DroppedMetrics(f"rank {self.ranks.rank}{of_replica(told.replica)}")
        self._withheld = 0
        """Checkpoints in a row, up to now."""
        self._awaited = False
        """Whether somebody has asked for a checkpoint, and waits for word of it."""
        self._journal = Journal(told) if self.ranks.rank == 0 else None
        self._auto = Auto(nodes=told.nodes, failures=told.attempt) if told.checkpoint_auto else None
        self._every_steps = told.checkpoint_every_steps
        self._every_s = self._auto.every_s if self._auto else told.checkpoint_every_s
        self.copy_every: int | Literal["auto"] = 0
        """Steps between copies of the state to other nodes' memory, which whoever asks for wishes makes; 0: never."""
        self.copy_due: Callable[[], bool] = lambda: False
        """Whether one may begin, where nobody counts steps."""
        self.hands_over = False
        """Whether whoever asks for wishes can leave the state to the next processes; a stop serves where it cannot."""
        self._asked = NOTHING
        self._lost: set[int] = set()
        self._doing = Doing.STEPS
        self._terminated = False
        self._together = False
        """Whether this rank was asked to stop with all others, so that SIGTERM says nothing more."""
        self._steps_with_others = told.replica_count > 1 and told.sync is None
        self.parts = False
        """Whether all replicas were asked to stop, and agree on the step after which they do."""
        self._previous_sigterm: Handler = None
        self._listening = False
        """Whether SIGTERM is ours."""
        self._saved_at = time.monotonic()
        self._boundary = self._clock()
        self._waited_s = 0.0

    def begin(self) -> None:
        """What came before was getting ready; from here on time is the steps', and SIGTERM waits for their end."""
        self.listen()
        atexit.register(time.sleep, DRAIN_S)
        shutdown.watch(*self._agent)
        atexit.register(_finish, weakref.ref(self._channel))  # a session that is gone has closed it
        self._saved_at = time.monotonic()
        self._boundary = self._clock()

    def listen(self) -> None:
        """Have SIGTERM wait for the end of a step, until `rest`."""
        if not self._listening:
            self._listening = True
            self._previous_sigterm = _on_sigterm(self._note_sigterm)

    def rest(self) -> None:
        """No step follows: SIGTERM means again what it did."""
        self.turn(Doing.REST)
        if self._listening:
            self._listening = False
            _on_sigterm(self._previous_sigterm)

    def report(self, step: int, *, total: int | None, metrics: Mapping[str, SupportsFloat | None]) -> None:
        """Say that a step is finished; a metric that is None is left out, and a tensor on a GPU is waited for.

        A metric that no event can hold is dropped with a finding; the step and its other metrics are reported.
        """
        given, dropped = numbers({"total_steps": total, **metrics})
        started, self._boundary = self._boundary, self._clock()
        stalled_s, self._waited_s = self._waited_s, 0.0
        known = {name: value for name, value in given.items() if math.isfinite(value)}
        devices = self.ranks.world_size * max(1, int(known.get("replicas", 1)))  # tokens are those of all replicas
        measured = self.meter.measure(known, step_s=self._boundary - started, devices=devices)
        spent = self._profiler.step(last=step == total)
        self._tell(self._profiler.noted())
        finite = {**measured, **spent, **given}
        if not all(map(math.isfinite, finite.values())):
            finite = {name: value for name, value in finite.items() if math.isfinite(value)}
        # JSON has no NaN or infinity; a metric that is one is left out, and so is one too many.
        told, crowded = within_limit({name: value for name, value in finite.items() if name not in DERIVED})
        self._doing = Doing.STEPS
        self._channel.send(Step(step=step, started=started, ended=self._boundary, checkpoint_s=stalled_s, metrics=told))
        if self._journal is not None:
            self._journal.take(step, finite | {"checkpoint_stall_s": stalled_s})
            self._tell(self._journal.noted())
        if (dropped or crowded) and not self._dropped.full:
            self._tell(self._dropped.report(step, self._own(dropped | crowded)))
        for finding in self._finite.look(step, given):
            ends = finding.severity is Severity.ERROR
            self._channel.found(finding, ends=ends)
            if ends:
                raise HoldfastError((finding,), ExitCode.IMPOSSIBLE)

    def turn(self, to: Doing) -> None:
        """Say what follows, before it does: a checkpoint has another deadline than a step. Nothing follows the rest."""
        if to is not self._doing and self._doing is not Doing.REST:
            self._doing = to
            self._channel.send(Turned(to=to))

    def wish(self, step: int, *, total: int | None, parting: bool = False) -> Wish:
        """What all ranks are to do after this step; every rank asks, once. After the last of all it is STOP.

        So it is where all replicas are `parting` after this step.
        """
        scheduled = self._scheduled(step, total) | (Wish.STOP if parting else NOTHING)
        agreed = self._agreement.exchange(self._own_wish(), scheduled=scheduled)
        if not agreed:
            return agreed
        self.parts = self.parts or Wish.PART in agreed
        if agreed & (Wish.STOP | Wish.HAND_OVER | Wish.CHECKPOINT):
            self.turn(Doing.ASIDE)
        for last in (Wish.STOP, Wish.HAND_OVER):
            if last in agreed:
                return last
        if Wish.SPLIT in agreed:
            self._profiler.begin()
        return agreed & (Wish.CHECKPOINT | Wish.COPY)

    @property
    def node_s(self) -> float:
        """Seconds of training so far, of all nodes together; 0 where nobody asks for them."""
        return self._auto.node_s if self._auto else 0.0

    def resume(self, node_s: float) -> None:
        """The run has trained so long before this attempt."""
        if self._auto is not None:
            self._auto.resume(node_s)

    def resumed(self, step: int, where: str) -> None:
        """Say where training goes on, once for all ranks."""
        if self.ranks.rank == 0:
            say(f"resumed after step {step} from {where}")

    def found(self, finding: Finding, *, ends: bool = False) -> None:
        """Say what was noticed, or what `ends` the program, once for all ranks, of which every one calls this."""
        if self.ranks.rank == 0:
            self._channel.found(finding, ends=ends)

    def saving(self) -> None:
        """A checkpoint is begun: the seconds until the next count from here."""
        self._saved_at = time.monotonic()

    def waited(self, seconds: float) -> None:
        """The loop stood still for a checkpoint; it is reported with the step in hand."""
        self._waited_s += seconds
        if self._auto is not None:
            self._auto.waited(seconds)

    def committed(self, step: int, path: Path | str, *, took_s: float) -> None:
        """A checkpoint is complete, so long after it was begun."""
        if self.ranks.rank == 0:
            self._channel.send(Checkpointed(step=step, path=str(path), took_s=took_s))
        if self._auto is not None and (chosen := self._auto.saved(took_s=took_s)):
            self.found(chosen)
        if self._auto is not None:
            self._every_s = self._auto.every_s

    def sound(self) -> bool:
        """Whether what all ranks have is worth a checkpoint: their losses are numbers; every rank asks."""
        sound = self.ranks.all(self._finite.sound)
        awaited, self._awaited = self._awaited, False
        if sound:
            self._tell_of_withheld()
            return True
        self.saving()
        self._withheld += 1
        if self._withheld == 1 or awaited:
            self.found(WITHHELD)
        return False

    def _tell_of_withheld(self) -> None:
        """A row of checkpoints that were not taken is over, or training is."""
        count, self._withheld = self._withheld, 0
        if count > 1:
            self.found(withheld(count))

    def fileno(self) -> int | None:
        """Readable where the agent may have said something; None without one."""
        return self._channel.fileno()

    def lost(self) -> frozenset[int]:
        """Other replicas that were said to be lost since the last call."""
        self._hear()
        lost, self._lost = frozenset(self._lost), set()
        return lost

    def patience_s(self) -> float:
        """Seconds for which other replicas may still be waited for, since no step comes to an end without them."""
        self._hear()
        if self._terminated or self._asked & (Wish.STOP | Wish.PART):
            return STOP_S
        return HAND_OVER_S if Wish.HAND_OVER in self._asked else math.inf

    def end(self) -> None:
        """All that was to be done is done."""
        self.rest()
        self._tell_of_withheld()
        self._profiler.end()
        if self._journal is not None:
            self._journal.close()
            self._tell(self._journal.noted())

    def leave(self, step: int) -> NoReturn:
        """End the process after this step, since somebody asked for it: SystemExit(75), for steps are left to do."""
        self.end()
        self._channel.send(Leaving())
        if self.ranks.rank == 0:
            say(f"stopped after step {step}, as asked")
        raise SystemExit(ExitCode.STOPPED_EARLY)

    def _tell(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._channel.found(finding)

    def _own(self, dropped: Mapping[str, str]) -> dict[str, str]:
        """Those of dropped metrics that this rank is to report: rank 0 all of them, others those that they count in."""
        mine = self.ranks.rank == 0
        return {name: why for name, why in dropped.items() if mine or across(name) is not Across.FIRST}

    def _scheduled(self, step: int, total: int | None) -> Wish:
        """What every rank knows by counting; the last step of all is a stop: nobody is left to agree afterwards."""
        if step == total:
            return Wish.STOP
        wish = Wish.SPLIT if step == self._split_after else NOTHING
        if self._every_steps is not None and step % self._every_steps == 0:
            wish |= Wish.CHECKPOINT
        if self.copy_every != "auto" and self.copy_every and step % self.copy_every == 0:
            wish |= Wish.COPY
        return wish

    def _hear(self) -> None:
        """Take note of what the agent has said since the last time."""
        for request in self._channel.requests():
            match request:
                case CheckpointNow():
                    self._asked |= Wish.CHECKPOINT
                    self._awaited = True
                case SplitNow():
                    self._asked |= Wish.SPLIT
                case StopNow(together=together):
                    self._together = self._together or (together and self._steps_with_others)
                    self._asked |= Wish.PART if self._together else Wish.STOP
                case HandOver():
                    self._asked |= Wish.HAND_OVER if self.hands_over else Wish.STOP
                case ReplicaLost():
                    self._lost.add(request.replica)
                case Befall():
                    befall(request.what)
                case ReplicaBack():
                    pass

    def _own_wish(self) -> Wish:
        """What this rank was asked for; the seconds are counted by rank 0 alone."""
        terminated = self._terminated  # read first: who is to part with all others hears of it before the signal
        self._hear()
        wish, self._asked = self._asked, NOTHING
        if terminated and not self._together:
            wish |= Wish.STOP
        if wish and self._profiler.running:  # another rank was asked before
            wish &= ~Wish.SPLIT
        if self.copy_every == "auto" and self.ranks.rank == 0 and self.copy_due():
            wish |= Wish.COPY
        overdue = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        return wish | Wish.CHECKPOINT if overdue and self.ranks.rank == 0 else wish

    def _note_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._terminated = True


def _finish(channel: weakref.ref[Channel]) -> None:
    if (open_still := channel()) is not None:
        open_still.finish()


def _on_sigterm(handler: Handler) -> Handler:
    """Install a handler and return the one before; nothing changes outside the main thread, which alone may do so."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
