"""Random gangs with a placement, before the real Kueue: whether their nodes are close, and why others wait.

.venv/bin/python -m bench.topology_gangs [--gangs 200] [--seed N] [--json FILE]

A control plane of the lab gets 64 pretended machines: two zones, each with a block of racks of 4, 4 and 8, and one
whose only rack has 16. Gangs of 2 to 16 nodes come one after the other, with a placement of `rack`, `block` or `zone`,
some in slices; earlier ones leave at random. Of each gang that is admitted: all nodes are in one domain, the smallest
that had room (best fit), and a ring of the nodes by number leaves racks, blocks and zones as often as in the order
that the planner gives for the free machines of that domain. Of each that waits: no domain has room, and that is its
reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tests.launch.kubernetes.golden_cases import Case, render_context

from bench import result_file
from bench.paired_stats import headline, say, table
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain
from holdfast.launch.kubernetes.pending_reason.collect_pending import read_run
from holdfast.launch.kubernetes.pending_reason.pending_rules import find_pending_reason
from holdfast.plan.layout import Layout
from holdfast.plan.rank_layout import RankGrid, crossing, ordered_nodes, topology
from lab import Lab

LEVELS = {level: f"example.com/{level}" for level in ("zone", "block", "rack")}
"""The label of each level, highest level first."""
ZONES = (((4, 4, 8), (16,)),) * 2
"""The sizes of the racks of each block of each zone."""
TOO_FULL = "topology-too-full"
RING = {"dp": 1.0}
"""What a rank sends: to its neighbour in the ring of all."""
WITHIN_S = 60.0
KUEUE = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {name: NAME}
spec: {levels: [LEVELS, {nodeLabel: kubernetes.io/hostname}]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: NAME}
spec: {nodeLabels: {for: NAME}, topologyName: NAME}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: NAME}
spec:
  namespaceSelector: {}
  queueingStrategy: BestEffortFIFO
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors: [{name: NAME, resources: [{name: nvidia.com/gpu, nominalQuota: 10000}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: train, namespace: NAME}
spec: {clusterQueue: NAME}
"""


@dataclass(frozen=True)
class Machine:
    """A pretended machine, in the order of the topology."""

    name: str
    zone: str
    block: str
    rack: str

    @property
    def domains(self) -> dict[str, str]:
        """Its domain of each level."""
        return {level: getattr(self, level) for level in LEVELS}


@dataclass(frozen=True)
class Gang:
    """A run to place."""

    name: str
    nodes: int
    level: str
    slice_nodes: int = 0
    """Nodes of each slice, which is within a rack; 0: none."""


@dataclass
class Cluster:
    """The machines, and which gang has them."""

    lab: Lab
    namespace: str
    zones: tuple[tuple[tuple[int, ...], ...], ...] = ZONES
    machines: list[Machine] = field(default_factory=list[Machine])
    taken: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By gang, its machines by number of the node."""

    def make(self) -> None:
        """Create the namespace's machines and queue."""
        for zone_number, blocks in enumerate(self.zones):
            zone = f"{self.namespace}-z{zone_number}"
            for block_number, racks in enumerate(blocks):
                block = f"{zone}-b{block_number}"
                for rack_number, hosts in enumerate(racks):
                    rack = f"{block}-r{rack_number}"
                    self.machines += (Machine(f"{rack}-h{host:02}", zone, block, rack) for host in range(hosts))
        size = {"cpu": "64", "memory": "64Gi", "pods": "20", "nvidia.com/gpu": "8"}
        nodes = [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": each.name,
                    "labels": {
                        "type": "kwok",
                        "for": self.namespace,
                        **{LEVELS[level]: domain for level, domain in each.domains.items()},
                        "kubernetes.io/hostname": each.name,
                    },
                },
                "status": {"allocatable": size, "capacity": size},
            }
            for each in self.machines
        ]
        self.lab.kubectl("create", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes}))
        levels = ", ".join(f"{{nodeLabel: {label}}}" for label in LEVELS.values())
        words = KUEUE.replace("NAME", self.namespace).replace("LEVELS", levels)
        self.lab.kubectl("create", "-f", "-", input=words)
        self.lab.kubectl(
            "wait", f"clusterqueue/{self.namespace}", "--for=condition=Active", f"--timeout={WITHIN_S:.0f}s"
        )

    def remove(self) -> None:
        """Delete what is not in the namespace."""
        self.lab.kubectl("delete", "nodes", "-l", f"for={self.namespace}", "--wait=false")
        for kind in ("clusterqueue", "resourceflavor", "topology"):
            self.lab.kubectl("delete", kind, self.namespace, "--wait=false")

    def free(self) -> list[Machine]:
        """The machines that no gang has."""
        busy = {name for names in self.taken.values() for name in names}
        return [each for each in self.machines if each.name not in busy]

    def free_in(self, level: str) -> dict[str, int]:
        """By domain of a level, the number of its free machines."""
        free = dict.fromkeys((each.domains[level] for each in self.machines), 0)
        for each in self.free():
            free[each.domains[level]] += 1
        return free

    def room_for(self, gang: Gang) -> dict[str, int]:
        """By domain with room for a gang, its free machines."""
        if not gang.slice_nodes:
            return {name: free for name, free in self.free_in(gang.level).items() if free >= gang.nodes}
        slices = dict.fromkeys((each.domains[gang.level] for each in self.machines), 0)
        domain = {each.rack: each.domains[gang.level] for each in self.machines}
        for rack, free in self.free_in("rack").items():
            slices[domain[rack]] += free // gang.slice_nodes
        free = self.free_in(gang.level)
        return {name: free[name] for name, count in slices.items() if count * gang.slice_nodes >= gang.nodes}

    def submit(self, gang: Gang) -> None:
        """Create a gang's owner object, as a run has it."""
        placement: dict[str, Any] = {"level": gang.level}
        if gang.slice_nodes:
            placement["slices"] = {"level": "rack", "nodes": gang.slice_nodes}
        job = {"name": gang.name, "nodes": gang.nodes, "resources": {}, "secrets": {}, "placement": placement}
        job["launch"] = "per-node"
        target = {
            "agent": not gang.slice_nodes,
            "namespace": self.namespace,
            "volume": None,
            "node_selector": {"for": self.namespace},
            "topology_levels": LEVELS,
        }
        self.lab.kubectl("create", "-f", "-", input=json.dumps(_owner(job, target)))

    def placed(self, gang: Gang) -> list[str]:
        """The machines of a gang's nodes by number; empty before all are placed."""
        which = (
            "pods",
            "-n",
            self.namespace,
            "-l",
            f"holdfast/run={gang.name}-000000,holdfast/part=node",
            "-o",
            "json",
        )
        found: dict[int, str] = {}
        for pod in json.loads(self.lab.kubectl("get", *which))["items"]:
            if machine := pod["spec"].get("nodeName"):
                labels = pod["metadata"]["labels"]
                index = (
                    "batch.kubernetes.io/job-completion-index" if gang.slice_nodes else "jobset.sigs.k8s.io/job-index"
                )
                found[int(labels[index])] = machine
        return [found[number] for number in range(gang.nodes)] if len(found) == gang.nodes else []

    def reason(self, gang: Gang) -> str:
        """The code of the reason for which a gang waits; empty if none is known."""
        path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{{namespace}}/jobsets/{gang.name}-000000"
        finding = find_pending_reason(asyncio.run(read_run(ClusterClient(namespace=self.namespace), path)))
        return "" if finding is None else finding.code

    def leave(self, name: str) -> None:
        """Delete a gang, and wait until its machines are free."""
        self.lab.kubectl("delete", "jobset", f"{name}-000000", "-n", self.namespace, "--cascade=foreground")
        _until(lambda: not self._has_pods(name), f"{name} is gone")
        self.taken.pop(name, None)

    def _has_pods(self, name: str) -> bool:
        which = ("pods", "-n", self.namespace, "-l", f"holdfast/run={name}-000000", "-o", "name")
        return bool(self.lab.kubectl("get", *which).strip())


def _owner(job: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    return to_plain(render(render_context(Case(job=job, target=target))).owner)


def _until(seen: Callable[[], object], what: str) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (found := seen()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(0.1)
    return found


@dataclass(frozen=True)
class Outcome:
    """What happened to a gang."""

    waited: bool
    problems: tuple[str, ...]


def place(cluster: Cluster, gang: Gang) -> Outcome:
    """Submit a gang and judge what Kueue does; one that waits is withdrawn."""
    room, free = cluster.room_for(gang), cluster.free()
    cluster.submit(gang)
    if not room:
        try:
            # A JobSet that Kueue has not seen yet has another reason.
            code = _until(lambda: cluster.reason(gang) == TOO_FULL and TOO_FULL, f"{gang} waits for a {gang.level}")
        except TimeoutError as late:
            code = f"{cluster.reason(gang)}; {late}"
        placed = cluster.placed(gang)
        cluster.leave(gang.name)
        problems = [f"placed on {placed}, where no {gang.level} has room"] if placed else []
        return Outcome(True, (*problems, *([] if code == TOO_FULL else [f"its reason is {code}"])))
    try:
        names = _until(lambda: cluster.placed(gang), f"{gang} is placed, with room in {room}")
    except TimeoutError as late:
        reason = cluster.reason(gang)
        cluster.leave(gang.name)
        return Outcome(False, (str(late), f"its reason is {reason}"))
    cluster.taken[gang.name] = names
    return Outcome(False, tuple(_problems(gang, room, free, names)))


def _problems(gang: Gang, room: Mapping[str, int], free: Sequence[Machine], names: list[str]) -> list[str]:
    by_name = {each.name: each for each in free}
    chosen = [by_name[name] for name in names]
    domains = {each.domains[gang.level] for each in chosen}
    problems: list[str] = []
    if len(domains) != 1:
        problems.append(f"spread over {sorted(domains)}")
    elif not gang.slice_nodes and room[(domain := next(iter(domains)))] > min(room.values()):
        problems.append(f"{domain} had room for {room[domain]}, and there was one for {min(room.values())}")
    if gang.slice_nodes:
        for first in range(0, gang.nodes, gang.slice_nodes):
            if len({each.rack for each in chosen[first : first + gang.slice_nodes]}) != 1:
                problems.append(f"slice at node {first} is in several racks")
    inside = [each for each in free if each.domains[gang.level] in domains]
    problems += _unlike_the_plan(inside if not gang.slice_nodes else chosen, chosen)
    return problems


def _unlike_the_plan(free: Sequence[Machine], chosen: Sequence[Machine]) -> list[str]:
    """Where a ring of all nodes leaves domains more or less often than in the planner's order of free machines."""
    tree = topology({each.name: each.domains for each in free}, tuple(LEVELS))
    grid = RankGrid(layout=Layout(dp=len(chosen)), per_node=1)
    planned, numbers = ordered_nodes(tree, grid, RING), [tree.nodes.index(each.name) for each in chosen]
    assert planned is not None
    wanted, found = (crossing(tree, order, grid, RING) for order in (planned, numbers))
    return [
        f"numbers leave a {level} {found[level]:g} times and {wanted[level]:g} by the plan"
        for level in LEVELS
        if found[level] != wanted[level]
    ]


def main() -> int:
    """Place gangs, and print what was wrong."""
    parser = argparse.ArgumentParser(prog="bench.topology_gangs", description=__doc__)
    parser.add_argument("--gangs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(
        f"{options.gangs} gangs with a placement on {sum(map(sum, chain.from_iterable(ZONES)))} machines, real Kueue"
    )
    chance = random.Random(options.seed)
    outcomes: list[Outcome] = []
    with _cluster() as cluster:
        for number in range(options.gangs):
            while cluster.taken and chance.random() < 0.45:
                cluster.leave(chance.choice(sorted(cluster.taken)))
            gang = random_gang(chance, f"g{number}")
            outcome = place(cluster, gang)
            outcomes.append(outcome)
            for problem in outcome.problems:
                say(f"{gang}: {problem}")
    waited = [each for each in outcomes if each.waited]
    placed = [each for each in outcomes if not each.waited]
    rows = [
        (name, f"{sum(not each.problems for each in those)} of {len(those)}")
        for name, those in (("placed as asked", placed), ("wait with the right reason", waited))
    ]
    say(table(("gangs", "right"), rows))
    wrong = sum(bool(each.problems) for each in outcomes)
    claim = f"of {len(outcomes)} gangs with a placement, those spread too far or waiting without the reason"
    result_file.save(
        options.json, "Topology-aware placement", [result_file.absolute(claim, wrong, "gangs", goal=0, decimals=0)]
    )
    return 1 if wrong else 0


@contextlib.contextmanager
def _cluster() -> Generator[Cluster]:
    """The machines on a control plane of their own."""
    with tempfile.TemporaryDirectory(prefix="topology-") as folder:
        lab = Lab(Path(folder) / "lab")
        os.environ["KUBECONFIG"] = str(lab.kubeconfig)
        lab.up(dies_with_parent=True)
        try:
            lab.kubectl("create", "namespace", "gangs")
            cluster = Cluster(lab, "gangs")
            cluster.make()
            yield cluster
        finally:
            lab.down()


def random_gang(chance: random.Random, name: str) -> Gang:
    """A gang of a random size and placement."""
    level = chance.choice(("rack", "rack", "block", "zone"))
    nodes = chance.choice((2, 3, 4, 6, 8, 12, 16))
    slice_nodes = chance.choice((0, 2, 4)) if level != "rack" else 0
    return Gang(name, nodes, level, slice_nodes if slice_nodes and nodes % slice_nodes == 0 else 0)


if __name__ == "__main__":
    sys.exit(main())
