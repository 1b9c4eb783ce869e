"""Runs this node's ranks of a replay when the controller orders it, and reports the digest of their state.

The ranks run the job's command as a separate job with the other nodes of the group, without a connection to the agent:
the variables of protocol/replay_env.py have their Session repeat the run's last steps, and end.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from holdfast.agent.numbered_task import NumberedTask
from holdfast.agent.orphans import OrphanProcesses
from holdfast.agent.rank_process import RankProcess
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.events import NodeReplayed
from holdfast.protocol import replay_env
from holdfast.protocol.orders import ReplayNode, StopReplay

log = logging.getLogger("holdfast.agent")


class NodeReplay:
    """The replay of this node that runs, or the last one."""

    def __init__(
        self,
        *,
        node: int,
        generation: int,
        folder: Path,
        rendezvous_port: ReservedPort,
        get_code: Callable[[str], Coroutine[None, None, Path]],
        clock: Clock,
        send: Callable[[NodeReplayed], object],
    ) -> None:
        self._node, self._generation, self._folder = node, generation, folder
        self._rendezvous_port = rendezvous_port
        self._get_code = get_code
        self._clock = clock
        self._task = NumberedTask[NodeReplayed](send)

    def request(self, order: ReplayNode) -> None:
        """Start the replay, unless it has started; send its report, now or when it has ended."""
        self._task.request(order.number, lambda: self._replay(order))

    def stop(self, order: StopReplay) -> None:
        """End the replay of this number, or never start it, and report that."""
        self._task.stop(order.number, lambda: self._ended(order, problem="it was stopped before its start"))

    async def _replay(self, order: ReplayNode) -> NodeReplayed:
        results = self._folder / f"replay-{order.number}"
        orphans = OrphanProcesses(
            self._folder,
            run=order.start.env.get("HOLDFAST_RUN", ""),
            node=self._node,
            replica=order.replica,
            attempt=order.start.attempt,
        )
        shutil.rmtree(results, ignore_errors=True)
        ranks = [
            RankProcess(
                msgspec.structs.replace(launch, log=f"{self._folder}/replay-{order.number}-rank-{launch.rank}.log"),
                results / "no-socket",
                self._clock,
            )
            for launch in order.start.launches
        ]
        try:
            results.mkdir(mode=0o700)
            async with asyncio.timeout(order.deadline_s):
                problem = await self._run(order, ranks, results)
        except TimeoutError:
            problem = f"not done within {order.deadline_s:.0f} s"
        except HoldfastError as error:
            problem = error.findings[0].what
        except Exception as error:  # whatever it is, the controller waits for a report
            log.exception("the replay failed")
            problem = repr(error)
        finally:
            await _kill(ranks)
            orphans.kill([rank.pid for rank in ranks if rank.pid])
        return await self._ended(
            order, nodes=order.nodes, digest="" if problem else _digest(ranks, results), problem=problem
        )

    async def _run(self, order: ReplayNode, ranks: Sequence[RankProcess], results: Path) -> str:
        """Start the ranks and wait until all have a digest, or one has failed; returns why there is none."""
        code = await self._get_code(order.start.code_digest) if order.start.code_digest else Path()
        changed = asyncio.Event()
        variables = {
            replay_env.UNTIL: str(order.until_step),
            replay_env.FOLDER: str(results),
            "HOLDFAST_RANK_SOCKET": "",
            "HOLDFAST_STEP_CLOCK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        for rank in ranks:
            command = rank.command(code, {}, {})
            command = replace(command, environ={**command.environ, **variables})
            await rank.start(lambda _: changed.set(), command)
        stopped = asyncio.ensure_future(self._task.stopped.wait())
        try:
            while True:
                changed.clear()
                failed = next((each for each in ranks if each.exit is not None and not each.succeeded), None)
                if failed is not None and failed.exit is not None:
                    return f"rank {failed.rank} ended: {failed.exit.error or f'exit code {failed.exit.code}'}"
                if all(each.exit is not None for each in ranks):
                    return ""
                exits = asyncio.ensure_future(changed.wait())
                await asyncio.wait((stopped, exits), return_when=asyncio.FIRST_COMPLETED)
                exits.cancel()
                if stopped.done():
                    return "it was stopped: a rank of its group ended, or a node is missing"
        finally:
            stopped.cancel()

    async def _ended(
        self, order: ReplayNode | StopReplay, *, nodes: tuple[int, ...] = (), digest: str = "", problem: str = ""
    ) -> NodeReplayed:
        """The report that no process of the replay is left."""
        self._rendezvous_port.renew()
        return NodeReplayed(
            at=self._clock(),
            node=self._node,
            generation=self._generation,
            replica=order.replica,
            number=order.number,
            port=self._rendezvous_port.number,
            nodes=nodes,
            digest=digest,
            problem=problem or ("" if digest else "its program ended before the last step of the replay"),
        )


def _digest(ranks: Sequence[RankProcess], results: Path) -> str:
    """One digest of those of all ranks; empty if one has left none."""
    files = [results / replay_env.digest_file(rank) for process in ranks for rank in process.ranks]
    if not files or not all(file.is_file() for file in files):
        return ""
    return hashlib.sha256(b"\n".join(file.read_bytes() for file in files)).hexdigest()[:32]


async def _kill(ranks: Sequence[RankProcess]) -> None:
    """Kill the ranks that still run, before the report that there are none."""
    for rank in ranks:
        rank.stop(signal.SIGKILL)
    while any(rank.running for rank in ranks):  # noqa: ASYNC110 - the loop reaps them
        await asyncio.sleep(0.05)
