"""Owns how a standby gets ready: all that comes before a start is done, and what keeps it from being of use is said.

Refuses to own whose place it takes, and the start itself, which is as any other (team.py).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

from holdfast.agent.held import Wanted
from holdfast.agent.rank import RankProcess
from holdfast.agent.readiness import Readiness
from holdfast.agent.warmth import STANDBY, Slot, Warmth
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.events.orders import StartRanks
from holdfast.findings import Fault, Finding, Severity

NOT_KNOWN = frozenset({"RANK", "ROLE_RANK", "GROUP_RANK", "NODE_RANK", "REPLICA_GROUP_ID"})
"""Variables that tell whose place a node has."""


async def get_ready(
    start: StartRanks,
    *,
    node: int,
    code: Callable[[str], Coroutine[None, None, Path]],
    warmth: Warmth,
    clock: Clock,
    find: Callable[[Finding], object],
    abandoned: asyncio.Event,
) -> bool:
    """Do all that comes before these ranks' start; whether the node can start them now."""
    try:
        folder = await code(start.code) if start.code else Path()
    except HoldfastError as error:
        find(_unfit(node, error.findings[0].what, error.findings[0].evidence))
        return False
    await Readiness(start, node=node, find=find, abandoned=abandoned, patient=True).wait()
    if abandoned.is_set():
        return False
    programs: dict[Slot, Wanted] = {}
    for slot, launch in enumerate(start.launches):
        wanted = RankProcess(launch, Path(), clock).wanted(folder, {})
        if not wanted.cwd.is_dir():
            find(_unfit(node, f"there is no folder {wanted.cwd}", ()))
            return False
        program, search = wanted.argv[0], wanted.environ.get("PATH")
        if shutil.which(program if "/" not in program else wanted.cwd / program, path=search) is None:
            find(_unfit(node, f"there is no program `{program}`", (f"PATH={search}",)))
            return False
        if launch.warm:
            programs[STANDBY, slot] = replace(wanted, unknown=NOT_KNOWN)
    await warmth.prepare(programs)
    warmth.keep(STANDBY, programs)
    return True


def _unfit(node: int, why: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="standby-unfit",
        severity=Severity.WARNING,
        what=f"node{node} cannot take the place of another: {why}",
        where=f"node{node}",
        evidence=evidence,
        remedy="The run goes on without it, and a lost node waits for its next one. Mend it, and end its agent.",
        fault=Fault.CLUSTER,
    )
