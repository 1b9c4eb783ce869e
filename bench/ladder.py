"""The ladder: the same training with one thing more each, on targets with a slow and a fast network, and locally.

.venv/bin/python -m bench.ladder [--on TARGET ...] [--steps N] [--json FILE]

`netns` has rungs 1 to 4, with 100 Mbit/s on the first network; `kubernetes` (the lab, pods with the same networks,
and a queue of Kueue that knows racks) has 1, 3, 4 and 5; `plain`, this machine, has 1 to 3, Monarch included. It needs
root. The floor is what two halves of the first rung differ by.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from bench import lab_cluster, load_gate, result_file
from bench.paired_stats import headline, say, table
from bench.result_file import Figure, Peer, Result, today
from holdfast.launch.local.netns import NetnsInterface

EXAMPLES = Path(__file__).parents[1] / "examples" / "ladder"
SLOW_MBIT, FAST_MBIT = 100, 10_000
LOCAL = {
    "netns": f"kind: local\nisolation: netns\ninterfaces: {{eth0: {SLOW_MBIT}, net1: {FAST_MBIT}}}\n",
    "plain": "kind: local\n",
}
TARGETS = ("netns", "kubernetes", "plain")
RACK = "cloud.provider.com/topology-rack"
QUEUE = f"""
apiVersion: kueue.x-k8s.io/v1beta2
kind: Topology
metadata: {{name: machines}}
spec: {{levels: [{{nodeLabel: {RACK}}}, {{nodeLabel: kubernetes.io/hostname}}]}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {{name: machines}}
spec: {{nodeLabels: {{kubernetes.io/os: linux}}, topologyName: machines}}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {{name: training}}
spec:
  namespaceSelector: {{}}
  resourceGroups:
  - coveredResources: [cpu, memory]
    flavors:
    - name: machines
      resources: [{{name: cpu, nominalQuota: "64"}}, {{name: memory, nominalQuota: 64Gi}}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {{name: training, namespace: NAMESPACE}}
spec: {{clusterQueue: training}}
"""
CLUSTER_JOB = ("image=none", "resources.cpu=0.8", "resources.memory=4GiB")
FAULT_TOLERANCE, GOAL = "3-fault-tolerance", 2.5
TITLE = "The ladder"


def main() -> None:
    """Climb on each target, and print a table of each."""
    parser = argparse.ArgumentParser(prog="bench.ladder", description=__doc__)
    parser.add_argument("--on", action="append", choices=TARGETS, help="only on this target")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    headline("ladder: a tiny Llama on two nodes of one rank")
    results: list[Result] = []
    for name in options.on or TARGETS:
        with _cluster() if name == "kubernetes" else _folder(name) as (work, fields):
            load_gate.wait_until_idle()
            rungs = _climb(work, name, [f"env.STEPS={options.steps}", *fields])
        results += [_result(name, rung) for rung in rungs if rung["status"] == "succeeded" and rung["floor"]]
    result_file.save(options.json, TITLE, results)


@contextlib.contextmanager
def _folder(target: str) -> Generator[tuple[Path, Sequence[str]]]:
    """The ladder with a local target, and what it needs in each job."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        work = Path(folder) / "ladder"
        shutil.copytree(EXAMPLES, work)
        targets = work / ".holdfast" / "targets"
        targets.mkdir(parents=True)
        (targets / f"{target}.yaml").write_text(LOCAL[target])
        os.environ["HOLDFAST_HOME"] = f"{folder}/home"
        yield work, ()


@contextlib.contextmanager
def _cluster() -> Generator[tuple[Path, Sequence[str]]]:
    """The ladder with the lab, whose pods have a slow and a fast network, and a queue that knows racks."""
    networks = NetnsInterface(name="eth0", mbit=SLOW_MBIT), NetnsInterface(name="net1", mbit=FAST_MBIT)
    with lab_cluster.site(interfaces=networks) as site:
        site.kubectl("apply", "-f", "-", input=QUEUE.replace("NAMESPACE", site.namespace))
        shutil.copytree(EXAMPLES, site.folder, dirs_exist_ok=True)
        targets = site.folder / ".holdfast" / "targets"
        place = json.loads((targets / "lab.yaml").read_text())
        (targets / "kubernetes.yaml").write_text(json.dumps({**place, "topology_levels": {"rack": RACK}}))
        yield site.folder, CLUSTER_JOB


def _climb(work: Path, target: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    holdfast = Path(sys.executable).with_name("holdfast")
    environ = {**os.environ, "PATH": f"{holdfast.parent}{os.pathsep}{os.environ['PATH']}"}
    words = [str(holdfast), "accept", "ladder", ".", "--on", target, "-o", "json"]
    words += [word for each in fields for word in ("--set", each)]
    done = subprocess.run(words, cwd=work, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    rungs: list[dict[str, Any]] = json.loads(done.stdout)["rungs"]
    shown = ("name", "status", "duration_s", "first_loss", "last_loss", "step_s", "ratio", "floor", "why")
    say("")
    say(target)
    say(table(shown, [tuple(_cell(rung.get(name)) for name in shown) for rung in rungs]))
    return rungs


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value or "")


def _result(target: str, rung: dict[str, Any]) -> Result:
    value, _, interval = rung["ratio"].partition(" ")
    low, high = (float(each) for each in interval.strip("[]").split(","))
    floor = [float(each) for each in rung["floor"].split(" to ")]
    goal = GOAL if rung["name"] == FAULT_TOLERANCE else None
    return Result(
        claim=f"ladder, {target}: step of `{rung['name']}`",
        command=result_file.command(),
        date=today(),
        ratio=Figure(value=float(value), low=low, high=high, unit="×", decimals=2),
        floor=Figure(value=1.0, low=floor[0], high=floor[1], unit="×", decimals=2),
        peer=Peer(name="1-torchrun"),
        goal="" if goal is None else f"≤ {goal:g}×",
        met="" if goal is None else ("yes" if float(value) <= goal else "no"),
        details={"loss": f"{rung['first_loss']:.3f} → {rung['last_loss']:.3f}", "step": f"{rung['step_s']:.3f} s"},
    )


if __name__ == "__main__":
    main()
