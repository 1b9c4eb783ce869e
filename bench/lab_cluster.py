"""A bench's lab cluster: a separate cluster, a namespace, targets, and the commands started there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import BIN, ContenderFailed
from holdfast import api
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.object_names import PLACEHOLDER_ID
from holdfast.launch.local.netns import NetnsInterface
from holdfast.security.tls import make_identity
from holdfast.security.tokens import TokenIssuer, new_token
from lab import Lab
from lab.state import NODE_LOST_AFTER_S

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "lab": {},
    "bare": {"agent": False},
    "trainjob": {"agent": False, "workload": "trainjob"},
}
"""Targets on the cluster: with holdfast, and without it as the two kinds of object."""

ALWAYS = (
    "configmap/kube-root-ca.crt",
    "configmap/holdfast-quarantine",
    "serviceaccount/default",
    "persistentvolumeclaim/home",
    "localqueue.kueue.x-k8s.io/borrower",
    "localqueue.kueue.x-k8s.io/lender",
)
"""Objects that a namespace always has; the volume's claim outlives its runs."""

CLEANUP_TIMEOUT_S = 60.0
BEAT_S = 0.02


@dataclass(frozen=True, kw_only=True)
class LabSite:
    """A namespace of a cluster, and a project whose targets lead there."""

    lab: Lab
    namespace: str
    folder: Path

    def out(self) -> Path:
        """A new directory for the ranks' output; pods see this machine's files."""
        return Path(tempfile.mkdtemp(prefix="out-", dir=self.folder))

    def job(self, *command: str, **fields: Any) -> Job:
        """A job of two nodes with a command."""
        given = {"image": "none", "nodes": 2, "name": "bench", "recovery.max_restarts": 1000, **fields}
        return api.load_job(None, command=command, overrides=[f"{name}={value}" for name, value in given.items()])

    def kubectl(self, *words: str, input: str | None = None) -> str:
        """The output of kubectl for this namespace."""
        return self.lab.kubectl("-n", self.namespace, *words, input=input)

    def pods(self, part: str) -> list[str]:
        """Names of the pods of a part of the run that are there to stay, in order."""
        found = json.loads(self.kubectl("get", "pods", "-l", f"holdfast/part={part}", "-o", "json"))["items"]
        there = [pod for pod in found if pod["status"]["phase"] in ("Pending", "Running")]
        return sorted(pod["metadata"]["name"] for pod in there if "deletionTimestamp" not in pod["metadata"])

    def machine(self, pod: str) -> str:
        """The machine of a pod."""
        return self.kubectl("get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")

    @contextlib.contextmanager
    def command(self, *words: str, input: str | None = None) -> Generator[subprocess.Popen[str]]:
        """Run a user's command in this project until the block ends; keep its output for `last_words`."""
        with (self.folder / "commands.log").open("a") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, cwd=self.folder, start_new_session=True
            )
        assert process.stdin is not None
        try:
            with process.stdin as given:
                given.write(input or "")
            yield process
        finally:
            process.kill()
            process.wait()

    def holdfast(self, job: Job, target: str = "lab") -> list[str]:
        """`holdfast run --on TARGET` of a job."""
        path = self.folder / "job.json"
        path.write_text(job.model_dump_json(exclude_defaults=True))
        return [str(BIN / "holdfast"), "run", "--on", target, str(path)]

    def applied(self) -> list[str]:
        """`kubectl apply` of its standard input."""
        return self.lab.kubectl_command("-n", self.namespace, "apply", "-f", "-")

    def manifest(self, job: Job, target: str = "lab") -> str:
        """The manifest of a job, with its own name and secrets, its code already in the image."""
        objects = api.render(job, target, base=self.folder).objects
        fresh = "".join(secrets.choice("abcdefghij") for _ in PLACEHOLDER_ID)
        text = json.dumps(objects).replace(PLACEHOLDER_ID, fresh)
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": [self._whole(one) for one in json.loads(text)]})

    def _whole(self, one: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, str] = one.get("stringData", {})
        if one["kind"] == "ConfigMap":
            accepted = json.loads(one["data"]["job.json"])
            accepted.pop("code")
            return {**one, "data": {"job.json": json.dumps(accepted)}}
        known = {name: self._keys[name] for name in values if name in self._keys}
        return {**one, "stringData": known} if values else one

    @property
    def _keys(self) -> Mapping[str, str]:
        return json.loads((self.folder / "keys.json").read_text())

    def wait_for(self, ready: Callable[[], bool], within_s: float) -> None:
        """Wait for a condition; raise ContenderFailed with the last output."""
        until(ready, within_s, self.last_words)

    def left(self) -> list[str]:
        """Every object in the namespace that is not always there."""
        kinds = self.lab.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
        return sorted(set(self.kubectl("get", listed, "-o", "name", "--ignore-not-found").split()) - set(ALWAYS))

    def last_words(self) -> str:
        """The last output of the commands, and the existing pods."""
        return (self.folder / "commands.log").read_text()[-3000:] + self.kubectl("get", "pods", "-o", "wide")

    def clear(self) -> None:
        """Delete all runs, and wait until they are gone."""
        runs, access = "jobsets,trainjobs,trainingruntimes,replicasets,jobs", "roles,rolebindings,serviceaccounts"
        chosen = ("-l", "app.kubernetes.io/name=holdfast")
        self.kubectl(
            "delete",
            f"{runs},services,configmaps,secrets,networkpolicies,{access}",
            *chosen,
            "--wait=false",
            "--ignore-not-found",
        )
        self.wait_for(lambda: not self.kubectl("get", "pods,jobsets", "-o", "name"), CLEANUP_TIMEOUT_S)
        for run in api.runs():
            self.wait_for(lambda run=run: not run.alive(), CLEANUP_TIMEOUT_S)


def until(ready: Callable[[], bool], within_s: float, words: Callable[[], str]) -> None:
    """Wait for a condition; raise ContenderFailed with `words` at the timeout."""
    deadline = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > deadline:
            raise ContenderFailed(f"not within {within_s:g} s: {words()}")
        time.sleep(BEAT_S)


@contextlib.contextmanager
def site(
    kept: Path | None = None,
    interfaces: tuple[NetnsInterface, ...] = (NetnsInterface(),),
    node_lost_after_s: int = NODE_LOST_AFTER_S,
) -> Generator[LabSite]:
    """A cluster for the bench, which ends with it.

    With a directory that is kept, the cluster stays until the bench succeeds, and the next command finds it.
    """
    folder = kept or Path(tempfile.mkdtemp(prefix="hfcluster-"))
    lab, namespace, project = Lab(folder / "lab"), "bench", folder / "project"
    os.environ |= {"KUBECONFIG": str(lab.kubeconfig), "HOLDFAST_HOME": str(folder / "home")}
    targets = project / ".holdfast" / "targets"
    targets.mkdir(parents=True, exist_ok=True)
    volume = {"claim": "home", "size": "1GiB", "storage_class": "lab"}
    place = {"kind": "kubernetes", "namespace": namespace, "user": os.geteuid(), "volume": volume}
    for name, more in TARGETS.items():
        (targets / f"{name}.yaml").write_text(json.dumps({**place, **more}))
    if not (project / "keys.json").exists():
        (project / "keys.json").write_text(json.dumps(_keys(folder)))
    (project / "commands.log").touch()
    lab.up(interfaces=interfaces, node_lost_after_s=node_lost_after_s, dies_with_parent=kept is None)
    gone_on_with = False
    try:
        if f"namespace/{namespace}" not in lab.kubectl("get", "namespaces", "-o", "name").split():
            lab.kubectl("create", "namespace", namespace)
        yield LabSite(lab=lab, namespace=namespace, folder=project)
    except BaseException:
        gone_on_with = kept is not None
        raise
    finally:
        if not gone_on_with:
            lab.down()
            shutil.rmtree(folder, ignore_errors=True)


def _keys(folder: Path) -> dict[str, str]:
    """Contents of a run's Secrets, by name: one set serves every manifest that is applied by hand."""
    ca, identity = folder / "ca.pem", folder / "identity.pem"
    make_identity(ca, identity)
    token = new_token()
    keys = TokenIssuer(token)
    own = {"token": token, "ca.pem": ca.read_text(), "identity.pem": identity.read_text()}
    return own | {f"node{node}": keys.unassigned_node_token(node) for node in range(2)}
