"""Full set-up logs of every version and every fabric: all ranks and all connections are read, and nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from bench.nccl_log_generator import Job, Version, versions
from tests.diagnose.nccl_transport.generated_logs import Links, by_rank, edited, interleaved, links_of_members

from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.nccl_transport import TransportReport, read_setup_logs

NETWORKS = ("IB", "Socket", "AWS Libfabric", "IBext_v8", "FasTrak")
WITHIN = ("IPC", "CUMEM", "SHM", "direct pointer", "indirect")
CUMEM_SINCE = Version.of("2.18.1")
LAUNCHERS = (
    "",
    "[1,{rank}]<stdout>:",
    "[rank{rank}]:",
    "(RayWorker pid=77{rank}, ip=10.0.0.1) ",
    "2026-11-20T10:00:00.123Z ",
)


def jobs(version: Version) -> Iterable[Job]:
    for index, network in enumerate(NETWORKS):
        within = WITHIN[index] if WITHIN[index] != "CUMEM" or version >= CUMEM_SINCE else "IPC"
        yield Job(
            version=version,
            nodes=2,
            gpus=4,
            channels=3,
            nics=2,
            network=network,
            layer="RoCE" if index % 2 else "IB",
            gdr=network != "Socket",
            pxn=network in {"IB", "AWS Libfabric"},
            collnet=network == "IB",
            within=within,
            replicas=2,
            split=index % 2 == 0,
            timestamps=index % 2 == 0,
        )


def agrees(transport: TransportReport, job: Job) -> None:
    assert transport.truncated_lines == transport.unassigned_links == transport.left_out == 0
    assert len(transport.processes) == job.ranks
    truth = job.truth()
    assert len(transport.communicators) == len(truth)
    for communicator in truth:
        found = links_of_members(transport, communicator.members)
        assert found is not None, f"no communicator of {communicator.members}"
        assert named(found) == communicator.links


def named(found: Links) -> Links:
    """SHM's ways have had several names; the generator has one."""
    return {(*key[:4], "SHM" if key[3] == "SHM" else key[4], *key[5:]): channels for key, channels in found.items()}


@pytest.mark.parametrize("version", versions(), ids=str)
def test_logs_of_every_fabric_of_a_version_are_read_whole(version: Version) -> None:
    for job in jobs(version):
        agrees(read_setup_logs(by_rank(job)), job)


@pytest.mark.parametrize("before", LAUNCHERS)
@pytest.mark.parametrize("version", ["2.10.3", "2.18.6", "2.21.5", "2.27.7", "2.32.3"])
def test_interleaved_ranks_behind_a_launchers_prefix_are_told_apart(version: str, before: str) -> None:
    dice = random.Random(version + before)
    for job in jobs(Version.of(version)):
        agrees(read_setup_logs(interleaved(job, dice, before)), job)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("version", ["2.10.3", "2.27.7"])
def test_lines_of_other_software_between_those_of_a_thread_lose_no_channel(version: str, every: int) -> None:
    others = itertools.cycle([b"", b"step 12 loss 2.31\n", *[b""] * (every - 1), b"\n"])
    for job in jobs(Version.of(version)):
        agrees(read_setup_logs(edited(job, lambda _rank, line: line + next(others))), job)


@pytest.mark.parametrize("size", [1, 200, 5000])
def test_where_blocks_begin_and_end_makes_no_difference(size: int) -> None:
    job = next(iter(jobs(Version.of("2.27.7"))))
    agrees(read_setup_logs(by_rank(job, size)), job)


def test_order_of_the_files_makes_no_difference() -> None:
    for version in ("2.18.6", "2.27.7", "2.32.3"):
        job = next(iter(jobs(Version.of(version))))
        pile: list[LogChunk] = [*by_rank(job)]
        random.Random(version).shuffle(pile)
        agrees(read_setup_logs(pile), job)


def test_evidence_names_the_line_that_it_quotes() -> None:
    job = next(iter(jobs(Version.of("2.27.7"))))
    files = {f"rank-{rank}.log": b"".join(job.log(rank)).decode().splitlines() for rank in range(job.ranks)}
    transport = read_setup_logs(by_rank(job, 300))
    quoted = [one for process in transport.processes for one in process.evidence.values()]
    quoted += [member.evidence for communicator in transport.communicators for member in communicator.members]
    assert len(quoted) > 100
    for evidence in quoted:
        assert evidence.text in files[evidence.source][evidence.line - 1]
