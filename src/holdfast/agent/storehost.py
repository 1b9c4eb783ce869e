"""Runs the process that hosts a replica's TCPStore on its first node (train/warm/storehost.py).

TorchFT's Manager is only ever a client of the store at MASTER_ADDR:MASTER_PORT: it relies on its launcher, as
torchelastic's agent, to host one. The process imports torch once and serves one attempt after another, each at a port
of its own, so that no attempt meets what an earlier one has written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import holdfast
from holdfast.agent.held import Wanted
from holdfast.agent.program import program
from holdfast.findings import Finding, Severity
from holdfast.host.processes import die_with_parent

log = logging.getLogger("holdfast.agent")

SCRIPT = Path(holdfast.__file__).parent / "train" / "warm" / "storehost.py"

USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""With `True` torch's ranks are clients of the store at MASTER_ADDR:MASTER_PORT, whatever their number."""

SERVE_S = 120.0
"""Longest that it takes to import torch from a file system that is far away, and to listen."""


def hosts(env: Mapping[str, str], ranks: range) -> bool:
    """Whether a node with these ranks of a replica is to host its store."""
    return env.get(USE_AGENT_STORE) == "True" and 0 in ranks


class StoreHost:
    """The process that hosts the stores of this node, once one has been asked for."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def serve(self, replica: int, port: int, rank: Wanted, output: Path) -> Finding | None:
        """Host a replica's store at a port from now on; what there is to say where that cannot be done.

        It is hosted with the Python of a rank; what torch writes goes to `output`.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(SERVE_S):
                    said = await self._ask(f"{replica} {port}", rank, output)
            except (OSError, TimeoutError) as error:
                said = str(error) or f"no answer within {SERVE_S:g} s"
                self._drop()
        if said == f"serving {port}":
            return None
        log.error("no store at port %s: %s", port, said)
        return Finding(
            code="store-not-hosted",
            severity=Severity.WARNING,
            what=f"the store that the ranks of replica {replica} are to meet at could not be hosted at port {port}",
            where=f"port {port}",
            evidence=(said, f"its output: {output}"),
            remedy="Have torch in the Python of the command; "
            f"`env: {{{USE_AGENT_STORE}: 'False'}}` has rank 0 host the store.",
        )

    def close(self, replica: int) -> None:
        """The attempt is over: nobody meets there any more."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(f"{replica} 0\n".encode())

    async def _ask(self, line: str, rank: Wanted, output: Path) -> str:
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start(rank, output)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{line}\n".encode())
        await process.stdin.drain()
        wanted = f"serving {line.partition(' ')[2]}"
        while answer := (await process.stdout.readline()).decode(errors="replace").strip():
            stale = answer == "closed" or answer.startswith("serving ")  # of an attempt that was over before it came
            if answer == wanted or not stale:
                return answer
        self._drop()
        return "its process ended"

    async def _start(self, rank: Wanted, output: Path) -> asyncio.subprocess.Process:
        found = program(rank.argv)
        python = rank.argv[:1] if isinstance(found, str) else found.python
        # It is the agent's, not of the rank's attempt.
        ours = {name: value for name, value in os.environ.items() if name.startswith("HOLDFAST_")}
        errors = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return await asyncio.create_subprocess_exec(
                *python,
                str(SCRIPT),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=rank.settled | ours,
                cwd=rank.cwd,
                preexec_fn=die_with_parent,
            )
        finally:
            os.close(errors)

    def _drop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None
