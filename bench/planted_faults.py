"""Bad nodes among good ones: each kind of fault planted on one of eight nodes, and clean nodes under load.

.venv/bin/python -m bench.planted_faults [--quick] [--part PART ...] [--kind NAME ...] [--forked] [--clean N]

It needs root. `planted` runs `holdfast check --nodes 8`: a controller and eight agents, each in a network namespace;
agent_hook/sitecustomize.py makes their nodes. `probes` runs the active probes in eight such namespaces. `clean` runs
the checks of eight nodes and their comparison in forked processes, without a controller, while other processes use all
cores. The kinds are rows of bench/planted/kinds.py and probes.py.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import load_gate, result_file
from bench.paired_stats import headline, say, table
from bench.planted.kinds import KINDS, Base, Kind
from bench.planted.nodes import NODES, Checked, check_by_command, check_forked, clean_up, machine_with_gpus, prepare
from bench.planted.probes import PROBE_KINDS, ProbeKind, probe
from bench.result_file import Figure, Result, today

PARTS = ("planted", "probes", "clean")
CLEAN, QUICK_CLEAN = 200, 12
QUICK_KINDS = 3
BUSY_PER_CORE = 2
ASKS_SWITCHES = {"rdma-links"}
"""Checks that cannot look at a recorded tree, which has no switches; tests/preflight/test_simulated_fabric.py has."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Whether a planted fault was found, and where."""

    kind: str
    planted: int
    found: tuple[int, ...]
    code: str
    stops: bool
    """Whether the start is refused; else the finding is a warning."""
    took_s: float
    others: tuple[str, ...] = ()
    """Findings of nodes without a fault."""

    @property
    def right(self) -> bool:
        return self.found == (self.planted,) and not self.others


def main() -> None:
    """Run the parts, and print a table of each."""
    parser = argparse.ArgumentParser(prog="bench.planted_faults", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")
    parser.add_argument("--kind", action="append", help="only this kind of fault")
    parser.add_argument("--forked", action="store_true", help="plant without a controller, in forked processes")
    parser.add_argument("--clean", type=int, default=CLEAN, help="runs on nodes without a fault")
    parser.add_argument("--seed", type=int, default=1, help="of the nodes that have the faults")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KINDS} kinds, {QUICK_CLEAN} clean runs")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"planted faults: {len(KINDS)} kinds for the checks, {len(PROBE_KINDS)} for the probes, {NODES} nodes")
    parts: Collection[str] = options.part or PARTS
    most = QUICK_KINDS if options.quick else None
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        work = Path(folder)
        if "planted" in parts:
            kinds = [each for each in KINDS if not options.kind or each.name in options.kind][:most]
            planted = _planted_forked if options.forked else _planted
            found.append(_located([*planted(work, kinds, options.seed)], "by the checks before the start"))
        if "probes" in parts:
            probes = [each for each in PROBE_KINDS if not options.kind or each.name in options.kind][:most]
            found.append(_located([*_probed(probes, options.seed)], "by the active probes"))
        if "clean" in parts:
            found.append(_clean(work, QUICK_CLEAN if options.quick else options.clean))
    result_file.save(options.json, "Planted faults", found)


def node_of(name: str, seed: int, first: int = 0) -> int:
    """The node that has a fault: any, by the seed and the fault's name."""
    return random.Random(f"{seed}/{name}").randrange(first, NODES)


def _planted(work: Path, kinds: list[Kind], seed: int) -> Iterator[Outcome]:
    with machine_with_gpus():
        for kind in kinds:
            node = node_of(kind.name, seed)
            checked = check_by_command(prepare(work, kind.base, kind, node))
            clean_up()
            yield _outcome(kind, node, checked)


def _planted_forked(work: Path, kinds: list[Kind], seed: int) -> Iterator[Outcome]:
    for kind in kinds:
        node = node_of(kind.name, seed)
        checked = check_forked(prepare(work, kind.base, kind, node))
        clean_up()
        yield _outcome(kind, node, checked)


def _outcome(kind: Kind, node: int, checked: Checked) -> Outcome:
    return _shown(
        Outcome(
            kind=kind.name,
            planted=node,
            found=checked.finds(kind),
            code=kind.code,
            stops=not checked.can_run,
            took_s=checked.took_s,
            others=tuple(f"node{each.node}: {each.what}" for each in checked.found if each.node != node),
        )
    )


def _probed(kinds: list[ProbeKind], seed: int) -> Iterator[Outcome]:
    for kind in kinds:
        node = node_of(kind.name, seed, first=1)  # node 0 has the store: without it the others name no node
        probed = probe(kind, node)
        named = {each for suspect in probed.result.suspects for each in suspect.nodes}
        yield _shown(
            Outcome(
                kind=kind.name,
                planted=node,
                found=probed.finds(kind),
                code=f"stage {kind.stage}",
                stops=bool(probed.result.suspects),
                took_s=probed.took_s,
                others=tuple(f"node{each}" for each in sorted(named - {node})),
            )
        )


def _shown(outcome: Outcome) -> Outcome:
    nodes = ", ".join(map(str, outcome.found)) or "none"
    verdict = "right" if outcome.right else "WRONG"
    say(
        f"{outcome.kind:26} planted on node {outcome.planted}, found on {nodes} ({outcome.code}) "
        f"{'stops' if outcome.stops else 'warns'} {outcome.took_s:.1f} s: {verdict}"
    )
    for other in outcome.others:
        say(f"  false alarm on {other}")
    return outcome


def _located(outcomes: list[Outcome], by: str) -> Result:
    right = sum(each.right for each in outcomes)
    rows = [
        (
            each.kind,
            str(each.planted),
            ", ".join(map(str, each.found)),
            each.code,
            "stops the start" if each.stops else "warns",
            f"{each.took_s:.1f} s",
            "yes" if each.right else "no",
        )
        for each in outcomes
    ]
    say("")
    say(table(("fault", "planted on node", "found on node", "code", "effect", "took", "right"), rows))
    say(f"\n{right} of {len(outcomes)} found on the right node, {by}\n")
    return Result(
        claim=f"planted faults, each on one of {NODES} nodes: found on the right one {by}",
        command=result_file.command(),
        date=today(),
        figure=Figure(value=right, unit=f"of {len(outcomes)} kinds"),
        goal="all",
        met="yes" if right == len(outcomes) else "no",
        conditions=f"{NODES} nodes in network namespaces of one machine",
        details={
            each.kind: f"node {each.planted}: {', '.join(map(str, each.found)) or 'not found'}, {each.code}, "
            f"{'stops' if each.stops else 'warns'}, {each.took_s:.1f} s"
            for each in outcomes
        },
    )


@contextmanager
def busy_cores() -> Iterator[int]:
    """Keep all cores busy; yields the number of processes."""
    count = BUSY_PER_CORE * load_gate.CORES
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield count
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _clean(work: Path, runs: int) -> Result:
    """Checks of nodes without a fault, of each base in turn."""
    ready = {base: prepare(work / base.value, base) for base in Base}
    checked: list[Checked] = []
    began = time.monotonic()
    with busy_cores() as busy:
        for base in itertools.islice(itertools.cycle(Base), runs):
            checked.append(check_forked(ready[base]))
            for each in checked[-1].found:
                say(f"false alarm on {base.value}: {each}")
    alarms = sum(bool(each.found) for each in checked)
    blind = Counter(name for each in checked for name in each.not_looked_at)
    spent_s = sorted(each.spent_s for each in checked)
    say(
        f"{alarms} of {runs} clean runs with a finding; checks that could not look: {dict(blind) or 'none'}; checks of "
        f"the slowest node: median {median(spent_s):.2f} s, most {spent_s[-1]:.2f} s; {time.monotonic() - began:.0f} s"
    )
    return Result(
        claim=f"clean checks of {NODES} nodes with all cores busy: runs with a finding",
        command=result_file.command(),
        date=today(),
        figure=Figure(value=alarms, unit=f"of {runs} runs"),
        goal="0",
        met="no" if alarms or blind.keys() - ASKS_SWITCHES else "yes",
        conditions=f"{busy} busy processes on {load_gate.CORES} cores; a third of the runs each on the machine as it "
        "is, on trees of H100 nodes with InfiniBand, and with RoCE",
        details={
            "checks of the slowest node, median": f"{median(spent_s):.2f} s",
            "checks of the slowest node, longest": f"{spent_s[-1]:.2f} s",
            "checks that could not look": str(dict(blind) or "none"),
        },
    )


if __name__ == "__main__":
    main()
