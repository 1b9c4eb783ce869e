"""Turns generated logs into reader input: whole, interleaved or torn."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace

from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.nccl_transport import TransportReport
from holdfast.findings import Finding

JOB = Job(version=Version.of("2.27.7"), nodes=2, gpus=4, channels=2, nics=2)
OLD = replace(JOB, version=Version.of("2.18.6"))
"""The same from before lazy connections."""
Links = dict[tuple[int, int, str, str, str, int | None, int | None, bool], int]


def chunks(name: str, data: bytes, size: int = 1 << 22, node: str | None = None) -> Iterator[LogChunk]:
    """Chunks of whole lines, of about `size` bytes."""
    source, begin, line = LogSource(name=name, node=node), 0, 1
    while begin < len(data):
        end = data.find(b"\n", min(begin + size, len(data)) - 1) + 1 or len(data)
        yield LogChunk(source=source, first_line=line, data=data[begin:end])
        line += data.count(b"\n", begin, end)
        begin = end


def by_rank(job: Job, size: int = 1 << 22) -> Iterator[LogChunk]:
    """A file for each rank."""
    for rank in range(job.ranks):
        yield from chunks(f"rank-{rank}.log", b"".join(job.log(rank)), size)


def interleaved(job: Job, dice: random.Random, before: str = "") -> Iterator[LogChunk]:
    """All ranks in one file, interleaved line by line; `before` may name the rank as `{rank}`."""
    logs = [(before.format(rank=rank).encode(), job.log(rank)) for rank in range(job.ranks)]
    lines: list[bytes] = []
    places = [0] * len(logs)
    left = [rank for rank, (_, log) in enumerate(logs) for _ in log]
    dice.shuffle(left)
    for rank in left:
        prefix, log = logs[rank]
        lines.append(prefix + log[places[rank]])
        places[rank] += 1
    yield from chunks("all.log", b"".join(lines), 1 << 14)


def links_of_members(transport: TransportReport, members: dict[int, tuple[str, int]]) -> Links | None:
    """The connections of the communicator with exactly these members, from the generator."""
    for communicator in transport.communicators:
        processes = {member.rank: transport.processes[member.process] for member in communicator.members}
        if {rank: (process.host, process.pid) for rank, process in processes.items()} == members:
            return links(transport, communicator.name)
    return None


def links(transport: TransportReport, name: str) -> Links:
    """The connections of the communicator of this name."""
    found: Links = defaultdict(int)
    for communicator in transport.communicators:
        for link in communicator.links if communicator.name == name else ():
            way = link.link_type
            side = way.direction.value
            key = (link.sender, link.receiver, side, way.kind.value, way.name, way.nic, way.proxy, way.gdr)
            found[key] |= link.channels
    return found


def chunks_of_lines(*lines: str, name: str = "log") -> Sequence[LogChunk]:
    """A file of these lines."""
    return [*chunks(name, "".join(f"{line}\n" for line in lines).encode())]


def edited(job: Job, edit: Callable[[int, bytes], bytes]) -> Iterator[LogChunk]:
    """A file for each rank, with each line replaced by `edit(rank, line)`."""
    for rank in range(job.ranks):
        yield from chunks(f"rank-{rank}.log", b"".join(edit(rank, line) for line in job.log(rank)))


def on_last_node(job: Job, old: bytes, new: bytes) -> Iterator[LogChunk]:
    """The job's logs, where the last node's lines differ."""
    return edited(job, lambda rank, line: line.replace(old, new) if rank // job.gpus == job.nodes - 1 else line)


def mixed(job: Job, other: Job) -> Iterator[LogChunk]:
    """The job's logs, except those of its last node, which come from the other job."""
    for rank in range(job.ranks):
        own = other if rank // job.gpus == job.nodes - 1 else job
        yield from chunks(f"rank-{rank}.log", b"".join(own.log(rank)))


def only(transport: TransportReport, code: str) -> Finding:
    (finding,) = [finding for finding in transport.findings if finding.code == code]
    assert finding.remedy
    assert finding.evidence
    return finding
