"""Logs that are cut, mixed, flipped and made up: nothing crashes, nothing is claimed without a line, all is bounded."""

from __future__ import annotations

import random

import msgspec
import pytest
from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import JOB, chunks, chunks_of_lines

from holdfast.diagnose.nccl_transport import (
    TransportReport,
    format_transport,
    read_setup_logs,
    setup_log_reader,
    to_dict,
    to_facts,
)
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome
from holdfast.fabric.catalog import CATALOG

SMALL = replace(JOB, gpus=2, channels=2, replicas=2, within="IPC", collnet=True, pxn=True)
JOBS = tuple(
    replace(SMALL, version=Version.of(version), network=network, split=split)
    for version, network, split in (
        ("2.10.3", "IB", False),
        ("2.18.6", "Socket", True),
        ("2.21.5", "AWS Libfabric", True),
        ("2.27.7", "IB", True),
        ("2.32.3", "FasTrak", False),
    )
)
LOGS = tuple([line for rank in range(job.ranks) for line in job.log(rank)] for job in JOBS)
WORDS = (
    *(b"\n", b"\0", b"\xff\xfe", b"\xe2\x80", b"\x1b[31m", b" NCCL INFO ", b" : ", b"[send]", b"/GDRDMA", b"999999999"),
    *(b"Channel 63/1 : ", b"via NET//0", b"-1", b"nranks 9999999", b'\\n"}', b"commId 0x0", b"A" * 5000, b" " * 5000),
)


def mutated(dice: random.Random) -> bytes:
    """A log with up to twenty things wrong with it."""
    log = list(dice.choice(LOGS))
    if dice.random() < 0.3:
        log += dice.choice(LOGS)
    if dice.random() < 0.5:
        begin = dice.randrange(len(log))
        log = log[begin : begin + dice.randrange(1, 40)]
    for _ in range(dice.randrange(20)):
        at = dice.randrange(len(log))
        line, kind = log[at], dice.randrange(7)
        cut = dice.randrange(len(line) + 1)
        other = dice.choice(log)
        log[at] = (
            line[:cut],
            line[cut:],
            line[:cut] + other[dice.randrange(len(other) + 1) :],
            line[:cut] + dice.choice(WORDS) + line[cut:],
            line[:cut] + dice.randbytes(3) + line[cut + 3 :],
            other,
            line * 3,
        )[kind]
    if dice.random() < 0.3:
        dice.shuffle(log)
    return b"".join(log)


def sound(transport: TransportReport) -> None:
    """What is claimed has its lines, and both ways of saying it work."""
    verdict = transport.verdict
    if verdict.outcome is FabricOutcome.UNKNOWN:
        assert verdict.missing
    else:
        assert verdict.evidence
    for finding in transport.findings:
        assert finding.evidence, finding
    assert format_transport(transport)[0].startswith(f"fabric: {verdict.outcome}")
    assert msgspec.json.encode(to_dict(transport))
    to_facts(transport, expected_known=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_broken_logs_give_sound_answers(seed: int) -> None:
    dice = random.Random(seed)
    fabrics = (None, *CATALOG.values())
    for _ in range(1000):
        data = mutated(dice)
        sound(read_setup_logs(chunks("rank-0.log", data, dice.choice((200, 1 << 20))), dice.choice(fabrics)))


def test_numbers_of_ranks_beyond_belief_cost_nothing() -> None:
    head = "n1:1:1 [0] NCCL INFO comm 0x1 rank"
    said = [f"{head} {rank} nranks 9999999 cudaDev 0 busId 1a000 - Init COMPLETE" for rank in range(0, 99, 2)]
    transport = read_setup_logs(chunks_of_lines(*said))
    assert transport.communicators[0].size == 9_999_999
    assert len(format_transport(transport)[0]) < 400
    sound(transport)


def test_what_is_beyond_the_bounds_is_left_out_and_counted() -> None:
    transport = read_setup_logs(chunks("rank-0.log", b"".join(LOGS[3])), max_bytes=60_000)
    assert transport.left_out > 20
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert "lines were over the limit" in format_transport(transport)[-1]
    sound(transport)


def test_no_fabric_is_verified_by_a_part_of_its_lines() -> None:
    whole = b"".join(LOGS[3])
    assert read_setup_logs(chunks("rank-0.log", whole)).verdict.outcome is FabricOutcome.VERIFIED
    extra = b"".join(b"m:1:1 [0] NCCL INFO NCCL_V%d set by environment to 1\n" % one for one in range(9999))
    transport = read_setup_logs(chunks("rank-0.log", whole + extra), max_bytes=1 << 20)
    assert transport.left_out > 9000
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert "were left out" in transport.verdict.what
    sound(transport)


def test_more_processes_than_any_job_has_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_log_reader, "_MAX_PROCESSES", 30)
    said = [
        f"n{one}:{one}:9 [0] NCCL INFO ncclCommInitRank comm 0x{one} rank {one} nranks 99 cudaDev 0 busId 1000 "
        f"commId 0x{one} - Init START"
        for one in range(50)
    ]
    transport = read_setup_logs(chunks_of_lines(*said))
    assert (len(transport.processes), transport.left_out) == (30, 20)
    told = [finding.what for finding in transport.findings if finding.code == "ranks-missing"]
    assert len(told) == 9
    assert told[-1].startswith("the same of 22 more")
    sound(transport)


def test_lines_of_rccl_are_whole() -> None:
    said: list[str] = []
    for rank, side in enumerate(("receive", "send")):
        head, comm = f"g{rank}:12:40 [0] NCCL INFO", f"comm 0x95cdeb{rank}"
        said += [
            f"{head} {comm} rank {rank} nranks 2 cudaDev 0 busId c1000 used 67129296 bytes - Init COMPLETE",
            f"{head} Channel 02/0 : 1[c1000] -> 0[c1000] [{side}] via NET/Socket/1 {comm} nRanks 02",
            f"{head} Connected all rings {comm} nRanks 02 busId c1000",
        ]
    transport = read_setup_logs(chunks_of_lines(*said))
    assert (transport.truncated_lines, transport.unassigned_links) == (0, 0)
    assert {link.link_type.route for one in transport.communicators for link in one.links} == {"NET/Socket"}
    sound(transport)


def test_connection_as_long_as_a_novel_is_torn() -> None:
    transport = read_setup_logs(
        chunks_of_lines("n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0" + " " * 60_000)
    )
    assert transport.truncated_lines == 1


def test_generator_covers_what_the_fuzzer_breaks() -> None:
    assert {type(job) for job in JOBS} == {Job}
    assert all(read_setup_logs(chunks("rank-0.log", b"".join(log))).communicators for log in LOGS)
