"""The rank that holds up the others is named from the flight recorders of real ranks, by the live run and in files.

Neither stacks nor steps help here: all ranks report alike, and no stack is taken.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests.train import hanging_ranks
from tests.train.hanging_ranks import WORLD, Fault, Ranks

from holdfast.agent.flight_dump import FlightRecorders, RankCollectives
from holdfast.control.policy import FailureKind
from holdfast.control.root_cause import first_failure, hang_culprits
from holdfast.control.state import ReplicaState
from holdfast.diagnose.flight_verdict import HangKind, find_culprits
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import flight_recorder
from holdfast.events import ExitReason, RankExited, RankHung
from holdfast.host.processes import state_letter

DEADLINE_S = 60.0
COLLECTIVES = 2 * hanging_ranks.STEPS
"""Collectives of the group that all ranks completed."""

KINDS = {
    Fault.STOPPED: HangKind.ABSENT,
    Fault.OWN_CODE: HangKind.BEHIND,
    Fault.OTHER_COLLECTIVE: HangKind.MISMATCH,
    Fault.SKIPPED: HangKind.MISMATCH,
    Fault.DEAD: HangKind.ABSENT,
}


async def dump_when_all_wait(
    ranks: Ranks, recorders: FlightRecorders, *, free: int | None, stopped: int | None
) -> dict[int, RankCollectives]:
    """What the ranks' recorders show once one is stopped and all but one wait in a collective.

    The Gloo group that carries the data of the NCCL-like one has no name, and may be dumped a moment later than that.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await asyncio.sleep(0)
            if stopped is not None and state_letter(ranks.pids[stopped]) != "T":
                continue
            asked = [rank for rank, pid in ranks.pids.items() if state_letter(pid) not in ("T", "Z", "")]
            answers = await asyncio.gather(*map(recorders.dump, asked))
            shown = dict(zip(asked, answers, strict=True))
            pending = {rank: [each.pending for each in shown[rank].collectives if each.group] for rank in asked}
            waiting = {rank for rank in asked if any(each > COLLECTIVES for each in pending[rank])}
            # Gloo records that a collective has completed a moment after its caller goes on, in any of its groups.
            unfinished = {rank for rank in asked if any(each.pending for each in shown[rank].collectives)}
            if waiting == unfinished == set(asked) - {free}:
                return shown


def hung(ranks: Ranks, rank: int, shown: RankCollectives | None) -> RankHung:
    return RankHung(
        at=50.0,
        node=rank,
        replica=0,
        attempt=0,
        rank=rank,
        last_step=5,
        last_step_at=20.0,
        waited_s=30.0,
        process_state=state_letter(ranks.pids[rank]),
        flight_dumps=shown.files if shown else (),
        collectives=shown.collectives if shown else (),
    )


@pytest.mark.slow
@pytest.mark.parametrize("culprit", range(WORLD))
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("backend", ["gloo", "nccl_like"])
def test_culprit_is_named_and_nobody_else(tmp_path: Path, backend: str, fault: Fault, culprit: int) -> None:
    recorders = FlightRecorders(tmp_path, 0)
    ranks = hanging_ranks.start(tmp_path, fault, culprit, backend)
    try:
        recorders.add(range(WORLD), ranks.environ)
        free = None if KINDS[fault] is HangKind.MISMATCH else culprit
        stopped = culprit if fault is Fault.STOPPED else None
        shown = asyncio.run(dump_when_all_wait(ranks, recorders, free=free, stopped=stopped))
        hangs = tuple(hung(ranks, rank, shown.get(rank)) for rank in range(WORLD) if ranks.processes[rank].is_alive())
        exits = tuple(
            RankExited(
                at=40.0, node=rank, replica=0, attempt=0, rank=rank, reason=ExitReason.SIGNAL, code=signal.SIGKILL
            )
            for rank in range(WORLD)
            if not ranks.processes[rank].is_alive()
        )
    finally:
        ranks.kill()
        recorders.close()

    live = first_failure(
        ReplicaState(replica=0, attempt=0, started_at=1.0, highest_step=5, hangs=hangs, rank_failures=exits), at=99.0
    )
    assert (live.rank, live.node) == (culprit, culprit)
    assert live.kind is (FailureKind.KILLED if fault is Fault.DEAD else FailureKind.HUNG)
    assert set(hang_culprits(hangs)) <= {culprit}

    files = [Path(file) for each in shown.values() for file in each.files]
    dumps = [flight_recorder.read(LogSource(name=str(file)), file.read_bytes()) for file in files]
    verdicts = find_culprits([dump for dump in dumps if dump is not None], range(WORLD))
    assert {(verdict.rank, verdict.kind) for verdict in verdicts} == {(culprit, KINDS[fault])}, verdicts
