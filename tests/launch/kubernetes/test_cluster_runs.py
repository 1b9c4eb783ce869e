"""Runs on a real control plane, from a client that holds nothing but a kubeconfig."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest
import torch
import yaml
from deploy.render_chart import templates
from tests.launch.kubernetes.test_collect_inventory import rules, user
from tests.runs.forked_starts import ForkedStarts
from tests.waiting import until

import holdfast
from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import (
    AgentConnected,
    AnyEvent,
    CheckpointCommitted,
    ControllerStarted,
    FaultAction,
    FaultTarget,
    FindingRaised,
    NodeRequested,
    Outcome,
    RankExited,
    RanksStarted,
    RecoveryDecided,
    RunFinished,
    StepCommitted,
)
from holdfast.findings import Finding, Severity
from holdfast.host import processes
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.submit.submit_process import WORKER_MODULE, SubmitProcess
from holdfast.launch.kubernetes.sync.code_upload import MAX_CODE_IN_SECRET_BYTES
from holdfast.launch.target import Rendered
from holdfast.launch.target_runs import TargetRunPhase
from holdfast.protocol.orders import OLDEST_PROTOCOL, PROTOCOL
from holdfast.report.rank_logs import find_rank_logs
from holdfast.report.run_status import RunPhase, RunStatus
from holdfast.run_dir import RunDir
from lab import Lab, NodeState
from lab.client import LabClient
from lab.kubelet.container import MARK
from lab.lab import FOUR_NODES
from lab.traefik_gateway import NAME as GATEWAY
from lab.traefik_gateway import traefik_gateway
from lab.volcano_scheduler import make_queue, volcano_scheduler

pytestmark = pytest.mark.slow

WITHIN_S = 240.0
PROGRAMS = Path(__file__).parents[2] / "programs"
RECALLED = "event-log-restored"
TORCH_FREE_TRAINER = PROGRAMS / "torch_free_trainer.py"

TARGET = """
kind: kubernetes
namespace: {namespace}
user: {user}
workload: {workload}
agent: {agent}
"""
CLAIM = {"claim": "home", "size": "1GiB", "storage_class": "lab"}
VOLUME = f"volume: {json.dumps(CLAIM)}\n"

OF_EVERY_NAMESPACE = (
    "configmap/kube-root-ca.crt",
    "configmap/holdfast-quarantine",
    "serviceaccount/default",
    "persistentvolumeclaim/home",
)
"""What is there whatever is run; the quarantine and the volume's claim outlive its runs."""


LOSSES = 5
"""Of a controller's pod: after so many a Job pauses for minutes."""
AT_ONCE_S = 30.0
"""Within which there must be another pod, on a machine that does much else; a Job pauses longer from the third on."""
WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


class Site:
    """A project whose target `lab` is a namespace of the lab."""

    def __init__(self, lab: Lab, client: LabClient, namespace: str, folder: Path) -> None:
        self.lab, self.namespace, self.folder = lab, namespace, folder
        self._client = client
        self.target("jobset")

    def target(self, workload: str, *, agent: bool = True, volume: str = VOLUME) -> None:
        targets = self.folder / ".holdfast" / "targets"
        targets.mkdir(parents=True, exist_ok=True)
        text = TARGET.format(namespace=self.namespace, user=os.geteuid(), workload=workload, agent=json.dumps(agent))
        (targets / "lab.yaml").write_text(text + volume)

    def start(self, *command: str, **job: Any) -> RunDir:
        """Start two nodes with a command."""
        fields = [f"{name}={value}" for name, value in {"image": "none", "nodes": 2, **job}.items()]
        return api.start(api.load(None, command=command, overrides=fields), "lab", base=self.folder)

    def stepper(self, **job: Any) -> RunDir:
        """Start two ranks that step together."""
        shutil.copy(TORCH_FREE_TRAINER, self.folder)
        run = self.start("python", TORCH_FREE_TRAINER.name, "100000", "0.05", **{"checkpoint": "checkpoints", **job})
        steps_on(run)
        return run

    def kubectl(self, *words: str, input: str | None = None) -> str:
        return self.lab.kubectl("-n", self.namespace, *words, input=input)

    def pods(self, part: str) -> dict[str, str]:
        """Names of the pods of a part that are there to stay, by their uid."""
        found = self._pods_of(part)
        metas = [pod["metadata"] for pod in found if pod["status"]["phase"] in ("Pending", "Running")]
        return {meta["uid"]: meta["name"] for meta in metas if "deletionTimestamp" not in meta}

    def running(self, part: str) -> bool:
        """Whether any pod of a part has been placed."""
        return any(pod["spec"].get("nodeName") for pod in self._pods_of(part))

    def _pods_of(self, part: str) -> list[Any]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=holdfast/part={part}"
        return self._client.get(path)["items"]

    def evict(self, pod: str) -> None:
        """Evict a pod as `kubectl drain` does."""
        meta = {"name": pod, "namespace": self.namespace}
        eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta})
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", input=eviction)

    def volume(self) -> Path:
        """The files of the volume."""
        name = self.kubectl("get", "pvc", "home", "-o", "jsonpath={.spec.volumeName}")
        return Path(self.lab.kubectl("get", "pv", name, "-o", "jsonpath={.spec.hostPath.path}{.spec.local.path}"))

    def left(self) -> list[str]:
        return objects_left(self.lab, self.namespace)


def objects_left(lab: Lab, namespace: str) -> list[str]:
    """What keeps a namespace from being as it was; only pods while there are some, since to list all costs 0.5 s."""
    return lab.kubectl("get", "pods", "-n", namespace, "-o", "name").split() or objects(lab, namespace)


def objects(lab: Lab, namespace: str) -> list[str]:
    """Every object in a namespace that is not always there."""
    kinds = ",".join(_listed_kinds(lab, namespace))
    found = lab.kubectl("get", kinds, "-n", namespace, "-o", "name", "--ignore-not-found")
    return sorted(set(found.split()) - set(OF_EVERY_NAMESPACE))


@functools.lru_cache(maxsize=1)
def _listed_kinds(lab: Lab, namespace: str) -> list[str]:
    """The kinds of objects that the lab has for this namespace, which is of one test."""
    kinds = lab.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name", "-n", namespace).split()
    return [kind for kind in kinds if not kind.startswith("events")]


@pytest.fixture
def site(
    lab: Lab,
    lab_client: LabClient,
    namespace: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_starts: ForkedStarts,
) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    project = tmp_path / "project"
    project.mkdir()
    forked_starts.preload(WORKER_MODULE)
    with forked_starts.used():
        yield Site(lab, lab_client, namespace, project)
    for run in api.runs():
        lab.kubectl("delete", ",".join(Workload), "-n", namespace, "--all", "--wait=false")
        until(lambda run=run: not run.alive(), "its mirror is gone")


def reach(run: RunDir, reached: Callable[[RunStatus], object]) -> None:
    """Wait for a condition on a running run."""
    deadline = time.monotonic() + WITHIN_S
    while not reached(known := api.status(run)):
        assert time.monotonic() < deadline, known
        assert known.finished_at is None, known
        time.sleep(0.1)


def steps_on(run: RunDir, *, restarts: int = 0) -> None:
    """Wait for steps that are committed after so many restarts."""
    first = api.status(run).leader.step or 0
    reach(
        run, lambda known: known.restarts == restarts and known.phase is RunPhase.RUNNING and _step(known) > first + 10
    )


def _step(known: RunStatus) -> int:
    return known.leader.step or 0


def to_its_end(run: RunDir) -> tuple[RunFinished, list[AnyEvent]]:
    """A run's last event, and all that a client has heard of it."""
    deadline = time.monotonic() + WITHIN_S
    heard: list[AnyEvent] = []
    for event in api.follow(run):
        assert time.monotonic() < deadline, heard[-5:]
        heard += [event] if event else []
    assert isinstance(heard[-1], RunFinished)
    return heard[-1], heard


def test_run_goes_to_its_end_and_the_client_has_all_of_it(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site.folder / "greet.py").write_text("import os; print('hello from', os.environ['RANK'], os.environ['TOLD'])\n")
    run = site.start("python", "greet.py", env='{"TOLD": "you"}')
    finished, _ = to_its_end(run)
    assert (finished.outcome, finished.exit_code) == (Outcome.SUCCEEDED, 0)
    assert [path.read_text() for path in find_rank_logs(run).values()] == ["hello from 0 you\n", "hello from 1 you\n"]
    until(lambda: not run.alive(), "its mirror has left")
    assert not run.secrets.exists()
    until(lambda: not site.pods("controller"), "its controller's pod is removed, and none follows")
    own = ("get", "replicaset", f"{run.run_id}-controller", "-o", "jsonpath={.spec.replicas}")
    assert site.kubectl(*own) == "0"

    # Another machine comes when nothing has the log any more but the one that started the run.
    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
        other = api.find_run(None, "lab", base=site.folder)
    ended, _ = to_its_end(other)
    assert (ended.outcome, ended.exit_code) == (Outcome.SUCCEEDED, 0)
    assert ended.reason.endswith("its log is on the machine that started it")

    def pruned(older_than_s: float, *, dry_run: bool = False) -> list[tuple[str, str]]:
        found = api.prune("lab", older_than_s=older_than_s, dry_run=dry_run, base=site.folder)
        return [(each.run, each.kept) for each in found]

    assert pruned(3600) == []
    assert pruned(0, dry_run=True) == [(run.run_id, "")]
    assert f"jobset.jobset.x-k8s.io/{run.run_id}" in objects(site.lab, site.namespace)
    assert pruned(0) == [(run.run_id, "")]
    until(lambda: not site.left(), "all but the claim is gone")


LOOKS_AROUND = """
import os, sys, time
print("knows", os.environ["PASSWORD"] == "pass" + "word-of-the-job", flush=True)
for folder, _, files in os.walk("/holdfast"):
    for name in files:
        print("sees", os.path.join(folder, name), flush=True)
open("/holdfast/data/seen-" + os.environ["RANK"], "w").close()
while not os.path.exists("/holdfast/data/enough"):
    time.sleep(0.05)
"""


def test_ranks_see_their_own_folders_and_no_key_ever_lies_on_the_volume(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", "password-of-the-job")
    site.target("jobset", volume=VOLUME.replace("}", ", folders: [data]}"))
    secret = '{"PASSWORD": {"env": "PASSWORD"}}'
    (site.folder / "look.py").write_text(LOOKS_AROUND)
    other = site.start("python", "look.py", secrets=secret)
    until(lambda: "knows" in "".join(_written(other, attempt=0)), "another run is there")
    run = site.start("python", "look.py", secrets=secret, recovery="{max_restarts: 3}")
    until(lambda: len([each for each in _written(run, attempt=0) if "knows" in each]) == 2, "both ranks look")
    claim = site.volume()

    # A controller that is replaced finds its keys, and gives the secrets to ranks that it restarts.
    site.kubectl("delete", "pod", "-l", f"holdfast/run={run.run_id},holdfast/part=controller", "--wait=false")
    until(lambda: _controllers(run) == 2, "another controller")
    api.inject_fault(run, target=FaultTarget.RANK, index=0, action=FaultAction.KILL)
    reach(run, lambda known: known.restarts == 1)
    until(lambda: len([each for each in _written(run, attempt=1) if "knows" in each]) == 2, "both look again")

    keys = {folder.token.read_text().strip() for folder in (run, other)}
    on_volume = [path for path in claim.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in on_volume} >= {"job.json", "events.jsonl", "rank-0.log", "seen-0"}
    for path in on_volume:
        text = path.read_bytes()
        assert not any(word in text for word in (b"PRIVATE KEY", b"password-of-the-job")), path
        assert not any(key.encode() in text for key in keys), path
    (claim / "data" / "enough").touch()
    for each in (run, other):
        assert to_its_end(each)[0].outcome is Outcome.SUCCEEDED
    for attempt in (0, 1):
        for text in _written(run, attempt=attempt):
            assert text.startswith("knows True")
            seen = re.findall("sees (.+)", text)
            own = f"/holdfast/(data|checkpoints|runs/{run.run_id}/(logs|checkpoints))/.+"
            assert all(re.fullmatch(own, name) for name in seen), seen


def test_without_a_volume_ranks_are_heard_from_their_pods_and_lost_checkpoints_are_named(site: Site) -> None:
    site.target("jobset", volume="")
    (site.folder / "greet.py").write_text(
        "import os, sys\nprint('hello from', os.environ['RANK'])\nsys.stdout.write('x' * 9000 + ' no end')\n"
    )
    run = site.start("python", "greet.py")
    wrote = [f"hello from {rank}\n{'x' * 9000} no end" for rank in range(2)]
    to_its_end(run)
    until(lambda: not run.alive(), "its mirror has left")
    assert _written(run, attempt=0) == wrote
    for pod in json.loads(
        site.kubectl("get", "pods", "-l", f"holdfast/run={run.run_id},holdfast/part=node", "-o", "json")
    )["items"]:
        said = site.kubectl("logs", pod["metadata"]["name"])
        assert re.search(r"^\[rank [01], attempt 0\] hello from [01]$", said, re.MULTILINE), said

    (site.folder / "saving.py").write_text(SAVING)
    run = site.start("python", "saving.py", checkpoint="{path: checkpoints, every_steps: 5}")
    until(lambda: any(isinstance(event, CheckpointCommitted) for event in api.events(run)), "a checkpoint")
    second = next(name for name in site.pods("node").values() if "node-1-" in name)
    site.kubectl("delete", "pod", second, "--grace-period=0", "--force")
    until(lambda: LOST in _found(run), "what was lost is named")
    assert "no-valid-checkpoint" not in _found(run)
    assert "volume: {claim: NAME}" in _found(run)[LOST].remedy
    api.cancel(run)
    to_its_end(run)


SAVING = """
import time, torch
from torch.nn.parallel import DistributedDataParallel
from holdfast.train import Session
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model=model, optimizer=optimizer)
for step in session.steps(100_000):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    session.commit(loss=loss)
    time.sleep(0.02)
"""
LOST = "checkpoints-lost-with-pod"


def _found(run: RunDir) -> dict[str, Finding]:
    """What was found in a run, in its events and in the words of ranks that failed of it."""
    return {event.finding.code: event.finding for event in api.events(run) if isinstance(event, FindingRaised)}


OF_EDIT = """
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: edit, namespace: NAME}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{kind: ServiceAccount, name: eve, namespace: NAME}]
"""


def test_user_who_may_edit_runs_with_a_ready_made_account(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [{"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["create", "get", "delete", "patch"]}]
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    user(site.lab, site.namespace, "eve", [*own, pods], tmp_path / "eve")
    site.lab.kubectl("create", "-f", "-", input=OF_EDIT.replace("NAME", site.namespace))
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    (ready,) = re.findall(r"^```yaml\n(apiVersion: v1\nkind: ServiceAccount.*?)^```", page, re.MULTILINE | re.DOTALL)
    site.lab.kubectl("create", "-f", "-", input=ready.replace("namespace: ml", f"namespace: {site.namespace}"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "eve"))

    def lacking() -> dict[str, Finding]:
        findings = api.check_target(None, "lab", base=site.folder)
        return {each.code: each for each in findings if each.severity is Severity.ERROR}

    until(lambda: set(lacking()) == {"not-permitted"}, "the account of its own is what it lacks")
    assert "service_account" in lacking()["not-permitted"].remedy
    site.target("jobset", volume=f"{VOLUME}service_account: holdfast\n")
    until(lambda: not lacking(), "it has all")
    run = site.start("python", "-c", "print('hello')")
    assert to_its_end(run)[0].outcome is Outcome.SUCCEEDED
    until(lambda: not run.alive(), "its mirror has left")
    until(lambda: not site.pods("controller"), "its controller's pod is removed")


class Page(httpx.Client):
    """A browser at the live page's address."""

    def __init__(self, address: str) -> None:
        at, _, fragment = address.partition("#")
        given = dict(parse_qsl(fragment))
        super().__init__(base_url=at, headers=_bearer(given["token"]), timeout=WITHIN_S)
        self.actions = _bearer(given["actions"])
        """The header that permits actions."""


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextlib.contextmanager
def live_page(run: str, target: str, *, cwd: Path) -> Generator[Page]:
    """What `holdfast web` serves of a run of a cluster."""
    command = (sys.executable, "-m", "holdfast", "web", run, "--on", target, "--port", "0", "--allow-actions")
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            with Page(server.stdout.readline().strip()) as page:
                yield page
        finally:
            server.send_signal(signal.SIGINT)
            # 0 where the signal was ignored before, as in what a script starts in the background.
            assert server.wait(WITHIN_S) in (0, 128 + signal.SIGINT)


def streamed(page: Page, run: str, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The page's view of a run, as soon as it is as wanted."""
    view: dict[str, Any] = {}
    deadline = time.monotonic() + WITHIN_S
    with page.stream("GET", f"/api/runs/{run}/stream") as answer:
        for line in answer.iter_lines():
            view |= json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if "head" in view and reached(view):
                return view
            assert time.monotonic() < deadline, view
    raise AssertionError(view)


def test_users_without_exec_start_follow_control_and_read_a_run(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holds what `check` asks of the user who starts it, the other the chart's Role of followers."""
    followers = yaml.safe_load(templates()["followers.yaml"].partition("rules:\n")[2].partition("---")[0])
    claim = {"claim": "home", "size": "1GiB", "storage_class": "lab"}
    owns = rules({"namespace": site.namespace, "queue": None, "volume": claim})
    for name, held in (("zoe", owns), ("max", followers)):
        assert not any(right in rule["resources"] for rule in held for right in ("pods/exec", "*", "pods/*"))
        user(site.lab, site.namespace, name, held, tmp_path / name)
        account = f"--as=system:serviceaccount:{site.namespace}:{name}"
        for verb in ("get", "create"):
            with pytest.raises(HoldfastError):  # kubectl's way to answer no
                site.kubectl("auth", "can-i", verb, "pods/exec", account)
    there = set(objects(site.lab, site.namespace))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "zoe"))
    site.target("jobset", volume="volume: {claim: home, size: 1GiB, storage_class: lab}\n")
    (site.folder / "table.bin").write_bytes(os.urandom(MAX_CODE_IN_SECRET_BYTES))  # too much for a Secret
    run = site.stepper()
    assert api.checkpoint(run, timeout_s=WITHIN_S).step > 0
    api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    steps_on(run, restarts=1)
    assert "rank 1" in api.diagnose_run(run).what

    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
        patch.setenv("KUBECONFIG", str(tmp_path / "max"))
        with live_page(run.run_id, "lab", cwd=site.folder) as page:
            first = streamed(page, run.run_id, lambda view: view["head"]["phase"] == "running")
            assert (first["head"]["run"], first["problems"]) == (run.run_id, [])
            last = first["head"]["step"]
            streamed(page, run.run_id, lambda view: view["head"]["step"] > last)
            other = api.find_run(run.run_id, "lab", base=site.folder)
            assert api.status(other).restarts == 1
            saved = page.post(f"/api/runs/{run.run_id}/actions/checkpoint", headers=page.actions)
            assert saved.status_code == 200, saved.text
            assert api.cancel(other)
            ended = streamed(page, run.run_id, lambda view: view["head"]["phase"] == "cancelled")
        assert ended["head"]["step"] > last
        assert to_its_end(other)[0].outcome is Outcome.CANCELLED
    assert to_its_end(run)[0].outcome is Outcome.CANCELLED
    assert other.events.read_bytes() == run.events.read_bytes()
    assert find_rank_logs(run).keys() == find_rank_logs(other).keys()
    until(lambda: set(site.left()) == there, "nothing of the run is left")

    run = site.start("python", "-c", "import os; print('bytes', os.path.getsize('table.bin'))")
    assert to_its_end(run)[0].outcome is Outcome.SUCCEEDED
    assert f"bytes {MAX_CODE_IN_SECRET_BYTES}" in run.rank_log(0, 0).read_text()
    until(lambda: not site.pods("controller"), "its controller's pod is removed")


def test_users_without_port_forward_start_follow_control_and_read_a_run_through_a_gateway(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One holds what `check` asks of the user who starts it, the other what is left of the chart's followers."""
    gateways = f"gateways-{site.namespace}"
    gateway: dict[str, Any] = {"name": GATEWAY, "namespace": gateways, "host": "runs.example", "address": "127.0.0.1"}
    site.target("jobset", volume=f"{VOLUME}controller: {{gateway: {json.dumps(gateway)}}}\n")
    assert {each.code for each in api.check_target(None, "lab", base=site.folder)} == {"operator-missing"}
    with traefik_gateway(site.lab, gateways, "runs.example") as port:
        gateway["port"] = port
        site.target("jobset", volume=f"{VOLUME}controller: {{gateway: {json.dumps(gateway)}}}\n")
        assert api.check_target(None, "lab", base=site.folder) == ()
        claim = {"claim": "home", "size": "1GiB", "storage_class": "lab"}
        about = {"namespace": site.namespace, "queue": None, "volume": claim, "controller": {"gateway": gateway}}
        followers = yaml.safe_load(templates()["followers.yaml"].partition("rules:\n")[2].partition("---")[0])
        for rule in followers:
            rule["resources"] = [each for each in rule["resources"] if each != "pods/portforward"]
        for name, held in (("zoe", rules(about)), ("max", [rule for rule in followers if rule["resources"]])):
            user(site.lab, site.namespace, name, held, tmp_path / name)
            account = f"--as=system:serviceaccount:{site.namespace}:{name}"
            with pytest.raises(HoldfastError):  # kubectl's way to answer no
                site.kubectl("auth", "can-i", "create", "pods/portforward", account)

        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "zoe"))
        (site.folder / "table.bin").write_bytes(os.urandom(MAX_CODE_IN_SECRET_BYTES))  # too much for a Secret
        run = site.stepper()
        assert api.checkpoint(run, timeout_s=WITHIN_S).step > 0
        api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
        steps_on(run, restarts=1)
        (route,) = json.loads(site.kubectl("get", "tlsroutes", "-o", "json"))["items"]
        assert route["spec"]["hostnames"] == [f"{run.run_id}.runs.example"]

        with monkeypatch.context() as patch:
            patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
            patch.setenv("KUBECONFIG", str(tmp_path / "max"))
            other = api.find_run(run.run_id, "lab", base=site.folder)
            steps_on(other, restarts=1)
            assert api.cancel(other)
            assert to_its_end(other)[0].outcome is Outcome.CANCELLED
        assert to_its_end(run)[0].outcome is Outcome.CANCELLED
        assert other.events.read_bytes() == run.events.read_bytes()
        until(lambda: not site.kubectl("get", "tlsroutes", "-o", "name"), "the route is deleted with the run")


def test_run_that_failed_is_a_failure_to_the_cluster_too(site: Site) -> None:
    run = site.start("python", "-c", "raise SystemExit(3)")
    finished, _ = to_its_end(run)
    assert (finished.outcome, finished.exit_code) == (Outcome.FAILED, 3)
    said = json.loads(site.kubectl("get", "jobset", run.run_id, "-o", "json"))["status"]
    assert said["terminalState"] == "Failed"
    assert [each["message"] for each in said["conditions"]] == [f"{finished.reason} (exit code 3)"]
    until(lambda: not site.pods("node"), "no node is made again")


QUEUES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: NAME}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: NAME}
spec:
  namespaceSelector: {}
  resourceGroups:
  - coveredResources: [cpu]
    flavors: [{name: NAME, resources: [{name: cpu, nominalQuota: "1"}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: default, namespace: NAME}
spec: {clusterQueue: NAME}
"""
"""A queue that also takes, by its name, every pod that no queue is asked for by what owns it."""


@pytest.fixture
def queues(lab: Lab, namespace: str) -> Iterator[str]:
    lab.kubectl("create", "-f", "-", input=QUEUES.replace("NAME", namespace))
    yield "default"
    lab.kubectl("delete", f"clusterqueue/{namespace}", f"resourceflavor/{namespace}", "--wait=false")


WAITS_IF_TOLD = """
import os, sys, time
print("hello from", os.environ["RANK"], os.environ["PASSWORD"] == "pass" + "word-of-the-job", flush=True)
time.sleep(float(sys.argv[1]))
"""
TREE_SECRET = """
apiVersion: v1
kind: Secret
metadata: {name: RUN-secrets}
stringData: {PASSWORD: password-of-the-job}
"""


OF_CONTROLLERS = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: NAME-controllers}
spec:
  namespaceSelector: {}
  resourceGroups:
  - coveredResources: [cpu, memory]
    flavors: [{name: NAME, resources: [{name: cpu, nominalQuota: "9"}, {name: memory, nominalQuota: 9Gi}]}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: controllers, namespace: NAME}
spec: {clusterQueue: NAME-controllers}
"""


@pytest.fixture
def queue_of_controllers(lab: Lab, namespace: str, queues: str) -> Iterator[str]:
    lab.kubectl("create", "-f", "-", input=OF_CONTROLLERS.replace("NAME", namespace))
    yield "controllers"
    lab.kubectl("delete", f"clusterqueue/{namespace}-controllers", "--wait=false")


def test_trees_that_kubectl_applies_run_are_followed_and_leave_nothing_when_they_are_deleted(
    site: Site, queues: str, queue_of_controllers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.target("jobset", volume=f"{VOLUME}controller: {{queue: {queue_of_controllers}}}\n")
    monkeypatch.setenv("PASSWORD", "password-of-the-job")
    (site.folder / "wait.py").write_text(WAITS_IF_TOLD)
    fields = [
        "image=none",
        "nodes=2",
        f"queue={queues}",
        "resources.cpu=0.1",
        'secrets={"PASSWORD": {"env": "PASSWORD"}}',
    ]

    def rendered(seconds: str, tree: str | None = None) -> Rendered:
        job = api.load(None, command=("python", "wait.py", seconds), overrides=fields)
        return api.render(job, "lab", base=site.folder, tree=tree)

    (claim,) = (each for each in rendered("0").objects if each["kind"] == "PersistentVolumeClaim")
    site.kubectl("apply", "-f", "-", input=json.dumps(claim))
    trees = {run: rendered(seconds, run) for run, seconds in (("greeter-v1", "0"), ("greeter-v2", "3600"))}
    for run, tree in trees.items():
        assert [each.code for each in tree.findings if each.severity is Severity.WARNING] == ["not-in-tree"] * 2
        assert "password-of-the-job" not in tree.text
        site.kubectl("apply", "--server-side", "-f", "-", input=tree.text)
        site.kubectl("apply", "-f", "-", input=TREE_SECRET.replace("RUN", run))
    site.kubectl("wait", "--for=condition=Completed", "jobset/greeter-v1", f"--timeout={WITHIN_S}s")

    # Any machine follows it, and ends it; its objects stay as they were applied.
    listed = api.target_runs("lab", base=site.folder)
    assert listed is not None
    assert {each.run: (each.user, each.nodes) for each in listed.runs} == dict.fromkeys(trees, ("", 2))
    first, second = (api.find_run(run, "lab", base=site.folder) for run in trees)
    ended, heard = to_its_end(first)
    assert ended.outcome is Outcome.SUCCEEDED
    assert 0 < ended.at - heard[0].at < WITHIN_S
    assert _written(first, attempt=0) == ["hello from 0 True\n", "hello from 1 True\n"]
    reach(second, lambda known: known.phase is RunPhase.RUNNING)
    api.cancel(second)
    assert to_its_end(second)[0].outcome is Outcome.CANCELLED
    until(lambda: not site.pods("node"), "no node is left")
    listed = api.target_runs("lab", base=site.folder)
    assert listed is not None
    assert {each.run: each.phase for each in listed.runs} == {"greeter-v1": "succeeded", "greeter-v2": "cancelled"}
    for run, tree in trees.items():
        owner = ("get", "jobset", run, "-o", "json")
        before = json.loads(site.kubectl(*owner))
        site.kubectl("apply", "--server-side", "-f", "-", input=tree.text)
        after = json.loads(site.kubectl(*owner))
        assert (after["metadata"]["generation"], after["spec"]) == (before["metadata"]["generation"], before["spec"])
        expected = "AllJobsCompleted" if run == "greeter-v1" else "RunCancelled"
        assert expected in {each["reason"] for each in after["status"]["conditions"]}
    kept = api.prune("lab", older_than_s=0, named=list(trees), base=site.folder)
    assert [each.kept for each in kept] == ["its objects were applied from a tree: delete them there"] * 2
    assert site.pods("node") == {}

    for run, tree in trees.items():
        site.kubectl("delete", "-f", "-", input=tree.text)
        site.kubectl("delete", "secret", f"{run}-secrets")
    site.kubectl("delete", "localqueue", "--all")
    until(lambda: not site.left(), f"left: {site.left()}")


@pytest.mark.parametrize(
    ("workload", "waits"),
    [
        ("jobset", " {run} is suspended"),
        ("pytorchjob", " {run} is suspended"),
        ("leaderworkerset", "SchedulingGated: "),
    ],
)
def test_run_that_its_queue_evicts_resumes_when_it_is_admitted_and_has_lost_no_restart(
    site: Site, queues: str, workload: str, waits: str
) -> None:
    site.target(workload)
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    options: dict[str, Any] = {"nodes": 3, "queue": queues, "resources.cpu": 0.1, "recovery.max_restarts": 0}
    job = api.load(None, command=("true",), overrides=["image=none", *(f"{name}={options[name]}" for name in options)])
    assert "kueue-integration-disabled" not in {each.code for each in api.check_target(job, "lab", base=site.folder)}
    run = site.start("python", "wait.py", str(enough), **options)
    reach(run, lambda known: known.phase is RunPhase.RUNNING)

    def set_active(active: bool) -> None:
        (admission,) = site.kubectl("get", "workloads.kueue.x-k8s.io", "-o", "name").split()
        site.kubectl("patch", admission, "--type=merge", "-p", json.dumps({"spec": {"active": active}}))

    set_active(False)
    reach(run, lambda known: all(waits.format(run=run.run_id) in node.reason for node in known.nodes.values()))
    until(lambda: not site.running("node"), "its pods are gone")
    set_active(True)
    reach(run, lambda known: known.phase is RunPhase.RUNNING)

    site.evict(sorted(site.pods("node").values())[-1])
    reach(run, lambda known: known.restarts == 2 and known.phase is RunPhase.RUNNING)
    enough.touch()
    finished, heard = to_its_end(run)
    assert finished.outcome is Outcome.SUCCEEDED
    assert [event.finding.code for event in heard if isinstance(event, RecoveryDecided)] == ["node-preempted"] * 2


@pytest.fixture(params=["kubernetes", "volcano"])
def gang_scheduler(lab: Lab, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each scheduler that places the nodes of a PodGroup."""
    with volcano_scheduler(lab) if request.param == "volcano" else contextlib.nullcontext():
        yield request.param


def test_pod_group_starts_all_nodes_or_none_and_replaces_one_that_is_lost(site: Site, gang_scheduler: str) -> None:
    """Of two runs of three nodes, on four machines with room for one each, the second waits without a machine."""
    block = f"node_selector: {{cloud.provider.com/topology-block: b0}}\npod_group: {gang_scheduler}\n"
    site.target("jobset", volume=VOLUME + block)
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    fields: dict[str, Any] = {"nodes": 3, "resources.cpu": 100, "recovery.max_restarts": 0}
    first = site.start("python", "wait.py", str(enough), **fields)
    reach(first, lambda known: known.phase is RunPhase.RUNNING)
    second = site.start("python", "wait.py", str(enough), **fields)
    waits = {"kubernetes": "minCount (3) cannot be satisfied", "volcano": "3 minAvailable"}[gang_scheduler]
    reach(second, lambda known: any(waits in node.reason for node in known.nodes.values()))
    reason = api.pending_reason(second)
    assert reason is not None
    assert reason.code == "pod-group-waiting"
    placed = site.kubectl("get", "pods", "-l", f"holdfast/run={second.run_id}", "-o", "json")
    nodes = [pod for pod in json.loads(placed)["items"] if pod["metadata"]["labels"]["holdfast/part"] == "node"]
    assert len(nodes) == 3
    assert not any(pod["spec"].get("nodeName") for pod in nodes), "it takes the one that is free"

    lost = next(name for name in site.pods("node").values() if name.startswith(first.run_id))
    site.evict(lost)
    reach(first, lambda known: known.restarts == 1 and known.phase is RunPhase.RUNNING)
    enough.touch()
    assert [to_its_end(run)[0].outcome for run in (first, second)] == [Outcome.SUCCEEDED] * 2
    site.kubectl("delete", "jobset", "--all")
    until(lambda: site.left() == [], "the groups are deleted with their runs")


def test_queue_of_volcano_lets_a_run_wait_though_machines_are_free(site: Site) -> None:
    """Of two runs of two nodes, on four machines with room for one each, a queue with quota for three runs one."""
    queue = f"q-{site.namespace}"
    site.target("jobset", volume=f"{VOLUME}pod_group: volcano\nvolcano_queue: {queue}\n")
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    fields: dict[str, Any] = {"resources.cpu": 100, "recovery.max_restarts": 0}
    with volcano_scheduler(site.lab):
        assert "referenced-object-missing" in {each.code for each in api.check_target(None, "lab", base=site.folder)}
        make_queue(site.lab, queue, weight=1, reclaimable=False, capability={"cpu": 300})
        assert api.check_target(None, "lab", base=site.folder) == ()
        first = site.start("python", "wait.py", str(enough), **fields)
        reach(first, lambda known: known.phase is RunPhase.RUNNING)
        second = site.start("python", "wait.py", str(enough), **fields)
        reach(second, lambda known: any("minAvailable" in node.reason for node in known.nodes.values()))
        until(lambda: (reason := api.pending_reason(second)) and reason.code == "pod-group-waiting", "status says why")
        enough.touch()
        assert [to_its_end(run)[0].outcome for run in (first, second)] == [Outcome.SUCCEEDED] * 2
        site.lab.kubectl("delete", "queues.scheduling.volcano.sh", queue)


HYPERNODE = """
apiVersion: topology.volcano.sh/v1alpha1
kind: HyperNode
metadata: {name: RACK}
spec:
  tier: 1
  tierName: cloud.provider.com/topology-rack
  members:
  - {type: Node, selector: {labelMatch: {matchLabels: {cloud.provider.com/topology-rack: RACK}}}}
---
"""
OCCUPANT = """
apiVersion: v1
kind: Pod
metadata: {name: MACHINE}
spec:
  nodeName: MACHINE
  terminationGracePeriodSeconds: 0
  containers: [{name: sleep, image: none, command: [sleep, "600"], resources: {requests: {cpu: 100}}}]
---
"""


def test_volcano_places_all_nodes_in_one_rack_or_none(site: Site) -> None:
    """A run of two nodes waits while two machines are free, each in another rack of two, and takes the first rack."""
    levels = "topology_levels: {rack: cloud.provider.com/topology-rack}\n"
    site.target("jobset", volume=f"{VOLUME}pod_group: volcano\n{levels}")
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    racks = {"b0-r0": "node-0", "b0-r1": "node-2"}
    with volcano_scheduler(site.lab):
        site.kubectl("apply", "-f", "-", input="".join(OCCUPANT.replace("MACHINE", each) for each in racks.values()))
        fields: dict[str, Any] = {"resources.cpu": 100, "placement": "rack"}
        job = api.load(None, command=("true",), overrides=["image=none", "nodes=2", "placement=rack"])
        assert "placement-level-missing" in {each.code for each in api.check_target(job, "lab", base=site.folder)}
        site.lab.kubectl("apply", "-f", "-", input="".join(HYPERNODE.replace("RACK", each) for each in racks))
        run = site.start("python", "wait.py", str(enough), **fields)
        reach(run, lambda known: any("minAvailable" in node.reason for node in known.nodes.values()))
        assert not site.running("node"), "two machines are free"
        site.kubectl("delete", "pod", racks["b0-r0"])
        reach(run, lambda known: known.phase is RunPhase.RUNNING)
        assert sorted(_machines(site)) == ["node-0", "node-1"]
        enough.touch()
        assert to_its_end(run)[0].outcome is Outcome.SUCCEEDED
        site.lab.kubectl("delete", "hypernodes", *racks)


def test_code_that_no_secret_holds_is_brought(site: Site) -> None:
    (site.folder / "table.bin").write_bytes(os.urandom(MAX_CODE_IN_SECRET_BYTES))
    run = site.start("python", "-c", "import os; print('bytes', os.path.getsize('table.bin'))")
    ended, _ = to_its_end(run)
    assert ended.outcome is Outcome.SUCCEEDED
    assert f"bytes {MAX_CODE_IN_SECRET_BYTES}" in run.rank_log(0, 0).read_text()


def test_start_whose_sender_goes_before_it_is_told_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()

    def interrupted(_: SubmitProcess) -> None:
        made.extend(objects(site.lab, site.namespace))
        raise KeyboardInterrupt

    monkeypatch.setattr(SubmitProcess, "detach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        site.start("sleep", "3600")
    assert any(each.startswith("jobset") for each in made)
    assert api.runs() == []
    until(lambda: site.left() == [], "all of it is gone")


def test_client_that_was_away_and_another_machine_follow_the_run_and_end_it_without_a_trace(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = site.start("python", "-c", "import time; print('up', flush=True); time.sleep(600)")
    reach(run, lambda known: known.phase is RunPhase.RUNNING)
    os.kill(json.loads(run.controller_record.read_text())["supervisor_pid"], signal.SIGKILL)
    until(lambda: not run.alive(), "its mirror is gone")
    assert api.find_run(run.run_id).alive()

    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
        listed = api.target_runs("lab", base=site.folder)
        assert listed is not None
        assert api.runs() == []
        (known,) = listed.runs
        assert (known.run, known.phase, known.running_nodes, known.nodes) == (run.run_id, "running", 2, 2)
        assert known.user
        other = api.find_run(run.run_id[:-2], "lab", base=site.folder)
        assert other.path != run.path
        assert api.status(other).phase is RunPhase.RUNNING
        until(lambda: _taken(other), "its controller hears of it")
    for each in (run, other):
        assert to_its_end(each)[0].outcome is Outcome.CANCELLED
    assert other.events.read_bytes() == run.events.read_bytes()
    assert _written(other, attempt=0) == _written(run, attempt=0) == ["up\n"] * 2
    until(lambda: not site.left(), f"left: {site.left()}")
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "third"))
    with pytest.raises(HoldfastError) as refused:
        api.find_run(run.run_id, "lab", base=site.folder)
    assert refused.value.findings[0].code == "run-not-found"


FAILS_WHEN_TOLD = """
import os, sys, time
print("rank", os.environ["RANK"], flush=True)
os.chdir("/holdfast/told")
while not (told := [name for name in ("fail", "enough") if os.path.exists(name)]):
    time.sleep(0.05)
os.rename(told[0], "told") if told == ["fail"] else None
sys.exit(3 if told == ["fail"] else 0)
"""


def test_run_without_agents_is_restarted_by_its_operator_and_told_of_from_its_pods(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.target("jobset", agent=False, volume=VOLUME.replace("}", ", folders: [told]}"))
    run = site.start("python", "-c", FAILS_WHEN_TOLD)
    until(lambda: _written(run, attempt=0) == ["rank 0\n", "rank 1\n"], "both are heard")
    assert api.status(run).phase is RunPhase.RUNNING
    assert site.pods("controller") == {}
    with pytest.raises(HoldfastError) as refused:
        api.checkpoint(run, timeout_s=60)
    assert refused.value.findings[0].code == "needs-agent"
    _touch(site, "fail")
    reach(run, lambda known: known.restarts == 1)
    until(lambda: _written(run, attempt=1) == ["rank 0\n", "rank 1\n"], "both are heard again")
    with monkeypatch.context() as patch:
        patch.setenv("HOLDFAST_HOME", str(tmp_path / "other"))
        other = api.find_run(run.run_id, "lab", base=site.folder)
    until(lambda: _written(other, attempt=1) == _written(run, attempt=1), "another machine hears them too")
    _touch(site, "enough")
    finished, heard = to_its_end(run)
    for each in (finished, to_its_end(other)[0]):
        assert (each.outcome, each.exit_code) == (Outcome.SUCCEEDED, 0)
    exits = {(one.attempt, one.rank, one.code) for one in heard if isinstance(one, RankExited)}
    assert {(1, 0, 0), (1, 1, 0)} <= exits


def _written(run: RunDir, *, attempt: int) -> list[str]:
    return [path.read_text() for log, path in find_rank_logs(run).items() if log.attempt == attempt]


def _touch(site: Site, name: str) -> None:
    pod = next(iter(site.pods("node").values()))
    site.kubectl("exec", pod, "--", "touch", f"/holdfast/told/{name}")


SAYS_WHERE = """
import os, socket
rank, size = (os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE"))
print(f"rank {rank} of {size} on {socket.gethostname()}, told {os.environ['TOLD']}", flush=True)
"""
UNKNOWN_HOSTS = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
"""What images for mpi-operator have in their ssh_config."""


@pytest.mark.root
@pytest.mark.needs("mpirun", "sshd", "ssh")
def test_mpijob_reaches_its_nodes_by_ssh_and_goes_to_its_end(site: Site) -> None:
    Path("/run/sshd").mkdir(exist_ok=True)  # as in every image that has an sshd
    program = site.folder / "says.py"
    program.write_text(SAYS_WHERE)
    site.target("mpijob", agent=False)
    options = ("--allow-run-as-root", "--mca", "plm_rsh_args", UNKNOWN_HOSTS)
    run = site.start("mpirun", *options, sys.executable, str(program), launch="mpi", env='{"TOLD": "you"}')
    finished, _ = to_its_end(run)
    said = "".join(path.read_text() for path in find_rank_logs(run).values())
    assert (finished.outcome, finished.exit_code) == (Outcome.SUCCEEDED, 0), said
    where = {f"rank {rank} of 2 on {run.run_id}-worker-{rank}, told you" for rank in range(2)}
    assert where <= set(said.splitlines())
    site.kubectl("delete", "mpijob", run.run_id)
    until(lambda: not site.left(), "nothing is left")


def test_replicas_meet_in_a_cluster_and_continue_without_one_that_is_evicted(site: Site) -> None:
    out = site.folder.parent / "out"
    out.mkdir()
    shutil.copy(PROGRAMS / "replica_trainer.py", site.folder)
    run = site.start("python", "replica_trainer.py", "0.05", str(out), **{"recovery.replicas": 2})

    def committed(replica: int, attempt: int, beyond: int = 0) -> bool:
        steps = (event for event in api.events(run) if isinstance(event, StepCommitted))
        return any((one.replica, one.attempt) == (replica, attempt) and one.step > beyond for one in steps)

    reach(run, lambda _: committed(0, 0) and committed(1, 0))
    first, second = sorted(site.pods("node").values())
    site.evict(second)
    with pytest.raises(HoldfastError, match="disruption budget"):
        site.evict(first)
    reach(run, lambda _: committed(1, 1))
    reach(run, lambda known: committed(0, 0, beyond=known.replicas[1].step or 0))
    (out / "enough").touch()
    finished, _ = to_its_end(run)
    assert finished.outcome is Outcome.SUCCEEDED
    (step, weights), (other_step, other) = (torch.load(out / f"{replica}.end") for replica in range(2))
    assert step == other_step
    assert all(torch.equal(weights[name], other[name]) for name in weights)


def test_what_dies_comes_back_in_place_and_is_counted_once(site: Site) -> None:
    run = site.stepper()
    nodes = site.pods("node")
    assert (api.run_row(run).phase, api.runs()) == (RunPhase.RUNNING, [run])
    asked_at = _step(api.status(run))
    assert api.checkpoint(run, timeout_s=WITHIN_S).step >= asked_at
    api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    steps_on(run, restarts=1)
    assert site.pods("node") == nodes
    told = api.diagnose_run(run)
    assert "rank 1" in told.what

    second = next(name for name in nodes.values() if "node-1-" in name)
    site.kubectl("delete", "pod", second, "--wait=false")
    steps_on(run, restarts=2)
    kept = {uid for uid, name in nodes.items() if name != second}
    until(lambda: len(site.pods("node")) == 2, "two nodes")
    assert set(site.pods("node")) & set(nodes) == kept

    (controller,) = site.pods("controller").values()
    nodes = site.pods("node")
    site.kubectl("delete", "pod", controller, "--grace-period=0", "--force")
    until(lambda: _controllers(run) == 2, "another controller")
    steps_on(run, restarts=2)
    assert site.pods("node") == nodes
    assert json.loads(site.kubectl("get", "jobset", run.run_id, "-o", "json"))["status"].get("restarts", 0) == 0

    api.cancel(run)
    to_its_end(run)
    posted = json.loads(site.kubectl("get", "events", "-o", "json"))["items"]
    ours = [each for each in posted if each["source"].get("component") == "holdfast"]
    assert {each["involvedObject"]["kind"] for each in ours} == {"JobSet"}
    counts = Counter(each["reason"] for each in ours)
    assert (counts["RanksStarted"], counts["FailureDetected"], counts["RanksRestarted"]) == (1, 2, 2)
    assert (counts["NodeReplaced"], counts["RunCancelled"]) == (1, 1)
    until(lambda: not site.left(), "nothing is left")


def release(folder: Path, version: str, *, protocol: int, oldest: int) -> Path:
    """Another release of holdfast: a copy that speaks other versions of the protocol; returns its PYTHONPATH."""
    package = folder / version / "holdfast"
    shutil.copytree(Path(holdfast.__file__).parent, package)
    for name, old, new in (
        ("__init__.py", f'"{holdfast.__version__}"', f'"{version}"'),
        ("protocol/orders.py", f"\nPROTOCOL = {PROTOCOL}\n", f"\nPROTOCOL = {protocol}\n"),
        ("protocol/orders.py", f"\nOLDEST_PROTOCOL = {OLDEST_PROTOCOL}\n", f"\nOLDEST_PROTOCOL = {oldest}\n"),
    ):
        text = (package / name).read_text()
        assert text.count(old) == 1
        (package / name).write_text(text.replace(old, new))
    return package.parent


def test_run_outlives_an_upgrade_a_rollback_and_a_release_too_far(site: Site, tmp_path: Path) -> None:
    """Its nodes are of 0.2.0. The lab ignores images: PYTHONPATH has their role."""
    ages = {"0.2.0": 1, "0.3.0": 2, "0.4.0": 3}
    releases = {
        version: release(tmp_path, version, protocol=PROTOCOL + age, oldest=PROTOCOL + age - 1)
        for version, age in ages.items()
    }
    of_nodes = [{"name": "node", "env": [{"name": "PYTHONPATH", "value": str(releases["0.2.0"])}]}]
    site.target("jobset", volume=f"{VOLUME}pod: {{patch: {{spec: {{containers: {json.dumps(of_nodes)}}}}}}}\n")
    run = site.stepper()
    nodes, ranks = site.pods("node"), _rank_pids(run)
    first = next(event for event in api.events(run) if isinstance(event, AgentConnected))
    assert (first.protocol, first.oldest_protocol) == (PROTOCOL + 1, PROTOCOL)

    def deploy(version: str) -> None:
        setting = f"PYTHONPATH={releases[version]}" if version in releases else "PYTHONPATH-"
        site.kubectl("set", "env", f"replicaset/{run.run_id}-controller", setting)
        site.kubectl("delete", "pod", "-l", f"holdfast/run={run.run_id},holdfast/part=controller", "--wait=false")

    def takes_over(version: str) -> None:
        deploy(version)
        until(lambda: versions()[-1] == version, f"a controller of {version}")
        steps_on(run)

    def versions() -> list[str]:
        return [event.version for event in api.events(run) if isinstance(event, ControllerStarted)]

    own = holdfast.__version__
    takes_over("0.3.0")
    deploy("0.4.0")
    until(lambda: (seen := api.staleness(run)) and seen.code == "controller-failing", "status says that it fails")
    seen = api.staleness(run)
    assert seen is not None
    spoken, own_spoken = (f"{PROTOCOL + age} and {PROTOCOL + age + 1}" for age in (0, 2))
    assert f"the agent of node0 speaks protocol {spoken}, and this controller {own_spoken}" in seen.evidence[0]
    takes_over(own)
    assert versions() == [own, "0.3.0", own]
    assert (site.pods("node"), _rank_pids(run), api.status(run).restarts) == (nodes, ranks, 0)
    assert not [event for event in api.events(run) if isinstance(event, RankExited)]
    api.cancel(run)
    assert to_its_end(run)[0].outcome is Outcome.CANCELLED


def _rank_pids(run: RunDir) -> set[int]:
    """Process ids of ranks, as agents last reported them."""
    joined = {event.node: event for event in api.events(run) if isinstance(event, AgentConnected | RanksStarted)}
    return {
        rank.pid
        for event in joined.values()
        for rank in (event.running if isinstance(event, AgentConnected) else event.ranks)
    }


def test_log_that_is_lost_with_its_pod_comes_back_from_the_nodes(site: Site) -> None:
    site.target("jobset", volume="")
    run = site.stepper(checkpoint=(site.folder.parent / "checkpoints").as_uri())
    api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    steps_on(run, restarts=1)
    nodes, story = site.pods("node"), api.events(run)

    (controller,) = site.pods("controller").values()
    site.kubectl("delete", "pod", controller, "--grace-period=0", "--force")
    until(lambda: _controllers(run) == 2, "another controller")
    steps_on(run, restarts=1)
    assert site.pods("node") == nodes
    assert api.events(run)[: len(story)] == story
    assert [event.finding.code for event in api.events(run) if isinstance(event, FindingRaised)].count(RECALLED) == 1

    # A node that comes after that is known for what it is, and has the code that it runs.
    second = next(name for name in nodes.values() if "node-1-" in name)
    site.kubectl("delete", "pod", second, "--grace-period=0", "--force")
    steps_on(run, restarts=2)

    # A controller that nothing in the cluster would restart.
    site.kubectl("delete", "replicaset", f"{run.run_id}-controller", "--cascade=foreground")
    until(lambda: _controllers(run) == 3, "a controller of another ReplicaSet")
    steps_on(run, restarts=2)
    api.cancel(run)
    to_its_end(run)
    until(lambda: not site.left(), "nothing is left")


@pytest.mark.parametrize(
    ("volume", "heard"), [(VOLUME, True), ("", True), ("", False)], ids=["volume", "no-volume", "no-volume-unheard"]
)
def test_controller_that_is_lost_again_and_again_is_back_each_time(site: Site, volume: str, heard: bool) -> None:
    site.target("jobset", volume=volume)
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    run = site.start("python", "wait.py", str(enough))
    reach(run, lambda known: known.phase is RunPhase.RUNNING)
    nodes, story = site.pods("node"), api.events(run)
    for life in range(2, LOSSES + 2):
        (controller,) = site.pods("controller").values()
        site.kubectl("delete", "pod", controller, "--grace-period=0", "--force")
        lost = time.monotonic()
        until(lambda former=controller: _others(site, former), "another pod")
        assert time.monotonic() - lost < AT_ONCE_S, life
        # One is lost as soon as it is heard of, or as soon as it is there; what was told stays told.
        if heard or life == LOSSES + 1:
            lives = life if heard else 2
            until(lambda lives=lives: _controllers(run) >= lives, f"controller {life}")
        assert api.events(run)[: len(story)] == story
        story = api.events(run)
    until(lambda: _heard(run) == {0, 1}, "both nodes are with the last")
    assert (api.status(run).restarts, site.pods("node")) == (0, nodes)
    # The end of a run is the end of its controller, which nothing follows.
    enough.touch()
    finished, _ = to_its_end(run)
    assert finished.outcome is Outcome.SUCCEEDED
    until(lambda: not site.pods("controller"), "its controller's pod is gone")
    said = site.kubectl("get", "replicaset", f"{run.run_id}-controller", "-o", "jsonpath={.spec.replicas}")
    assert said == "0"


def _others(site: Site, lost: str) -> set[str]:
    """Pods of controllers except a lost one."""
    return set(site.pods("controller").values()) - {lost}


def _heard(run: RunDir) -> set[int]:
    """Nodes that have joined the latest controller."""
    events = api.events(run)
    last = max(index for index, event in enumerate(events) if isinstance(event, ControllerStarted))
    return {event.node for event in events[last:] if isinstance(event, AgentConnected)}


@pytest.mark.parametrize("workload", ["trainjob", "pytorchjob", "mpijob", "leaderworkerset"])
def test_other_kinds_of_object_run_and_recover_alike(site: Site, workload: str) -> None:
    site.target(workload)
    run = site.stepper()
    nodes = site.pods("node")
    api.inject_fault(run, target=FaultTarget.RANK, index=1, action=FaultAction.KILL)
    steps_on(run, restarts=1)
    of_nodes = ("get", "pods", "-l", "holdfast/part=node", "-o")
    assert site.kubectl(*of_nodes, "jsonpath={.items[*].status.containerStatuses[0].restartCount}") == "0 0"
    assert site.pods("node") == nodes
    lost = site.kubectl(*of_nodes, "jsonpath={.items[1].metadata.uid}")
    site.kubectl("delete", "pod", nodes[lost], "--wait=false")
    steps_on(run, restarts=2)
    assert len(set(site.pods("node")) & set(nodes)) == 1
    api.cancel(run)
    to_its_end(run)
    until(lambda: not site.left(), "nothing is left")


def test_leaderworkerset_starts_all_nodes_again_for_its_leader_and_ends_with_its_run(site: Site) -> None:
    site.target("leaderworkerset")
    (site.folder / "wait.py").write_text(WAITS)
    enough = site.folder.parent / "enough"
    run = site.start("python", "wait.py", str(enough), nodes=3, **{"recovery.max_restarts": 1})
    reach(run, lambda known: known.phase is RunPhase.RUNNING)
    before = site.pods("node")
    assert sorted(before.values()) == [f"{run.run_id}-0", f"{run.run_id}-0-1", f"{run.run_id}-0-2"]
    site.kubectl("delete", "pod", f"{run.run_id}-0", "--wait=false")
    reach(run, lambda known: known.restarts == 1 and known.phase is RunPhase.RUNNING)
    assert not set(site.pods("node")) & set(before)
    enough.touch()
    finished, _ = to_its_end(run)
    assert (finished.outcome, finished.exit_code) == (Outcome.SUCCEEDED, 0)
    until(lambda: not site.pods("node"), "its pods are not started again")
    ended = json.loads(site.kubectl("get", "leaderworkerset", run.run_id, "-o", "json"))
    reasons = {each["type"]: each["reason"] for each in ended["status"]["conditions"] if each["status"] == "True"}
    assert (ended["spec"]["replicas"], reasons["Succeeded"]) == (0, "RunSucceeded")
    there = api.target_runs("lab", base=site.folder)
    assert there is not None
    assert [(each.run, each.phase) for each in there.runs] == [(run.run_id, TargetRunPhase.SUCCEEDED)]
    assert [each.kept for each in api.prune("lab", older_than_s=0, base=site.folder)] == [""]
    until(lambda: not site.left(), f"left: {site.left()}")


def test_node_with_a_failed_device_moves_to_another_machine(site: Site) -> None:
    run = site.stepper()
    before = _machines(site)
    api.inject_fault(run, target=FaultTarget.GPU, index=1, action=FaultAction.FAIL)
    steps_on(run, restarts=1)
    after = _machines(site)
    assert (after[0], after[1] != before[1]) == (before[0], True)
    told = {event.finding.code for event in api.events(run) if isinstance(event, RecoveryDecided | FindingRaised)}
    assert {"gpu-failed", "machine-quarantined", "machine-not-cordoned"} <= told
    api.cancel(run)
    to_its_end(run)
    later = site.start("true")
    terms = "jsonpath={..nodeAffinity..matchFields[*].values[*]}"
    assert site.kubectl("get", "jobset", later.run_id, "-o", terms) == before[1]
    api.cancel(later)
    to_its_end(later)


OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
MACHINE_LOSSES = (
    (NodeState.OFF, ()),  # sooner than Kubernetes knows about the machine: the scheduler may choose it again
    (NodeState.OFF, ("taint", "node", "MACHINE", f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute")),
    (NodeState.OFF, ("delete", "node", "MACHINE")),
    (NodeState.SHUT_DOWN, ()),
)
"""States of machines that are lost, and what an administrator then tells the cluster."""


def test_lost_machines_nodes_move_and_the_others_stay(site: Site) -> None:
    run = site.stepper(**{"recovery.node_grace_s": 6})
    (controller,) = site.pods("controller").values()
    for restarts, (state, words) in enumerate(MACHINE_LOSSES, 1):
        nodes = site.pods("node")
        machines = {pod: _machine(site, pod) for pod in nodes.values()}
        lost = min(machines.values(), key=lambda machine: machine == _machine(site, controller))
        with in_state(site.lab, lost, state):
            if words:
                site.lab.kubectl(*(lost if word == "MACHINE" else word for word in words))
            steps_on(run, restarts=restarts)
            kept = {uid for uid, pod in nodes.items() if machines[pod] != lost}
            assert set(site.pods("node")) & set(nodes) == kept
            assert lost in _reasons(run)[-1]
    api.cancel(run)
    to_its_end(run)
    until(lambda: not site.left(), "nothing is left")


def test_node_of_a_silent_kubelet_runs_on_and_is_fenced_once_its_pod_is_given_up(site: Site) -> None:
    """Of four machines, three have a node each: one's kubelet is silent, one's disk is full, one's Node is deleted."""
    run = site.stepper(nodes=3, **{"resources.cpu": 100})
    (controller,) = site.pods("controller").values()
    machines, busy = _machines(site), _machine(site, controller)
    silent, full = [node for node, machine in enumerate(machines) if machine != busy][:2]
    (old,) = (uid for uid, name in site.pods("node").items() if f"-node-{silent}-" in name)
    with in_state(site.lab, machines[silent], NodeState.KUBELET_DOWN):
        with in_state(site.lab, machines[full], NodeState.DISK_FULL):
            steps_on(run, restarts=1)
            assert f"{machines[full]} is gone: Evicted: The node was low on resource" in _reasons(run)[-1]

        (deleted,) = {machine.name for machine in FOUR_NODES} - set(machines)  # where that node is now
        site.lab.kubectl("delete", "node", deleted)
        steps_on(run, restarts=1)
        site.lab.set_state(deleted, NodeState.ON)  # before the cluster collects the pods of a deleted Node, in a minute

        # The cluster gives its pod up, and makes another one, which waits: the run has its node.
        until(lambda: old not in (there := site.pods("node")) and len(there) == 3, "its pod has a successor")
        steps_on(run, restarts=1)

        name = site.kubectl("get", "pods", "-o", f"jsonpath={{.items[?(@.metadata.uid=='{old}')].metadata.name}}")
        site.kubectl("delete", "pod", name, "--grace-period=0", "--force")
        steps_on(run, restarts=2)
        until(lambda: not processes.by_env(processes.all_pids(), **{MARK: f"{old}/node"}), "its processes have ended")
    steps_on(run, restarts=2)
    for steps in sorted(site.volume().rglob("steps-*.txt")):
        done = [tuple(map(int, row.split()[:2])) for row in steps.read_text().splitlines()]
        assert [attempt for attempt, _ in done] == sorted(attempt for attempt, _ in done), steps
        assert {step for _, step in done} == set(range(1, done[-1][1] + 1)), steps
    api.cancel(run)
    to_its_end(run)


@contextlib.contextmanager
def in_state(lab: Lab, machine: str, state: NodeState) -> Generator[None]:
    """A machine with a fault."""
    lab.set_state(machine, state)
    try:
        yield
    finally:
        lab.set_state(machine, NodeState.ON)
        if OUT_OF_SERVICE in lab.kubectl("get", "node", machine, "-o", "jsonpath={.spec.taints[*].key}"):
            lab.kubectl("taint", "node", machine, f"{OUT_OF_SERVICE}-")


def _reasons(run: RunDir) -> list[str]:
    """Why each node was replaced."""
    return [event.reason for event in api.events(run) if isinstance(event, NodeRequested) and event.generation]


def _taken(run: RunDir) -> bool:
    """Whether a request to cancel was taken: a mirror that has just come up hands nothing on yet, or no answer back."""
    try:
        api.cancel(run)
    except HoldfastError as error:
        return error.findings[0].code == "run-finished"
    return True


def _machine(site: Site, pod: str) -> str:
    return site.kubectl("get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")


def _machines(site: Site) -> list[str]:
    """The machine of each node, by its number."""
    found = json.loads(site.kubectl("get", "pods", "-l", "holdfast/part=node", "-o", "json"))["items"]
    staying = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
    numbered = {pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"]: pod["spec"]["nodeName"] for pod in staying}
    return [numbered[number] for number in sorted(numbered)]


def _controllers(run: RunDir) -> int:
    return sum(isinstance(event, ControllerStarted) for event in api.events(run))
