"""Acceptance: 13 planted defects that `holdfast accept` has to find, each with its reason; and healthy targets.

.venv/bin/python -m bench.acceptance [--only NAME ...] [--clean TARGET ...] [--json FILE]

Each defect is real: a limited link, a controller that places nodes one by one, a training program that loses a part of
its state, a page without a step. `--clean` runs all checks on healthy targets instead, with the default agreement
except that nodes share a machine: `local`, `netns`, `hosts`, `slurm`, `kubernetes` (the lab, with a queue of Kueue).
`pod-group` is the lab without Kueue, where the scheduler itself places gangs, `volcano` with Volcano's scheduler; both
have only the check `gang`. It needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import lab_cluster, load_gate, result_file
from bench.paired_stats import headline, say, table
from bench.result_file import Figure, Result, today
from holdfast.accept.agreement import EXIT_CODES, CheckName, FirstRunTerms
from holdfast.accept.first_run_check import first_run_page
from holdfast.launch.local.netns import NetnsNode, ip_command
from lab.slurm_cluster import slurm_cluster
from lab.ssh_hosts import SshHosts, ssh_hosts
from lab.volcano_scheduler import volcano_scheduler

TITLE = "Acceptance"
CLEAN_GOAL_S = 25 * 60
CLEAN: Mapping[str, tuple[CheckName, ...]] = {
    "local": (),
    "netns": (),
    "hosts": (),
    "slurm": (),
    "kubernetes": (),
    "pod-group": (CheckName.GANG,),
    "volcano": (CheckName.GANG,),
}
"""Healthy targets, and the checks that run there; none means all."""
QUEUE = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: machines}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: training}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
  - coveredResources: [cpu, memory]
    flavors:
    - name: machines
      resources: [{name: cpu, nominalQuota: "2"}, {name: memory, nominalQuota: 16Gi}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: training, namespace: NAMESPACE}
spec: {clusterQueue: training}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: research}
value: 100
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: WorkloadPriorityClass
metadata: {name: urgent}
value: 1000
"""
"""Has room for two nodes of `CLUSTER_JOB`, and not for four."""
TWO_MACHINES = {"cloud.provider.com/topology-rack": "b0-r0"}
CLUSTER_JOB = {"image": "none", "queue": "training", "resources": {"cpu": 0.8, "memory": "4GiB"}}
HOLDFAST = Path(sys.executable).with_name("holdfast")
DEFECTS = Path(__file__).parent / "programs" / "acceptance_defects.py"
HOOK = Path(__file__).parent / "planted" / "controller_hook"
PAGE = "page.md"
SHARED: Mapping[str, Any] = {"shares_machine": True, "scaling": {"min_efficiency": 0.85, "steps": 120, "step_s": 0.5}}
"""Of all healthy targets here: their nodes, agents and controllers share this machine's CPUs."""
INIT, ATTACHED = 'holdfast init ${IMAGE:+--image "$IMAGE"}', "holdfast logs\n"
SHORT_RESTART = {"faults": 2, "steps_per_fault": 20}
SHORT_SCALING = {"nodes": [1, 2], "steps": 40}


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One planted defect, and what the check has to say of it."""

    name: str
    check: CheckName
    code: str
    reason: str
    """Words that the finding has to contain."""
    agreement: Mapping[str, Any] = field(default_factory=dict[str, Any])
    program: str = ""
    """The defect of bench/programs/acceptance_defects.py; empty for holdfast's own program."""
    on: str = "local"
    """The target: `local`, or hosts whose number is its last letter."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    page: tuple[str, str] | None = None
    """A text of the page, and what takes its place."""


def _restart(name: str, program: str, code: str, reason: str) -> Defect:
    agreement = {"restart": SHORT_RESTART}
    return Defect(name=name, check=CheckName.RESTART, code=code, reason=reason, program=program, agreement=agreement)


def _gang(name: str, code: str, on: str, kind: str, reason: str) -> Defect:
    return Defect(
        name=name,
        check=CheckName.GANG,
        code=code,
        reason=reason,
        on=on,
        agreement={"gang": {"rounds": 3, "deadline_s": 40.0 if kind == "deadlock" else 120.0}},
        environ={"PYTHONPATH": f"{HOOK}:{DEFECTS.parents[2]}", "HOLDFAST_BENCH_GANGS": kind},
    )


PLANTED: tuple[Defect, ...] = (
    Defect(
        name="slow network adapter of one host",
        check=CheckName.FABRIC,
        code="probe-pairs",
        reason="node",
        on="hosts-3",
        agreement={"fabric": {"steps": 20, "probe_s": 40.0}},
    ),
    Defect(
        name="wrong interface: the variable is set for NCCL, and not for Gloo",
        check=CheckName.FABRIC,
        code="wrong-interface",
        reason="net1",
        on="hosts-2",
        agreement={
            "job": {"fabric": {"name": "tcp", "env": {"NCCL_SOCKET_IFNAME": "net1"}}},
            "fabric": {"steps": 100, "probe_s": 40.0},
        },
    ),
    Defect(
        name="one slow rank",
        check=CheckName.SCALING,
        code="scaling-below-agreed",
        reason="rank 1",
        program="slow-rank",
        agreement={"scaling": SHORT_SCALING},
    ),
    Defect(
        name="data source that is slow for several readers",
        check=CheckName.SCALING,
        code="scaling-below-agreed",
        reason="samples",
        program="slow-loader",
        agreement={"scaling": SHORT_SCALING},
    ),
    _gang("scheduler that places half a gang", "half-gang", "hosts-3", "half", "some of its nodes"),
    _gang("two half gangs that wait for each other", "gang-deadlock", "hosts-2", "deadlock", "neither starts"),
    Defect(
        name="documentation without a step",
        check=CheckName.FIRST_RUN,
        code="first-run-failed",
        reason="`Run`",
        page=(INIT, "true"),
    ),
    Defect(
        name="documentation with an option that does not exist",
        check=CheckName.FIRST_RUN,
        code="first-run-failed",
        reason="`Look at it`",
        page=(ATTACHED, "holdfast logs --pretty\n"),
    ),
    _restart("checkpoint without the optimizer's state", "optimizer", "state-not-restored", "optimizer"),
    _restart("random numbers that begin again", "random", "state-not-restored", "random number"),
    _restart("data that is read from the beginning again", "position", "state-not-restored", "position in the data"),
    _restart("checkpoints that nothing loads", "ignored", "checkpoint-not-used", "step 1"),
    _restart("program that cannot start twice", "lock", "recovery-failed", "did not recover"),
)


def main() -> None:
    """Plant each defect, or accept healthy targets, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.acceptance", description=__doc__)
    parser.add_argument("--only", action="append", help="words of a defect's name")
    parser.add_argument("--clean", action="append", choices=CLEAN, help="accept this healthy target instead")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        os.environ["HOLDFAST_HOME"] = f"{folder}/home"
        os.environ["OMP_NUM_THREADS"] = "1"
        if options.clean:
            headline("acceptance of healthy targets, with the default agreement, on shared CPUs")
            results = [_accept_clean(Path(folder), target) for target in options.clean]
        else:
            headline(f"acceptance: {len(PLANTED)} planted defects")
            chosen = [each for each in PLANTED if not options.only or any(word in each.name for word in options.only)]
            results = [_plant_all(Path(folder), chosen)]
    result_file.save(options.json, TITLE, results)


def _plant_all(folder: Path, chosen: Sequence[Defect]) -> Result:
    rows: list[tuple[str, ...]] = []
    found = 0
    for number, defect in enumerate(chosen):
        began = time.monotonic()
        base = folder / str(number)
        with _site(base, defect.on) as (target, hosts):
            if hosts is not None:
                _spoil(hosts, defect)
            finding, code = _accept(base, target, defect)
        text = f"{finding.get('code')}: {finding.get('what')}" if finding else "nothing"
        is_found = code == EXIT_CODES[defect.check] and finding.get("code") == defect.code
        right = is_found and defect.reason in f"{finding.get('what')} {finding.get('where')} {finding.get('evidence')}"
        found += right
        rows.append((defect.name, defect.check, "yes" if right else "NO", f"{time.monotonic() - began:.0f} s", text))
        say(f"{'found' if right else 'NOT FOUND'}: {defect.name}: {text}")
    say(table(("defect", "check", "found with its reason", "took", "finding"), rows))
    return Result(
        claim="planted defects that acceptance finds, each with its reason",
        command=result_file.command(),
        date=today(),
        figure=Figure(value=found, unit=f"of {len(chosen)}"),
        goal=f"{len(PLANTED)} of {len(PLANTED)}",
        met="yes" if found == len(PLANTED) else "no",
        details={name: finding for name, _, _, _, finding in rows},
    )


def _spoil(hosts: SshHosts, defect: Defect) -> None:
    """Plant what is wrong with the hosts' network."""
    nodes = [hosts.node(name) for name in hosts.names]
    if defect.code == "probe-pairs":
        ip_command.tc("qdisc replace dev eth0 root tbf rate 20mbit burst 128kb latency 50ms", inside=nodes[-1].prefix)
    elif defect.code == "wrong-interface":
        ip_command.ip(
            f"link add name net1 type veth peer name net1 netns {_namespace(nodes[1])}", inside=nodes[0].prefix
        )
        for number, node in enumerate(nodes, start=1):
            ip_command.ip(f"address add 10.254.1.{number}/24 dev net1", "link set net1 up", inside=node.prefix)


def _namespace(node: NetnsNode) -> str:
    return next(word.removeprefix("--net=") for word in node.prefix if word.startswith("--net="))


@contextlib.contextmanager
def _site(base: Path, kind: str) -> Generator[tuple[str, SshHosts | None]]:
    """A project with a target of this kind, and its hosts."""
    targets = base / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    lab = base.with_name(f"{base.name}-lab")  # not in the project: its code is shipped
    match kind:
        case "local":
            yield "local", None
        case "netns":
            (targets / "lab.yaml").write_text("kind: local\nisolation: netns\n")
            yield "lab", None
        case "slurm":
            with slurm_cluster(lab / "slurm", "n1", "n2", "n3") as cluster:
                os.environ.update(cluster.environ)
                settings = f"{{address: 127.0.0.1, folder: {lab / 'nodes'}, options: [--exclusive]}}"
                (targets / "lab.yaml").write_text(
                    f"kind: slurm\ncheckpoint_root: {lab / 'checkpoints'}\nslurm: {settings}\n"
                )
                yield "lab", None
        case _:
            count = int(kind[-1]) if kind[-1].isdigit() else 3
            names = ("alpha", "beta", "gamma")[:count]
            with ssh_hosts(lab / "hosts", *names) as hosts:
                (targets / "lab.yaml").write_text(
                    f"kind: hosts\nhosts: [{', '.join(names)}]\ncheckpoint_root: {lab / 'checkpoints'}\n"
                    f"ssh: {{python: {sys.executable}, config: {hosts.config}}}\n"
                )
                yield "lab", hosts


def _accept(base: Path, target: str, defect: Defect) -> tuple[dict[str, Any], int]:
    """The finding of the defect's check, and the exit code."""
    agreement = dict(defect.agreement)
    if defect.program:
        options = [] if defect.check is CheckName.RESTART else ["--width", "256", "--layers", "4", "--batch", "8"]
        compared = ["--compare", "--pace", "0.05"] if defect.check is CheckName.RESTART else options
        agreement["program"] = [sys.executable, str(DEFECTS), defect.program, *compared]
    if defect.page is not None:
        page = first_run_page(FirstRunTerms(), base)
        assert defect.page[0] in page, "the page has changed"
        (base / PAGE).write_text(page.replace(*defect.page))
        agreement["first_run"] = {"page": PAGE}
    (base / "acceptance.yaml").write_text(json.dumps(agreement))
    words = [str(HOLDFAST), "accept", defect.check, "--on", target, "--agreement", "acceptance.yaml", "-o", "json"]
    done = subprocess.run(
        words,
        cwd=base,
        env={**os.environ, **defect.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    reports = json.loads(done.stdout)["reports"]
    return reports[0].get("finding") or {}, done.returncode


def _accept_clean(folder: Path, kind: str) -> Result:
    load_gate.wait_until_idle()
    with _CLUSTERS.get(kind, lambda: _clean_site(folder / kind, kind))() as (base, target, agreement):
        (base / "acceptance.yaml").write_text(json.dumps(agreement))
        began = time.monotonic()
        words = [str(HOLDFAST), "accept", *CLEAN[kind], "--on", target, "--agreement", "acceptance.yaml", "-o", "json"]
        done = subprocess.run(words, cwd=base, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
        took_s = time.monotonic() - began
    reports = json.loads(done.stdout)["reports"]
    verdicts = {report["check"]: report["verdict"] for report in reports}
    say(table(("check", "verdict", "took", "why not"), [_row(report) for report in reports]))
    passed = done.returncode == 0
    return Result(
        claim=f"acceptance of a healthy target: {kind}{''.join(f', check `{each}`' for each in CLEAN[kind])}",
        command=result_file.command(),
        date=today(),
        figure=Figure(value=took_s / 60, unit="min", decimals=1),
        goal=f"passed in ≤ {CLEAN_GOAL_S // 60} min",
        met="yes" if passed and took_s <= CLEAN_GOAL_S else "no",
        details=verdicts,
    )


@contextlib.contextmanager
def _clean_site(base: Path, kind: str) -> Generator[tuple[Path, str, Mapping[str, Any]]]:
    with _site(base, kind) as (target, _):
        yield base, target, {**SHARED, "job": {"env": {"OMP_NUM_THREADS": "1"}}}


@contextlib.contextmanager
def _cluster() -> Generator[tuple[Path, str, Mapping[str, Any]]]:
    """The lab, with a queue."""
    with lab_cluster.site() as site:
        site.kubectl("apply", "-f", "-", input=QUEUE.replace("NAMESPACE", site.namespace))
        yield (
            site.folder,
            "lab",
            {**SHARED, "nodes": 2, "job": CLUSTER_JOB, "gang": {"priorities": ["research", "urgent"]}},
        )


@contextlib.contextmanager
def _grouping_cluster(scheduler: str) -> Generator[tuple[Path, str, Mapping[str, Any]]]:
    """The lab, on two machines of which each has room for one node, with a scheduler's own gangs."""
    with (
        lab_cluster.site() as site,
        volcano_scheduler(site.lab) if scheduler == "volcano" else contextlib.nullcontext(),
    ):
        target = site.folder / ".holdfast" / "targets" / "lab.yaml"
        place = json.loads(target.read_text()) | {"pod_group": scheduler, "node_selector": TWO_MACHINES}
        target.write_text(json.dumps(place))
        yield site.folder, "lab", {**SHARED, "nodes": 2, "job": {"image": "none", "resources": {"cpu": 100}}}


_CLUSTERS: Mapping[str, Callable[[], contextlib.AbstractContextManager[tuple[Path, str, Mapping[str, Any]]]]] = {
    "kubernetes": _cluster,
    "pod-group": lambda: _grouping_cluster("kubernetes"),
    "volcano": lambda: _grouping_cluster("volcano"),
}


def _row(report: Mapping[str, Any]) -> tuple[str, ...]:
    finding = report.get("finding") or {}
    return (report["check"], report["verdict"], f"{report['took_s']:.0f} s", str(finding.get("what", "")))


if __name__ == "__main__":
    main()
