"""A standby that lacks something its ranks need reports it, and does not report ready."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.agent.test_zygote import play

from holdfast.agent.prewarm import PrewarmPool
from holdfast.agent.standby_preparation import prepare_standby
from holdfast.clock import Clock
from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.protocol.orders import RankLaunch, StartRanks

HERE, NOWHERE = "a", "b"
"""Code that can be had, and code that cannot."""


@pytest.mark.parametrize(
    ("program", "cwd", "code", "why"),
    [
        ("true", "part", HERE, ""),
        ("./tool", "part", HERE, ""),
        ("true", "part", NOWHERE, "the code arrived damaged"),
        ("true", "moved", HERE, "there is no folder"),
        ("no-such-program", "part", HERE, "there is no program `no-such-program`"),
        ("./train", "part", HERE, "there is no program `./train`"),
    ],
)
def test_standby_is_ready_only_with_all_that_a_start_needs(
    tmp_path: Path, program: str, cwd: str, code: str, why: str
) -> None:
    (tmp_path / HERE / "part").mkdir(parents=True)
    (tmp_path / HERE / "part" / "tool").touch(mode=0o755)
    found: list[Finding] = []
    launch = RankLaunch(rank=0, argv=(program,), env={}, cwd=cwd, log=str(tmp_path / "rank-0.log"), prewarm=False)

    async def get(digest: str) -> Path:
        if digest == NOWHERE:
            raise failure(
                "code-not-delivered", "the code arrived damaged", exit_code=ExitCode.UNAVAILABLE, remedy="wait"
            )
        return tmp_path / digest

    async def scene() -> None:
        ready = await prepare_standby(
            StartRanks(replica=0, attempt=0, ranks=(launch,), env={}, code_digest=code),
            node=2,
            get_code=get,
            prewarm_pool=PrewarmPool(tmp_path, found.append, lambda replica, ranks: None),
            clock=Clock(),
            report_finding=found.append,
            cancelled=asyncio.Event(),
        )
        assert ready == (not why)

    play(scene)
    assert [(finding.code, finding.where) for finding in found] == ([("standby-not-ready", "node2")] if why else [])
    assert all(why in finding.what for finding in found)
