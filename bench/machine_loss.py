"""A machine loses power on the lab: seconds until the first step of all ranks, some of them on another machine.

.venv/bin/python -m bench.machine_loss [--quick | --rounds N] [--only PART] [--json FILE]

Two nodes of one rank run the script of bench.recovery, which checkpoints each step; the power of a node's machine is
cut, without a message to anybody. The peer is a plain JobSet of the same program under torchrun, which it restarts as a
whole (`failurePolicy: {maxRestarts}`). It never restarts by itself: its Job waits until the dead machine's pod is gone,
and no kubelet is left to end that pod. So the bench does what an administrator, or a remediation operator, does:
it sets the taint `out-of-service` on the machine. holdfast gets no such help.

The same is measured for a run with a placement: there Kueue must assign another machine, which it does once the machine
is NotReady and the pods there are deleted (`TASReplaceNodeOnPodTermination`). holdfast deletes them.

tuned: `recovery.node_grace_s` is 10, and the machine gets the taint as soon as it is NotReady, which is 50 s after its
last heartbeat, the default of Kubernetes. noticed-soon: the same, where Kubernetes notices after 10 s, as in the lab.
defaults: the machine gets the taint when Kubernetes evicts its pods, after the default toleration of 300 s;
`recovery.node_grace_s` is 45, its default. This Kubernetes also notices after 10 s, which spares the peer 40 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import lab_cluster, load_gate, result_file
from bench.contenders import PROGRAMS
from bench.paired_stats import OURS, PEER, Round, estimate, headline, say, table
from holdfast import api
from holdfast.cli.event_text import event_line
from holdfast.events import CheckpointCommitted, StepCommitted
from holdfast.run_dir import RunDir
from lab import NodeState
from lab.state import NODE_LOST_AFTER_S

ROUNDS, QUICK_ROUNDS = 5, 1
NODES, CPUS = 2, 100
"""Nodes, and cores that each requests: more than half a machine's, so that two share none, as with GPUs."""
SETTLED_STEPS = 10
STARTED_S, RECOVERED_S = 120.0, 600.0
BEYOND_GRACE_S, SHARE_GOAL = 10.0, 0.3
SHOWN = 40
"""Log lines that are shown for a run that does not resume."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
PLACED = "B placed"
"""holdfast, with machines that Kueue assigns."""
BLOCK = "cloud.provider.com/topology-block"
KUEUE = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {{name: machines}}
spec: {{levels: [{{nodeLabel: {BLOCK}}}, {{nodeLabel: kubernetes.io/hostname}}]}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {{name: machines}}
spec: {{nodeLabels: {{kubernetes.io/os: linux}}, topologyName: machines}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {{name: machines}}
spec:
  namespaceSelector: {{}}
  resourceGroups:
  - coveredResources: [cpu]
    flavors: [{{name: machines, resources: [{{name: cpu, nominalQuota: 10000}}]}}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {{name: machines}}
spec: {{clusterQueue: machines}}
"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """When each side considers a machine lost."""

    node_grace_s: float
    toleration_s: float
    """For which the peer's pods stay on a machine that is NotReady."""
    taint_at_eviction: bool
    """Whether the machine gets the taint once its pods are evicted, or already when it is NotReady."""
    noticed_after_s: int = NODE_LOST_AFTER_S
    """After which Kubernetes calls a silent machine NotReady."""


PARTS: Mapping[str, Part] = {
    "tuned": Part(node_grace_s=10.0, toleration_s=0.0, taint_at_eviction=False, noticed_after_s=50),
    "noticed-soon": Part(node_grace_s=10.0, toleration_s=0.0, taint_at_eviction=False),
    "defaults": Part(node_grace_s=45.0, toleration_s=300.0, taint_at_eviction=True),
}


def plain_jobset(name: str, program: Path, out: Path, toleration_s: float) -> dict[str, Any]:
    """A JobSet as its documentation shows it for torchrun."""
    index = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    words = ("--nnodes", str(NODES), "--nproc-per-node", "1", "--master-addr", f"{name}-node-0-0.{name}")
    command = ["python", "-m", "torch.distributed.run", *words, "--master-port", "29500"]
    container = {
        "name": "node",
        "image": "none",
        "resources": {"requests": {"cpu": str(CPUS)}},
        "command": [*command, "--node-rank", "$(NODE_RANK)", str(program), str(out)],
        "env": [{"name": "NODE_RANK", "valueFrom": index}, {"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    tolerations = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key, seconds in (("not-ready", int(toleration_s)), ("unreachable", int(toleration_s)))
    ]
    pod = {"restartPolicy": "Never", "tolerations": tolerations, "containers": [container]}
    metadata = {"labels": {"holdfast/part": "node"}}
    job = {
        "parallelism": NODES,
        "completions": NODES,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": metadata, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "holdfast"}},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 1000},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def main() -> None:
    """Measure, and print a line per round and tables."""
    parser = argparse.ArgumentParser(
        prog="bench.machine_loss", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} round")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline(f"power of a machine cut: {NODES} nodes x 1 rank on the lab")
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    done = dict[str, list[Round]]()
    for name in (name for name in PARTS if options.only in (None, name)):
        say(name)
        with lab_cluster.site(node_lost_after_s=PARTS[name].noticed_after_s) as site:
            shutil.copy(PROGRAMS / "resumable_loop.py", site.folder)
            site.kubectl("create", "-f", "-", input=KUEUE)
            site.kubectl("wait", "clusterqueue/machines", "--for=condition=Active", f"--timeout={STARTED_S:g}s")
            done[name] = _rounds(site, PARTS[name], rounds)
    say("")
    columns = ("part", "goal", "measured", "holdfast", "placed by Kueue", "JobSet with the taint", "met")
    say(table(columns, list(map(_row, done.items()))))
    result_file.save(
        options.json, "A machine lost on Kubernetes", [one for part in done.items() for one in _results(*part)]
    )


def _rounds(site: lab_cluster.LabSite, part: Part, rounds: int) -> list[Round]:
    placed = {"queue": "machines", "placement": BLOCK}
    sides = {
        PEER: lambda: _peer_s(site, part),
        OURS: lambda: _ours_s(site, part, {}),
        PLACED: lambda: _ours_s(site, part, placed),
    }
    done = list[Round]()
    for index in range(rounds):
        order = list(sides) if index % 2 == 0 else list(reversed(sides))
        done.append({name: sides[name]() for name in order})
        say(f"{index + 1:3d}/{rounds}  " + "  ".join(f"{name} {seconds:.1f} s" for name, seconds in done[-1].items()))
    return done


def _ours_s(site: lab_cluster.LabSite, part: Part, more: Mapping[str, str]) -> float:
    out = site.out()
    fields = {"recovery.node_grace_s": part.node_grace_s, "resources.cpu": CPUS, **more}
    load_gate.wait_until_idle()
    run = api.start(site.job("python", "resumable_loop.py", str(out), **fields), "lab", base=site.folder)
    try:
        return _loss_s(site, out, lambda: _story(run), help_peer=None)
    finally:
        site.clear()


def _peer_s(site: lab_cluster.LabSite, part: Part) -> float:
    out = site.out()
    load_gate.wait_until_idle()
    made = plain_jobset("plain", site.folder / "resumable_loop.py", out, part.toleration_s)
    site.kubectl("create", "-f", "-", input=json.dumps(made))
    try:
        return _loss_s(site, out, lambda: site.kubectl("get", "pods,jobs,jobsets", "-o", "wide"), help_peer=part)
    finally:
        site.clear()


def _loss_s(site: lab_cluster.LabSite, out: Path, words: Callable[[], str], *, help_peer: Part | None) -> float:
    """Seconds from the power cut of a node's machine to the end of the first step by all ranks, each started since."""
    lab_cluster.until(lambda: all(len(_steps(out, rank)) >= SETTLED_STEPS for rank in range(NODES)), STARTED_S, words)
    former = {pid for rank in range(NODES) for pid, _ in _steps(out, rank)}
    lost = _machine_to_lose(site)
    with _power_cut(site, lost):
        cut_at = time.time()
        tainted = help_peer is None

        def resumed() -> bool:
            nonlocal tainted
            if help_peer is not None and not tainted and _is_lost(site, lost, help_peer):
                site.lab.kubectl("taint", "node", lost, f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute")
                tainted = True
            return all(_since(out, rank, former) for rank in range(NODES))

        lab_cluster.until(resumed, RECOVERED_S, words)
    return max(_since(out, rank, former)[0] for rank in range(NODES)) - cut_at


def _steps(out: Path, rank: int) -> list[tuple[int, float]]:
    """Process id and end of each step of a rank."""
    path = out / f"rank-{rank}"
    rows = [text.split() for text in path.read_text().splitlines()] if path.exists() else []
    return [(int(pid), float(at)) for pid, what, _, at in rows if what == "step"]


def _since(out: Path, rank: int, former: set[int]) -> list[float]:
    return [at for pid, at in _steps(out, rank) if pid not in former]


def _machine_to_lose(site: lab_cluster.LabSite) -> str:
    """The machine of the last node that is not the controller's too."""
    found = json.loads(site.kubectl("get", "pods", "-o", "json"))["items"]
    machines = {part: [_machine(pod) for pod in found if _part(pod) == part] for part in ("node", "controller")}
    return next(name for name in sorted(machines["node"], reverse=True) if name not in machines["controller"])


def _part(pod: Mapping[str, Any]) -> str:
    return pod["metadata"].get("labels", {}).get("holdfast/part", "")


def _machine(pod: Mapping[str, Any]) -> str:
    return pod["spec"].get("nodeName", "")


def _is_lost(site: lab_cluster.LabSite, machine: str, part: Part) -> bool:
    """Whether Kubernetes knows: the machine is NotReady, or its pods are evicted."""
    if part.taint_at_eviction:
        pods = json.loads(site.kubectl("get", "pods", "-o", "json"))["items"]
        return any(_machine(pod) == machine and "deletionTimestamp" in pod["metadata"] for pod in pods)
    ready = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'
    return site.lab.kubectl("get", "node", machine, "-o", ready) != "True"


@contextlib.contextmanager
def _power_cut(site: lab_cluster.LabSite, machine: str) -> Generator[None]:
    site.lab.set_state(machine, NodeState.OFF)
    try:
        yield
    finally:
        site.lab.set_state(machine, NodeState.ON)
        if OUT_OF_SERVICE in site.lab.kubectl("get", "node", machine, "-o", "jsonpath={.spec.taints[*].key}"):
            site.lab.kubectl("taint", "node", machine, f"{OUT_OF_SERVICE}-")
        site.lab.kubectl("wait", "--for=condition=Ready", f"node/{machine}", "--timeout=60s")


def _story(run: RunDir) -> str:
    told = [event for event in api.events(run) if not isinstance(event, StepCommitted | CheckpointCommitted)]
    return "\n".join(map(event_line, told[-SHOWN:]))


def _row(part: tuple[str, Sequence[Round]]) -> tuple[str, ...]:
    name, rounds = part
    ours, placed, theirs = ([each[side] for each in rounds] for side in (OURS, PLACED, PEER))
    ratio = estimate([each[OURS] / each[PEER] for each in rounds])
    goal_s = PARTS[name].node_grace_s + BEYOND_GRACE_S
    met = (estimate(ours).median <= goal_s, ratio.median <= SHARE_GOAL)
    verdict = ", ".join("yes" if each else "no" for each in met)
    return (
        name,
        f"<= {goal_s:g} s, <= {SHARE_GOAL}x",
        f"{ratio}x",
        f"{estimate(ours)} s",
        f"{estimate(placed)} s",
        f"{estimate(theirs)} s",
        verdict,
    )


def _results(name: str, rounds: Sequence[Round]) -> list[result_file.Result]:
    part = PARTS[name]
    noticed = f"NotReady after {part.noticed_after_s} s"
    claim = f"power cut → first step, `node_grace_s: {part.node_grace_s:g}`, {noticed}"
    ours = estimate([each[OURS] for each in rounds]).median
    ratio = estimate([each[OURS] / each[PEER] for each in rounds]).median
    placed = estimate([each[PLACED] for each in rounds]).median
    goal_s = part.node_grace_s + BEYOND_GRACE_S
    placed_goal_s = max(part.node_grace_s, part.noticed_after_s) + BEYOND_GRACE_S  # Kueue waits for NotReady
    return [
        result_file.absolute(claim, ours, "s", goal=goal_s, decimals=1),
        result_file.absolute(claim, ratio, "×", goal=SHARE_GOAL, peer="JobSet"),
        result_file.absolute(f"{claim}, placed by Kueue", placed, "s", goal=placed_goal_s, decimals=1),
    ]


if __name__ == "__main__":
    main()
