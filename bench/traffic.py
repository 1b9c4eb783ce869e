"""Bytes that ranks send each other per step: predicted by `holdfast.plan.traffic`, and counted by the kernel.

.venv/bin/python -m bench.traffic [--only NAME ...] [--json FILE]

Each rank of a small decoder trains in its own network namespace, with Gloo. The kernel counts the bytes of each
TCP connection (sock_diag) without headers, which gives those of each pair of ranks. The interface's own counters check
them: less 66 bytes of headers per packet (Ethernet 14, IP 20, TCP 32) they show the same, and what was sent again.
Needs root.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from bench import result_file
from bench.paired_stats import headline, say, table
from bench.result_file import Figure, Result, today
from bench.traffic_ranks import CONFIG, LENGTH, Counters, read_counters, step_of
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsNetwork, NetnsNode, namespace
from holdfast.plan.collectives import Library
from holdfast.plan.layout import Layout, Sharding
from holdfast.plan.traffic import Step, rank_traffic
from holdfast.plan.transformer import Transformer, from_config

WARM_UP, STEPS = 2, 3
BATCH = 16
GOAL = 0.03
HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with timestamps; Linux counts a packet that the interface will split as one."""
PORT = 29500
"""Of the store: in its own namespace, so that it is free."""
SETTLE_S, RANK_S = 10.0, 300.0
_forks = multiprocessing.get_context("fork")

Link = tuple[int, int]
"""The sender's and the receiver's rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout to measure."""

    name: str
    layout: Layout
    shards: int = 1
    """Ranks that HSDP shards over."""
    gradient_bytes: int = 4

    def predicted(self) -> dict[Link, float]:
        """Bytes per step of each link."""
        step = Step(
            model=model(),
            layout=self.layout,
            batch=BATCH,
            length=LENGTH,
            gradient_bytes=self.gradient_bytes,
            domain=self.shards,
            library=Library.GLOO,
        )
        links: dict[Link, float] = {}
        for rank in range(self.layout.gpus):
            for message in rank_traffic(step, rank):
                links[rank, message.peer] = links.get((rank, message.peer), 0.0) + message.sent_bytes
        return links


def _case(name: str, layout: Layout, **more: int) -> Case:
    return Case(name=f"{name}, {layout.gpus} ranks", layout=layout, **more)


_WHOLE = {ranks: BATCH // ranks for ranks in (2, 4, 8)}
CASES = (
    *(_case("DDP", Layout(dp=n, micro_batch=size, sharding=Sharding.DDP)) for n, size in _WHOLE.items()),
    *(_case("FSDP2", Layout(dp=n, micro_batch=size, sharding=Sharding.FSDP)) for n, size in _WHOLE.items()),
    _case("FSDP2, two micro-batches", Layout(dp=2, micro_batch=4, sharding=Sharding.FSDP)),
    _case("HSDP 2 x 2", Layout(dp=4, micro_batch=4, sharding=Sharding.HSDP), shards=2),
    _case("HSDP 2 x 4", Layout(dp=8, micro_batch=2, sharding=Sharding.HSDP), shards=4),
    *(_case("TP", Layout(tp=n, micro_batch=BATCH)) for n in (2, 4, 8)),
    *(_case("PP", Layout(pp=n, micro_batch=2)) for n in (2, 4, 8)),
    _case("TP 2, FSDP2 2", Layout(tp=2, dp=2, micro_batch=8, sharding=Sharding.FSDP)),
)


def model() -> Transformer:
    """The decoder as the planner sees it."""
    found = from_config(CONFIG, "decoder")
    assert found is not None
    return found


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A layout's bytes per step, predicted and measured."""

    case: Case
    predicted: Mapping[Link, float]
    measured: Mapping[Link, float]
    wire: Mapping[int, float]
    """Bytes that each rank's interface sent, less headers."""
    headers: float
    """Share of headers in all that the interfaces sent."""

    @property
    def rank_error(self) -> float:
        """Largest of all ranks, with everything that a rank sent."""
        ranks = range(self.case.layout.gpus)
        return max(abs(_of(self.measured, rank) / _of(self.predicted, rank) - 1) for rank in ranks)

    @property
    def link_error(self) -> float:
        """Largest of all links that are predicted to carry anything."""
        return max(abs(self.measured.get(link, 0.0) / sent - 1) for link, sent in self.predicted.items())

    @property
    def stray(self) -> float:
        """Share of bytes on links that are predicted to carry nothing."""
        elsewhere = sum(sent for link, sent in self.measured.items() if link not in self.predicted)
        return elsewhere / sum(self.measured.values())

    @property
    def wire_error(self) -> float:
        """Largest difference of all ranks between the interface's counters and those of the connections."""
        return max(abs(sent / _of(self.measured, rank) - 1) for rank, sent in self.wire.items())

    @property
    def largest(self) -> float:
        return max(self.rank_error, self.link_error)

    @property
    def row(self) -> tuple[str, ...]:
        busiest = max(range(self.case.layout.gpus), key=lambda rank: _of(self.predicted, rank))
        bytes_ = (_of(self.predicted, busiest), _of(self.measured, busiest))
        shares = (self.rank_error, self.link_error, self.stray, self.headers, self.wire_error)
        return (self.case.name, *(f"{each / 1e6:.3f}" for each in bytes_), *(f"{share:.2%}" for share in shares))


def _of(links: Mapping[Link, float], rank: int) -> float:
    return sum(sent for (sender, _), sent in links.items() if sender == rank)


HEADINGS = ("layout", "MB predicted", "MB measured", "rank error", "link error", "elsewhere", "headers", "interface")


def main() -> int:
    """Measure all layouts, print them, and return whether one misses the goal."""
    parser = argparse.ArgumentParser(
        prog="bench.traffic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="layouts whose name begins so")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if reason := netns.unavailable() or ("" if namespace.privileged() else "needs root"):
        parser.error(reason)
    headline("bytes per step of each rank and link, predicted and counted by the kernel")
    chosen = [case for case in CASES if not options.only or case.name.startswith(tuple(options.only))]
    outcomes = [measure(case) for case in chosen]
    say(table(HEADINGS, [each.row for each in outcomes]))
    result_file.save(options.json, "Traffic of layouts", [summary(outcomes)])
    return int(any(each.largest > GOAL for each in outcomes))


def summary(outcomes: Sequence[Outcome]) -> Result:
    """The result of all layouts."""
    worst = max(each.largest for each in outcomes)
    return Result(
        claim="bytes per step of each rank and link: largest error of the prediction",
        command="python -m bench.traffic",
        date=today(),
        figure=Figure(value=100 * worst, unit="%", decimals=2),
        goal=f"≤ {100 * GOAL:g} %",
        met="yes" if worst <= GOAL else "no",
        conditions=f"{len(outcomes)} layouts of 2 to 8 ranks, Gloo, a network namespace per rank, {STEPS} steps each",
        details={
            each.case.name: f"{each.rank_error:.2%} of a rank, {each.link_error:.2%} of a link" for each in outcomes
        }
        | {
            "elsewhere, most": f"{max(each.stray for each in outcomes):.2%}",
            "headers, most": f"{max(each.headers for each in outcomes):.2%}",
            "connections and interface differ by at most": f"{max(each.wire_error for each in outcomes):.3%}",
        },
    )


def measure(case: Case) -> Outcome:
    """Train in a layout, and count."""
    with _nodes(case.layout.gpus) as nodes, _started(case, nodes) as channels:
        addresses = [node.address for node in nodes]
        before = _settled(channels, addresses)
        _ask(channels, STEPS)
        after = _settled(channels, addresses)
    links: dict[Link, float] = {}
    wire: dict[int, float] = {}
    headers = total = 0.0
    for rank, (first, last) in enumerate(zip(before, after, strict=True)):
        for peer, address in enumerate(addresses):
            new = last.acked.get(address, 0) - first.acked.get(address, 0)
            if new and peer != rank:
                links[rank, peer] = new / STEPS
        packets, sent = last.wire_packets - first.wire_packets, last.wire_bytes - first.wire_bytes
        wire[rank] = (sent - HEADER_BYTES * packets) / STEPS
        headers += HEADER_BYTES * packets
        total += sent
    return Outcome(case=case, predicted=case.predicted(), measured=links, wire=wire, headers=headers / total)


def _settled(channels: Sequence[Connection], addresses: Sequence[str]) -> list[Counters]:
    """The counters of all ranks, once each has received what the others sent."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        counters: list[Counters] = _ask(channels, 0)
        under_way = [
            (rank, peer)
            for rank, peer in permutations(range(len(addresses)), 2)
            if not _has_arrived(counters[rank], addresses[peer], counters[peer], addresses[rank])
        ]
        if not under_way:
            return counters
        if time.monotonic() > deadline:
            raise RuntimeError(f"bytes between ranks {under_way} are still on their way after {SETTLE_S:g} s")


def _has_arrived(sender: Counters, to: str, receiver: Counters, origin: str) -> bool:
    """Whether all that was sent was received; who opens a connection counts one byte more, the SYN."""
    return 0 <= sender.acked.get(to, 0) - receiver.received.get(origin, 0) <= sender.connections.get(to, 0)


def _ask(channels: Iterable[Connection], steps: int) -> list[Counters]:
    """Have all ranks run so many steps, and return their counters."""
    for channel in channels:
        channel.send(steps)
    answers = []
    for channel in channels:
        if not channel.poll(RANK_S):
            raise RuntimeError(f"a rank did not finish its steps within {RANK_S:g} s")
        answers.append(channel.recv())
    return answers


@contextmanager
def _nodes(number: int) -> Generator[list[NetnsNode]]:
    tag = f"tr{os.getpid()}"
    network = NetnsNetwork.create(tag)
    try:
        yield [network.add_node(f"node{each}") for each in range(number)]
    finally:
        netns.remove(tag)


@contextmanager
def _started(case: Case, nodes: Sequence[NetnsNode]) -> Generator[list[Connection]]:
    """The ranks, warm, as forks of this process; each answers a number of steps with its counters after them."""
    pairs = [_forks.Pipe() for _ in nodes]
    ranks = [_forks.Process(target=_rank, args=(case, nodes, each, pairs[each][1])) for each in range(len(nodes))]
    for each in ranks:
        each.start()
    try:
        channels = [own for own, _ in pairs]
        for _, theirs in pairs:
            theirs.close()
        _ask(channels, WARM_UP)
        yield channels
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _rank(case: Case, nodes: Sequence[NetnsNode], rank: int, channel: Connection) -> None:
    network = next(word.removeprefix("--net=") for word in nodes[rank].prefix if "--net=" in word)
    namespace.join(Path(network), namespace.NEW_NET)
    own = {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(PORT), "RANK": str(rank), "WORLD_SIZE": str(len(nodes))}
    os.environ.update(own, GLOO_SOCKET_IFNAME="eth0")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = step_of(case.layout, rank, batch=BATCH, shards=case.shards)
    while True:
        for _ in range(channel.recv()):
            run()
        channel.send(read_counters())


if __name__ == "__main__":
    sys.exit(main())
