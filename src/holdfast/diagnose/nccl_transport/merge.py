"""Merges the communicators of different processes, and names them.

NCCL gives each communicator an id since 2.16, and split ones a reliable id only since 2.31. Without one, splits are
joined by their parent, count and colour, and others by their size and creation order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from holdfast.diagnose.nccl_transport.line_patterns import to_text
from holdfast.diagnose.nccl_transport.link_assigner import LinkAssigner
from holdfast.diagnose.nccl_transport.process_records import CommInit, ProcessRecord
from holdfast.diagnose.nccl_transport.transport_report import CommRank, Communicator, Link, NcclProcess

_Key = tuple[object, ...]
_Group = dict[int, CommInit]
"""The processes' views of one communicator, by rank."""


class MergedLogs(Struct, frozen=True, kw_only=True):
    """Processes and communicators (the largest first), joined over all logs."""

    processes: tuple[NcclProcess, ...]
    communicators: tuple[Communicator, ...]
    truncated_lines: int
    """Connection lines that were cut or mixed with others."""
    unassigned_links: int
    """Connection lines of processes without any communicator in the logs."""


def merge(records: Sequence[ProcessRecord]) -> MergedLogs:
    """Joins the records of all processes and consumes them."""
    _name_nodes(records)
    groups = _groups(records)
    nodes: dict[int, Mapping[int, str]] = {}
    for group in groups:
        places = {rank: records[one.process].node for rank, one in group.items()}
        nodes.update((id(one), places) for one in group.values())
    placing = LinkAssigner(nodes)
    for number, record in enumerate(records):
        placing.assign(number, record)
    unplaced = sum(link.channels.bit_count() for links in placing.orphans.values() for link in links)
    if not groups and placing.orphans:
        communicators, unplaced = (_unnamed(placing.orphans, records),), 0
    else:
        communicators = _communicators(groups, records)
    return MergedLogs(
        processes=tuple(_process(record) for record in records),
        communicators=communicators,
        truncated_lines=placing.unassigned,
        unassigned_links=unplaced,
    )


def _name_nodes(records: Sequence[ProcessRecord]) -> None:
    """A process is on the node of its source; on its host if that source gathers many nodes."""
    hosts: dict[str, set[str]] = defaultdict(set)
    for record in records:
        hosts[record.node].add(record.host)
    for record in records:
        if not record.node or len(hosts[record.node]) > 1:
            record.node = record.host


def _groups(records: Sequence[ProcessRecord]) -> list[_Group]:
    groups: dict[_Key, _Group] = {}
    # Where only their order tells communicators apart, ranks must come in order.
    for record in sorted(records, key=_sort_key):
        made: Counter[_Key] = Counter()
        pointers: dict[str, _Key] = {}
        for one in record.comms:
            if one.split:
                parent = pointers.get(one.parent)
                made["split", parent] += 1
                count, _, color = one.split.partition("/")
                key: _Key = ("split", parent, count or made["split", parent], color, one.size)
            elif one.id:
                key = ("id", one.id, one.size)
            else:
                made["order", one.size] += 1
                key = ("order", one.size, made["order", one.size])
            generation = 0
            while one.rank in groups.setdefault((*key, generation), {}):
                generation += 1
            key = (*key, generation)
            groups[key][one.rank] = one
            pointers[one.pointer] = key
    return list(groups.values())


def _sort_key(record: ProcessRecord) -> tuple[int, int]:
    """The largest communicator first, and its ranks in order."""
    size, rank = max(((one.size, -one.rank) for one in record.comms), default=(0, 0))
    return -size, -rank


def _communicators(groups: Iterable[_Group], records: Sequence[ProcessRecord]) -> tuple[Communicator, ...]:
    ordered = sorted(groups, key=lambda group: (-len(group), -next(iter(group.values())).size, min(group)))
    named: Counter[str] = Counter()
    world = {one.process: one.rank for one in reversed(ordered[0].values())} if ordered else {}
    everybody = {one.process for group in ordered for one in group.values()}
    replicas = _ReplicaNames.of(ordered, records)
    communicators: list[Communicator] = []
    for group in ordered:
        name = replicas.name(group) or _name(group, world, everybody, records)
        named[name] += 1
        communicators.append(_communicator(group, name if named[name] == 1 else f"{name} ({named[name]})", records))
    return tuple(communicators)


class _ReplicaNames(Struct, frozen=True, kw_only=True):
    """The replica and rank of each process; empty where logs do not distinguish several replicas."""

    replica_ranks: Mapping[int, tuple[int, int]]

    @staticmethod
    def of(groups: Sequence[_Group], records: Sequence[ProcessRecord]) -> _ReplicaNames:
        """By the largest communicator within each replica; `groups` are ordered with the largest first."""
        places: dict[int, tuple[int, int]] = {}
        for group in groups:
            within = {records[one.process].replica for one in group.values()}
            if len(within) == 1 and (replica := within.pop()) is not None:
                for one in group.values():
                    places.setdefault(one.process, (replica, one.rank))
        several = len({replica for replica, _ in places.values()}) > 1
        return _ReplicaNames(replica_ranks=places if several else {})

    def name(self, group: _Group) -> str:
        """`replica 1`, `replica 1, rank 0-3`, `across replicas 0-3, rank 5`; empty for all or unknown ranks."""
        if len(group) == len(self.replica_ranks) or any(
            one.process not in self.replica_ranks for one in group.values()
        ):
            return ""
        members = [self.replica_ranks[one.process] for one in group.values()]
        replicas = sorted({replica for replica, _ in members})
        ranks = format_numbers(sorted({rank for _, rank in members}))
        if len(replicas) > 1:
            return f"across replicas {format_numbers(replicas)}, rank {ranks}"
        whole = sum(1 for replica, _ in self.replica_ranks.values() if replica == replicas[0])
        return f"replica {replicas[0]}" + (f", rank {ranks}" if len(members) < whole else "")


def _communicator(group: _Group, name: str, records: Sequence[ProcessRecord]) -> Communicator:
    views = [group[rank] for rank in sorted(group)]
    links = tuple(link for one in views for link in one.links)
    for one in views:
        one.links.clear()
    return Communicator(
        name=name,
        id=next((one.id for one in views if one.id), ""),
        size=views[0].size,
        members=tuple(
            CommRank(
                rank=one.rank,
                process=one.process,
                pointer=one.pointer,
                device=one.device,
                nvml=one.nvml,
                bus=one.bus,
                complete=one.complete,
                evidence=one.evidence,
            )
            for one in views
        ),
        nodes=next((one.nodes for one in views if one.nodes), None),
        links=links,
        inferred=sum(one.inferred for one in views),
        failures={one.rank: tuple(sorted(records[one.process].failures)) for one in views if _may_fail(one, records)},
        connected=_connected(views),
    )


def _may_fail(one: CommInit, records: Sequence[ProcessRecord]) -> bool:
    """Whether its process has warned of a failure, and it is not connected: that may be meant."""
    return bool(records[one.process].failures) and not (one.complete and one.stages)


def _connected(views: Sequence[CommInit]) -> tuple[str, ...]:
    stages = {frozenset(one.stages) for one in views}
    if len(stages) > 1 or any(one.mixed for one in views):
        return ()
    return tuple(sorted(map(to_text, *stages)))


def _unnamed(orphans: Mapping[int, list[Link]], records: Sequence[ProcessRecord]) -> Communicator:
    """Without any set-up line: one communicator of all ranks that logged a connection."""
    group: _Group = {}
    for process, links in orphans.items():
        for link in links:
            one = group.setdefault(
                link.reported_by,
                CommInit(
                    process=process,
                    pointer="",
                    rank=link.reported_by,
                    size=0,
                    device=-1,
                    nvml=None,
                    bus="",
                    evidence=next(iter(records[process].evidence.values())),
                ),
            )
            one.links.append(link)
    return _communicator(group, "ranks of an unseen set-up", records)


def _name(group: _Group, world: Mapping[int, int], everybody: set[int], records: Sequence[ProcessRecord]) -> str:
    processes = {one.process for one in group.values()}
    if len(processes) == len(everybody):
        return f"all {len(group)} ranks"
    if all(process in world for process in processes) and len(world) == len(everybody):
        return f"ranks {format_numbers(sorted(world[process] for process in processes))}"
    nodes = sorted({records[process].node for process in processes})
    return f"{len(group)} ranks on {', '.join(nodes[:3])}{' …' if len(nodes) > 3 else ''}"


def format_numbers(numbers: Sequence[int]) -> str:
    """Ascending numbers in short form: `0-7`, `0, 8, …, 56`, `1, 4-6`."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 0
    if len(numbers) > 3 and step > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    runs: list[range] = []
    begin = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            runs.append(range(numbers[begin], numbers[index - 1] + 1))
            begin = index
    return format_ranges(runs)


def format_ranges(runs: Sequence[range]) -> str:
    """Runs of numbers in the same form."""
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(parts if len(parts) <= 8 else [*parts[:7], "…", parts[-1]])


def _process(record: ProcessRecord) -> NcclProcess:
    facts = record.facts
    return NcclProcess(
        node=record.node,
        host=record.host,
        pid=record.pid,
        replica=record.replica,
        nccl=facts.get("nccl", ""),
        cuda=facts.get("cuda", ""),
        driver=facts.get("driver", ""),
        network=facts.get("network", ""),
        plugin=facts.get("plugin", ""),
        hcas=record.hcas,
        interfaces=record.interfaces,
        bootstrap=facts.get("bootstrap", ""),
        path=facts.get("path", ""),
        nics=int(facts["nics"]) if "nics" in facts else None,
        env=record.env,
        evidence=record.evidence,
    )
