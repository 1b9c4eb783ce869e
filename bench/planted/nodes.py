"""Checks eight nodes of this machine: by `holdfast check --nodes 8`, or by the agents' checks in forked processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.planted.healthy_tree import build
from bench.planted.kinds import THROTTLE, Base, Kind
from bench.planted.node_entry import VARIABLE, Planted, address, become_node, enter_namespaces
from holdfast.events import NodeChecked
from holdfast.findings import CheckOutcome, Finding, Severity
from holdfast.preflight.compare import compare
from holdfast.preflight.node_view import NodeView
from holdfast.preflight.run_checks import node_facts, quick_checks, run_checks
from holdfast.protocol.node_requirements import NodeRequirements

ROOT = Path(__file__).parents[2]
NODES = 8
PROCESSES = {Base.MACHINE: 2, Base.INFINIBAND: 1, Base.ROCE: 1}
"""Ranks per node: a job with as many as GPUs needs more cores than this machine has."""
DEADLINE_S = 30.0
CHECK_S = 120.0
_NODE = re.compile(r"\bnode(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finding and its node."""

    node: int
    code: str
    severity: Severity
    what: str


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check of all nodes found."""

    found: tuple[Found, ...]
    not_looked_at: frozenset[str]
    """Checks that could not look on some node."""
    took_s: float
    spent_s: float
    """Of the node whose checks took longest."""
    can_run: bool

    def finds(self, kind: Kind) -> tuple[int, ...]:
        """The nodes on which it found what this kind should lead to."""
        return tuple(sorted({each.node for each in self.found if each.code == kind.code}))


def prepare(work: Path, base: Base, kind: Kind | None = None, node: int = 0) -> Planted:
    """Make the folders of a run: those that all nodes share, and a tree for each node."""
    shutil.rmtree(work / "trees", ignore_errors=True)
    (work / "checkpoints").mkdir(parents=True, exist_ok=True)
    planted = Planted(kind=kind, node=node, base=base, work=work)
    _make_image(work / "image")
    for each in range(NODES):
        planted.tree(each).mkdir(parents=True)
        if base is not Base.MACHINE:
            build(planted.tree(each), base)
    if kind:
        kind.change(planted.place(node))
    return planted


def _make_image(image: Path) -> None:
    """A virtual environment like that of this process, in a folder that a node can lose."""
    if image.exists():
        return
    (image / "bin").mkdir(parents=True)
    own = Path(sys.prefix)
    (image / "bin/python").symlink_to(Path(sys.executable).resolve())
    shutil.copyfile(own / "pyvenv.cfg", image / "pyvenv.cfg")
    (image / "lib").symlink_to(own / "lib")


# The agents' checks in forked processes


def check_forked(planted: Planted) -> Checked:
    """The checks of eight agents side by side, and the comparison of their nodes, without a controller."""
    began = time.monotonic()
    ends = [_fork(planted, node) for node in range(NODES)]
    reports: list[NodeChecked] = []
    for node, (pid, end) in enumerate(ends):
        with os.fdopen(end, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(pid, 0)
        if not answer:
            raise RuntimeError(f"node{node} of the bench could not be made, see above")
        reports.append(msgspec.json.decode(answer, type=NodeChecked))
    found = [
        _found(report.node, finding) for report in reports for result in report.results for finding in result.findings
    ]
    differing = compare({report.node: report.facts for report in reports})
    found += [_found(node, finding) for node, findings in differing.items() for finding in findings]
    blind = {
        result.check for report in reports for result in report.results if result.outcome is CheckOutcome.NOT_LOOKED_AT
    }
    errors = any(each.severity is Severity.ERROR for each in found)
    return Checked(
        found=tuple(found),
        not_looked_at=frozenset(blind),
        took_s=time.monotonic() - began,
        spent_s=max(report.took_s for report in reports),
        can_run=not errors,
    )


def requirements(planted: Planted) -> NodeRequirements:
    """What the bench's job needs of each node."""
    rdma = planted.base is not Base.MACHINE
    return NodeRequirements(
        gpus=8 if rdma else 0,
        processes=PROCESSES[planted.base],
        network="IB" if rdma else "Socket",
        env={"NCCL_NET": "IB" if rdma else "Socket", **(planted.kind.env if planted.kind else {})},
        python=str(planted.work / "image/bin/python"),
        workdir=str(planted.work),
        checkpoints=str(planted.work / "checkpoints"),
        logs=str(planted.work),
    )


def _fork(planted: Planted, node: int) -> tuple[int, int]:
    end, answer = os.pipe()
    if pid := os.fork():
        os.close(answer)
        return pid, end
    try:
        enter_namespaces(planted, node)
        become_node(planted, node)
        report = _report(planted, node)
        with os.fdopen(answer, "wb") as pipe:
            pipe.write(msgspec.json.encode(report))
    except BaseException as error:
        sys.stderr.write(f"node{node}: {error!r}\n")
    finally:
        os._exit(0)


def _report(planted: Planted, node: int) -> NodeChecked:
    """What the node's agent would send."""
    view = NodeView(wanted=requirements(planted), environ=os.environ, address=address(node))
    began = time.monotonic()
    results = run_checks(view, quick_checks(view.wanted), DEADLINE_S)
    return NodeChecked(
        at=time.time(),
        node=node,
        generation=0,
        results=tuple(each for each in results if each.findings or each.outcome is not CheckOutcome.PASSED),
        facts=node_facts(view, DEADLINE_S),
        took_s=time.monotonic() - began,
    )


def _found(node: int, finding: Finding) -> Found:
    return Found(node=node, code=finding.code, severity=finding.severity, what=finding.what)


# The whole command


@contextmanager
def machine_with_gpus() -> Iterator[None]:
    """Show 64 GPUs to the command and the controller of the local target, in mounts of this process only."""
    from holdfast.launch.local.netns import namespace

    namespace.unshare(namespace.NEW_MOUNT)
    script = """
    set -e
    mount --make-rprivate /
    mkdir -p "$0/real" "$0/layer"
    mount --rbind /dev "$0/real"
    for each in $(seq 0 63); do : > "$0/layer/nvidia$each"; done
    mount -t overlay planted -o "lowerdir=$0/layer:$0/real" /dev
    mount --rbind "$0/real/shm" /dev/shm
    """
    folder = Path(f"/run/holdfast-bench-{os.getpid()}")
    subprocess.run(["sh", "-c", script, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", "/dev/shm", "/dev", folder / "real"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def check_by_command(planted: Planted) -> Checked:
    """`holdfast check JOB --nodes 8` on the local target with network namespaces: controller and eight agents."""
    work = planted.work
    (work / ".holdfast/targets").mkdir(parents=True, exist_ok=True)
    (work / ".holdfast/targets/netns.yaml").write_text("kind: local\nisolation: netns\n")
    wanted = requirements(planted)
    job: dict[str, object] = {
        "name": "planted",
        "nodes": NODES,
        "ranks_per_node": wanted.processes,
        "command": [wanted.python, "-c", "pass"],
        "checkpoint": {"path": wanted.checkpoints},
        "env": dict(planted.kind.env) if planted.kind else {},
    }
    if planted.base is not Base.MACHINE:
        job |= {"gpus_per_node": wanted.gpus, "fabric": planted.base.value}
    (work / "job.json").write_text(json.dumps(job))
    environ = os.environ | {
        VARIABLE: planted.as_text(),
        "HOLDFAST_HOME": str(work / "home"),
        "PYTHONPATH": f"{ROOT / 'bench/planted/agent_hook'}:{ROOT}",
    }
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "check", "job.json", "--on", "netns", "--nodes", str(NODES), "-o", "json"],
        cwd=work,
        env=environ,
        capture_output=True,
        text=True,
        timeout=CHECK_S,
        check=False,
    )
    took_s = time.monotonic() - began
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"holdfast check: {done.stdout[-2000:]}{done.stderr[-2000:]}") from None
    return Checked(
        found=tuple(_found_in(answer)),
        not_looked_at=frozenset(_blind_in(answer)),
        took_s=took_s,
        can_run=answer["can_run"],
        spent_s=max((report["took_s"] for report in answer["nodes"].values() if report), default=0.0),
    )


def _results_in(answer: Mapping[str, object]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for node, report in answer["nodes"].items():
        for result in (report or {}).get("results", ()):
            yield int(node), result


def _found_in(answer: Mapping[str, object]) -> Iterator[Found]:
    for node, result in _results_in(answer):
        for finding in result.get("findings", ()):
            yield _found(node, msgspec.convert(finding, Finding))
    for each in answer["findings"]:
        yield from _differing_in(msgspec.convert(each, Finding))


def _differing_in(finding: Finding) -> Iterator[Found]:
    """The nodes that a comparison names: `CPUs on node1, node3`."""
    for node in map(int, _NODE.findall(finding.where.rpartition(" on ")[2])):
        yield _found(node, finding)


def _blind_in(answer: Mapping[str, object]) -> Iterator[str]:
    return (str(result["check"]) for _, result in _results_in(answer) if result.get("outcome") == "not-looked-at")


def clean_up() -> None:
    """Remove the cgroups of ended processes."""
    for group in THROTTLE.glob("planted-*"):
        group.rmdir()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for it."""
    process.send_signal(signal.SIGKILL)
    process.wait()
