"""Runs this node's processes of a probe when the controller asks for them, and reports their end.

The processes have the places, the fabric and the devices that the ranks will have. Rank 0 coordinates them, and prints
the stages as they begin, then the result of all ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.agent.numbered_task import NumberedTask
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.clock import Clock
from holdfast.events import NodeProbed, ProbeAdvanced
from holdfast.events.probe_results import ProbeProgress, ProbeResult, ProbeStage, keep_slowest
from holdfast.host.files import private_opener
from holdfast.host.process_limits import become_rank
from holdfast.preflight.checks.storage import checkpoint_folder
from holdfast.preflight.node_view import NodeView
from holdfast.preflight.rdma_devices import line_rates_gb_s
from holdfast.protocol.orders import ProbeNode, StopProbe

log = logging.getLogger("holdfast.agent")

MODULE = "holdfast.train.probe"
POLL_S = 0.1
"""Seconds between two looks at the processes."""
IMPORT_S = 45.0
"""Seconds beyond the probe's own deadline after which its processes are killed: they first import torch."""
CPU_SHARE_OF_MEDIAN = 0.2
"""CPUs share their memory and their time with other processes: a pair is slow only below this share of the others."""
SHARE_OF_LINE_RATE = 0.2
"""Of the ports' rate, below which a pair is slow whatever the others are: sockets are, while a fabric that is
oversubscribed by three is not."""
LINE_RATE_NODES = 4
MAX_LINE_BYTES = 16 << 20
USAGE = 2
"""Exit code of a probe that does not fit its node, such as one of a GPU that torch does not see."""
_MISSING = re.compile(r"No module named '(torch|holdfast)\b")

_decoder = msgspec.json.Decoder(ProbeProgress | ProbeResult)


class _Rank(Struct, frozen=True, kw_only=True):
    """A process of the probe."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    lines: _Lines


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
        self._task = NumberedTask[NodeProbed](send)

    def request(self, order: ProbeNode) -> None:
        """Start the probe, unless it has started; send its report, now or when it has ended."""
        self._task.request(order.number, lambda: self._probe(order))

    def stop(self, order: StopProbe) -> None:
        """End the probe of this number, or never start it, and report that."""
        self._task.stop(order.number, lambda: self._ended(order, problem="it was stopped before its start"))

    async def _probe(self, order: ProbeNode) -> NodeProbed:
        ranks: list[_Rank] = []
        try:
            for place in range(len(order.start.ranks)):
                ranks.append(self._start(order, place))
            problem = await self._watch(order, ranks)
        except (FileNotFoundError, PermissionError) as error:
            return await self._ended(order, not_looked_at=f"{order.python or sys.executable}: {error.strerror}")
        except Exception as error:  # whatever it is, the controller waits for a report
            log.exception("the probe failed")
            problem = repr(error)
        finally:
            await _kill(ranks)
        return await self._ended(order, **_outcome(ranks, problem))

    async def _ended(self, order: ProbeNode | StopProbe, **outcome: Any) -> NodeProbed:
        """The report that no process of the probe is left."""
        self._rendezvous_port.renew()
        return NodeProbed(
            at=self._clock(),
            node=self._node,
            generation=self._generation,
            replica=order.replica,
            number=order.number,
            port=self._rendezvous_port.number,
            nodes=order.nodes,
            **outcome,
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
                preexec_fn=become_rank,  # noqa: PLW1509 - what it calls needs no lock of another thread
            )
        return _Rank(rank=launch.rank, process=process, log=path, lines=_Lines(path))

    async def _watch(self, order: ProbeNode, ranks: list[_Rank]) -> str:
        """Wait for the end of all processes, to the deadline, and report each stage; returns why they had to end."""
        deadline = time.monotonic() + order.deadline_s + IMPORT_S
        seen: set[ProbeStage] = set()
        while any(each.process.poll() is None for each in ranks):
            if self._task.stopped.is_set():
                return "it was stopped: a node is missing"
            if time.monotonic() >= deadline:
                return f"not done within {order.deadline_s + IMPORT_S:g} s"
            if ranks[0].rank == 0:
                self._advance(order, ranks[0], seen)
            await asyncio.sleep(POLL_S)
        return ""

    def _advance(self, order: ProbeNode, first: _Rank, seen: set[ProbeStage]) -> None:
        """Report the stages that have begun since the last look."""
        for line in first.lines.new():
            if line.stage not in seen:
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


def options(order: ProbeNode, view: NodeView) -> tuple[str, ...]:
    """The probe's deadline, backend and gates; line rates only say something of enough nodes."""
    deadline, folder = f"--deadline-s={order.deadline_s:g}", checkpoint_folder(view)
    storage = (f"--storage={folder}",) if folder else ()
    if not order.wanted.gpus:
        return deadline, "--backend=gloo", f"--share-of-median={CPU_SHARE_OF_MEDIAN:g}", *storage
    rates_gb_s = line_rates_gb_s(view) if len(order.nodes) >= LINE_RATE_NODES else ()
    lane_gb_s = min(sum(rates_gb_s) / len(order.start.ranks), max(rates_gb_s)) if rates_gb_s else 0.0
    least = (f"--least-gb-s={SHARE_OF_LINE_RATE * lane_gb_s:.3g}",) if lane_gb_s else ()
    return deadline, "--backend=nccl", *least, *storage


async def _kill(ranks: Iterable[_Rank]) -> None:
    """Kill and reap the processes that still run, before the report that there are none."""
    for each in ranks:
        if each.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)
    while any(each.process.poll() is None for each in ranks):  # noqa: ASYNC110 - nothing else knows of their end
        await asyncio.sleep(POLL_S)


def _outcome(ranks: list[_Rank], problem: str) -> dict[str, Any]:
    """What a node's processes leave behind, as fields of its report."""
    for each in ranks:
        each.lines.new()
    result = ranks[0].lines.result if ranks and ranks[0].rank == 0 else None
    if result is not None or problem:
        return {"result": result and keep_slowest(result), "problem": problem}
    silent = next((each for each in ranks if each.lines.result is None), None)
    if silent is None:
        return {"problem": next((each.lines.result.problem for each in ranks if each.lines.result), "")}
    said = silent.lines.last or "it printed nothing"
    if _MISSING.search(said) or silent.process.returncode == USAGE:
        return {"not_looked_at": said}
    return {"problem": said, "crashed": True}


class _Lines:
    """The probe's own lines of its output, which others, such as NCCL, write to as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self.result: ProbeResult | None = None
        self.last = ""
        """The last line of another writer."""

    def new(self) -> list[ProbeProgress]:
        """The stages in whole lines that were written since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read_bytes)
                data = file.read(MAX_LINE_BYTES)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole) or len(data) // MAX_LINE_BYTES * MAX_LINE_BYTES
        found: list[ProbeProgress] = []
        for line in whole.splitlines():
            try:
                decoded = _decoder.decode(line)
            except msgspec.DecodeError:
                self.last = line.decode(errors="replace")[:300] or self.last
                continue
            if isinstance(decoded, ProbeResult):
                self.result = decoded
            else:
                found.append(decoded)
        return found
