"""A slow node or pair of nodes among 8: whether the pairwise rounds of `holdfast.train.probe` locate it.

.venv/bin/python -m bench.probe_location [--quick | --runs N] [--seed N] [--from RUN] [--json FILE]

Each run has 8 nodes in network namespaces, with links of 100 Mbit/s that the kernel shapes, and one rank on each. In
turn a node, or the connection of two nodes, gets 10 to 40 % of that; the seed chooses which. The pair is one of those
that the rounds measure: they are 16 of 28, and nothing measures the others. A run counts if the probe names exactly
this node or pair. The rounds needed are the fewest whose measurements name it. It needs root, and the kernel's tbf and
htb. Gloo carries the traffic, on CPUs that all ranks share.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import result_file
from bench.paired_stats import headline, say
from bench.probe_ranks import run_ranks
from bench.result_file import Figure, Result, today
from holdfast.events.probe_results import Located, PairRate, ProbeResult
from holdfast.launch.local import netns
from holdfast.launch.local.netns import NetnsInterface, NetnsNetwork, NetnsNode, ip_command, namespace
from holdfast.train.probe import matmul
from holdfast.train.probe.pairing import Gates, Pair, locate, pair_rounds

NODES = 8
RUNS, QUICK_RUNS = 20, 2
MBIT = 100
SLOW_SHARES = (0.1, 0.4)
DEADLINE_S = 60.0
MOST_ROUNDS = 4
PORT = 29500
"""Of the store: in its own namespace, so that it is free."""
ARGUMENTS = ("--backend=gloo", "--burn-in-s=0.01", "--most-bytes=2097152")
COPY_BYTES = 1 << 20
"""Of the memory probe, which is not what this measures."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """What is slow in a run."""

    nodes: tuple[int, ...]
    """One, or the two ends of a connection."""
    mbit: int

    def __str__(self) -> str:
        return f"{'node' if len(self.nodes) == 1 else 'pair'} {'-'.join(map(str, self.nodes))} at {self.mbit} Mbit/s"

    @property
    def located(self) -> Located:
        """What the probe has to say."""
        return Located(nodes=self.nodes) if len(self.nodes) == 1 else Located(pairs=((self.nodes[0], self.nodes[1]),))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the probe said."""

    slow: Slow
    found: bool
    false_suspects: int
    rounds: int | None
    """The fewest that name it; None if all of them do not."""
    elapsed_s: float
    said: str


def main() -> None:
    """Run the probes, and print a line for each run."""
    parser = argparse.ArgumentParser(
        prog="bench.probe_location", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_RUNS} runs")
    parser.add_argument("--from", dest="first", type=int, default=0, help="skip the runs before this one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if reason := "" if namespace.privileged() else "needs root":
        parser.error(reason)
    if reason := netns.rates_unavailable():
        parser.error(reason)
    headline(f"a slow node or pair among {NODES}: located by the pairwise rounds")
    planned = plan(options.seed, QUICK_RUNS if options.quick else options.runs)
    outcomes: list[Outcome] = []
    for number, slow in list(enumerate(planned))[options.first :]:
        outcomes.append(outcome := _run(slow))
        rounds = "-" if outcome.rounds is None else outcome.rounds
        say(
            f"{number + 1:3d}/{len(planned)}  {slow}: {'located' if outcome.found else 'MISSED'}, rounds {rounds}, "
            f"false suspects {outcome.false_suspects}, {outcome.elapsed_s:.1f} s{'' if outcome.found else outcome.said}"
        )
    result = summary(outcomes)
    say(f"\nlocated {result.figure}; " + ", ".join(f"{k}: {v}" for k, v in result.details.items()))
    result_file.save(options.json, "Location of slow nodes and links", [result])


def plan(seed: int, runs: int) -> list[Slow]:
    """What is slow in each run: in turn a node, and a pair that the rounds measure."""
    draw = random.Random(seed)
    pairs = [pair for round_ in pair_rounds(NODES) for pair in round_]
    return [
        Slow(
            nodes=draw.choice(pairs) if number % 2 else (draw.randrange(NODES),),
            mbit=round(MBIT * draw.uniform(*SLOW_SHARES)),
        )
        for number in range(runs)
    ]


def summary(outcomes: Sequence[Outcome]) -> Result:
    """The result of all runs."""
    found, rounds = sum(each.found for each in outcomes), [each.rounds for each in outcomes if each.rounds]
    good = found == len(outcomes) and all(each <= MOST_ROUNDS for each in rounds)
    return Result(
        claim="slow node or pair among 8: located",
        command="python -m bench.probe_location",
        date=today(),
        figure=Figure(value=found, unit=f"of {len(outcomes)}"),
        goal=f"{len(outcomes)} in {MOST_ROUNDS} rounds",
        met="yes" if good else "no",
        conditions=f"{NODES} network namespaces, Gloo, links of {MBIT} Mbit/s",
        details={
            "rounds needed, median": f"{statistics.median(rounds):g}" if rounds else "-",
            "rounds needed, most": str(max(rounds, default="-")),
            "false suspects": str(sum(each.false_suspects for each in outcomes)),
            "seconds of a run, most": f"{max(each.elapsed_s for each in outcomes):.1f}",
        },
        headline=True,
    )


def outcome_of(slow: Slow, result: ProbeResult, elapsed_s: float) -> Outcome:
    """Compare what the probe said with what was slow."""
    suspects = [each.nodes for each in result.suspects]
    said = "; ".join(f"{each.stage} {each.nodes}: {', '.join(each.evidence)}" for each in result.suspects)
    return Outcome(
        slow=slow,
        found=suspects == [slow.nodes],
        false_suspects=sum(each != slow.nodes for each in suspects),
        rounds=rounds_needed(slow, result.pairs),
        elapsed_s=elapsed_s,
        said=f"\n      {result.outcome}: {said or result.problem or 'no suspect'}\n      "
        + ", ".join(f"{one}-{two} {rate:.4f}" for (one, two), rate in _rates(result.pairs).items()),
    )


def rounds_needed(slow: Slow, rates: Sequence[PairRate]) -> int | None:
    """The fewest rounds whose measurements name what is slow, and nothing else."""
    rounds = pair_rounds(NODES)
    for number in range(1, len(rounds) + 1):
        measured: set[Pair] = {pair for round_ in rounds[:number] for pair in round_}
        if locate([each for each in rates if each.nodes in measured], Gates()) == slow.located:
            return number
    return None


def _rates(pairs: Sequence[PairRate]) -> dict[Pair, float]:
    return {each.nodes: each.gb_s or 0.0 for each in pairs}


def _run(slow: Slow) -> Outcome:
    with _nodes() as nodes, tempfile.TemporaryDirectory() as folder:
        _slow_down(nodes, slow)
        began = time.monotonic()
        result = run_ranks(
            ARGUMENTS,
            nodes=NODES,
            ranks_per_node=1,
            master=(nodes[0].address, PORT),
            folder=Path(folder),
            deadline_s=DEADLINE_S,
            prepare=lambda rank: _enter(nodes[rank]),
        )
        return outcome_of(slow, result, time.monotonic() - began)


@contextmanager
def _nodes() -> Generator[list[NetnsNode]]:
    tag = f"loc{os.getpid()}"
    network = NetnsNetwork.create(tag, interfaces=(NetnsInterface(mbit=MBIT),))
    try:
        yield [network.add_node(f"node{each}") for each in range(NODES)]
    finally:
        netns.remove(tag)


def _slow_down(nodes: Sequence[NetnsNode], slow: Slow) -> None:
    """Shape what the node sends to all, or what the two nodes send to one another."""
    if len(slow.nodes) == 1:
        shaped = f"qdisc replace dev eth0 root tbf rate {slow.mbit}mbit burst 128kb latency 50ms"
        ip_command.tc(shaped, inside=nodes[slow.nodes[0]].prefix)
        return
    for own, other in (slow.nodes, slow.nodes[::-1]):
        ip_command.tc(
            "qdisc replace dev eth0 root handle 1: htb default 10",
            f"class add dev eth0 parent 1: classid 1:10 htb rate {MBIT}mbit burst 128kb",
            f"class add dev eth0 parent 1: classid 1:20 htb rate {slow.mbit}mbit burst 128kb",
            f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {nodes[other].address}/32 flowid 1:20",
            inside=nodes[own].prefix,
        )


def _enter(node: NetnsNode) -> None:
    """Move this process into the node's network."""
    network = next(word.removeprefix("--net=") for word in node.prefix if "--net=" in word)
    namespace.join(Path(network), namespace.NEW_NET)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    matmul.COPY_BYTES["cpu"] = COPY_BYTES


if __name__ == "__main__":
    main()
