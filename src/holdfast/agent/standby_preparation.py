"""Prepares a standby: does everything that precedes a start, and reports what would make it fail.

The start itself is like any other (worker_group.py).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path

from msgspec.structs import replace

from holdfast.agent.prewarm import STANDBY_REPLICA, PrewarmPool, RankSlot
from holdfast.agent.rank_preflight import RankPreflight
from holdfast.agent.rank_process import RankProcess
from holdfast.agent.zygote import RankCommand
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Owner, Severity
from holdfast.protocol.orders import StartRanks

PER_NODE_VARIABLES = frozenset({"RANK", "ROLE_RANK", "GROUP_RANK", "NODE_RANK", "REPLICA_GROUP_ID"})
"""Variables that depend on the node that the standby will replace."""


async def prepare_standby(
    start: StartRanks,
    *,
    node: int,
    get_code: Callable[[str], Coroutine[None, None, Path]],
    prewarm_pool: PrewarmPool,
    clock: Clock,
    report_finding: Callable[[Finding], object],
    cancelled: asyncio.Event,
) -> bool:
    """Do everything that precedes the start of these ranks; return whether the node can start them now."""
    try:
        folder = await get_code(start.code_digest) if start.code_digest else Path()
    except HoldfastError as error:
        report_finding(_not_ready(node, error.findings[0].what, error.findings[0].evidence))
        return False
    await RankPreflight(start, node=node, report_finding=report_finding, cancelled=cancelled, wait_forever=True).wait()
    if cancelled.is_set():
        return False
    programs: dict[RankSlot, RankCommand] = {}
    for slot, launch in enumerate(start.launches):
        command = RankProcess(launch, Path(), clock).command(folder, {}, {})
        if not command.cwd.is_dir():
            report_finding(_not_ready(node, f"there is no folder {command.cwd}", ()))
            return False
        program, search = command.argv[0], command.environ.get("PATH")
        if shutil.which(program if "/" not in program else command.cwd / program, path=search) is None:
            report_finding(_not_ready(node, f"there is no program `{program}`", (f"PATH={search}",)))
            return False
        if launch.prewarm:
            programs[STANDBY_REPLICA, slot] = replace(command, provisional=PER_NODE_VARIABLES)
    await prewarm_pool.prewarm(programs)
    prewarm_pool.keep_prewarmed(STANDBY_REPLICA, programs)
    return True


def _not_ready(node: int, why: str, evidence: tuple[str, ...]) -> Finding:
    return Finding(
        code="standby-not-ready",
        severity=Severity.WARNING,
        what=f"node{node} cannot take the place of another: {why}",
        where=f"node{node}",
        evidence=evidence,
        remedy="The run continues without this standby. Fix the cause, then end its agent.",
        owner=Owner.CLUSTER,
    )
