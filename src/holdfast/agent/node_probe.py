"""Runs this node's processes of a probe when the controller asks for them, and reports their end.

The processes have the places, the fabric and the devices that the ranks will have. Rank 0 coordinates them, and prints
the stages as they begin, then the result of all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.clock import Clock
from holdfast.events import NodeProbed, ProbeAdvanced
from holdfast.events.probe_results import ProbeProgress, ProbeResult, keep_slowest
from holdfast.host.files import private_opener
from holdfast.host.process_limits import become_rank
from holdfast.preflight.node_view import NodeView
from holdfast.preflight.rdma_devices import line_rate_gb_s
from holdfast.protocol.orders import ProbeNode, StopProbe

log = logging.getLogger("holdfast.agent")

MODULE = "holdfast.train.probe"
POLL_S = 0.1
"""Seconds between two looks at the processes."""
IMPORT_S = 10.0
"""Seconds beyond the probe's own deadline after which its processes are killed: they first import torch."""
CPU_SHARE_OF_MEDIAN = 0.2
"""CPUs share their memory and their time with other processes: a pair is slow only below this share of the others."""
SHARE_OF_LINE_RATE = 0.2
"""Of the ports' rate, below which a pair is slow whatever the others are: sockets are, while a fabric that is
oversubscribed by three is not."""
LINE_RATE_NODES = 4
MAX_LOG_BYTES = 4 << 20
_MISSING = ("No module named", "No such file or directory", "not found")

_decoder = msgspec.json.Decoder(ProbeProgress | ProbeResult)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A process of the probe."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path


class NodeProbe:
    """The probe of this node that runs, or the last one."""

    def __init__(
        self,
        *,
        node: int,
        generation: int,
        folder: Path,
        rendezvous_port: ReservedPort,
        clock: Clock,
        send: Callable[[NodeProbed | ProbeAdvanced], object],
    ) -> None:
        self._node, self._generation, self._folder = node, generation, folder
        self._rendezvous_port = rendezvous_port
        self._clock = clock
        self._send = send
        self._number = 0
        self._task: asyncio.Task[NodeProbed] | None = None
        self._stopped = asyncio.Event()

    def request(self, order: ProbeNode) -> None:
        """Start the probe, unless it has started; send its report, now or when it has ended."""
        if order.number > self._number and (self._task is None or self._task.done()):
            self._number = order.number
            self._stopped.clear()
            self._task = asyncio.ensure_future(self._probe(order))
            self._task.add_done_callback(self._report)
        elif order.number == self._number and self._task is not None and self._task.done():
            self._report(self._task)

    def stop(self, order: StopProbe) -> None:
        """End the probe of this number."""
        if order.number == self._number:
            self._stopped.set()

    def _report(self, task: asyncio.Task[NodeProbed]) -> None:
        if not task.cancelled():
            self._send(task.result())

    async def _probe(self, order: ProbeNode) -> NodeProbed:
        result, not_looked_at, problem = None, "", ""
        ranks: list[_Rank] = []
        try:
            for place in range(len(order.start.ranks)):
                ranks.append(self._start(order, place))
            problem = await self._watch(order, ranks)
        except OSError as error:
            not_looked_at = f"{order.python or sys.executable}: {error.strerror or error}"
        finally:
            await _kill(ranks)
        lines = [_lines(each.log) for each in ranks]
        if ranks and ranks[0].rank == 0:
            result = next((keep_slowest(line) for line in lines[0] if isinstance(line, ProbeResult)), None)
        if not not_looked_at and not any(lines):
            text = next(filter(None, (_last_line(each.log) for each in ranks)), "its processes printed nothing")
            if any(word in text for word in _MISSING):
                not_looked_at = text
            else:
                problem = problem or text
        if not self._stopped.is_set() and result is None and not problem and not not_looked_at:
            own = (line for found in lines for line in found if isinstance(line, ProbeResult))
            problem = next((line.problem for line in own if line.problem), "")
        self._rendezvous_port.renew()
        return NodeProbed(
            at=self._clock(),
            node=self._node,
            generation=self._generation,
            replica=order.replica,
            number=order.number,
            port=self._rendezvous_port.number,
            nodes=order.nodes,
            result=result,
            not_looked_at=not_looked_at,
            problem=problem,
        )

    def _start(self, order: ProbeNode, place: int) -> _Rank:
        launch = order.start.launches[place]
        path = self._folder / f"probe-{launch.rank}.log"
        argv = (order.python or sys.executable, "-m", MODULE, *options(order, NodeView(wanted=order.wanted)))
        with open(path, "wb", opener=private_opener) as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=launch.env_defaults | os.environ | launch.env | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
                cwd=launch.cwd if os.path.isdir(launch.cwd) else self._folder,  # shipped code is not there yet
                start_new_session=True,
                preexec_fn=become_rank,  # noqa: PLW1509 - the agent's other threads have ended by now
            )
        return _Rank(rank=launch.rank, process=process, log=path)

    async def _watch(self, order: ProbeNode, ranks: list[_Rank]) -> str:
        """Wait for the end of all processes, to the deadline, and report each stage; returns why they had to end."""
        deadline = time.monotonic() + order.deadline_s + IMPORT_S
        known = 0
        while any(each.process.poll() is None for each in ranks):
            if self._stopped.is_set():
                return "it was stopped: another node was lost"
            if time.monotonic() >= deadline:
                return f"not done within {order.deadline_s + IMPORT_S:g} s"
            if ranks[0].rank == 0:
                known = self._advance(order, ranks[0], known)
            await asyncio.sleep(POLL_S)
        return ""

    def _advance(self, order: ProbeNode, first: _Rank, known: int) -> int:
        """Report the stages that have begun since the first `known` lines; returns how many lines there are."""
        lines = _lines(first.log)
        seen = {line.stage for line in lines[:known] if isinstance(line, ProbeProgress)}
        for line in lines[known:]:
            if isinstance(line, ProbeProgress) and line.stage not in seen:
                seen.add(line.stage)
                self._send(
                    ProbeAdvanced(
                        at=self._clock(),
                        node=self._node,
                        generation=self._generation,
                        replica=order.replica,
                        number=order.number,
                        stage=line.stage,
                        elapsed_s=line.elapsed_s,
                    )
                )
        return len(lines)


def options(order: ProbeNode, view: NodeView) -> tuple[str, ...]:
    """The probe's deadline and gates; line rates only say something of enough nodes."""
    deadline = f"--deadline-s={order.deadline_s:g}"
    if not order.wanted.gpus:
        return deadline, f"--share-of-median={CPU_SHARE_OF_MEDIAN:g}"
    rate_gb_s = line_rate_gb_s(view) if len(order.nodes) >= LINE_RATE_NODES else None
    least = rate_gb_s and SHARE_OF_LINE_RATE * rate_gb_s / len(order.start.ranks)
    return deadline, *((f"--least-gb-s={least:.3g}",) if least else ())


async def _kill(ranks: Iterable[_Rank]) -> None:
    """Kill what is left, and reap it; the report says that no process is left."""
    for each in ranks:
        if each.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
    while any(each.process.poll() is None for each in ranks):  # noqa: ASYNC110 - nothing else knows of their end
        await asyncio.sleep(POLL_S)


def _lines(path: Path) -> list[ProbeProgress | ProbeResult]:
    """The probe's own lines of its output, which others, such as NCCL, write to as well."""
    found: list[ProbeProgress | ProbeResult] = []
    for line in _read(path).splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            found.append(_decoder.decode(line))
    return found


def _last_line(path: Path) -> str:
    return next((line.decode(errors="replace")[:300] for line in reversed(_read(path).splitlines()) if line), "")


def _read(path: Path) -> bytes:
    """Whole lines only."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        data = file.read(MAX_LOG_BYTES)
        return data[: data.rfind(b"\n") + 1]
    return b""
