"""Trees of manifests in a git repository, which the real controllers of Flux and Argo CD apply and delete."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.launch.kubernetes.test_cluster_runs import QUEUES, Site, reach, to_its_end
from tests.waiting import until

from holdfast import api
from holdfast.events import Outcome
from holdfast.report.rank_logs import find_rank_logs
from holdfast.report.run_status import RunPhase
from lab import Lab
from lab.argo_cd import NAMESPACE, argo_cd
from lab.client import LabClient
from lab.flux_controllers import flux_controllers
from lab.git_repository import git_repository
from lab.toolchain import ARGO_CD, FLUX, OPERATORS, Module, build_impossible_reason, is_built, source_folder

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "gitops.md"
URL = "https://git.example/team/runs.git"
EMPTY = {"runs/README.md": "A folder for each run.\n"}
RUN = "llama-v1"
_NUMBERS = itertools.count(1)
EXTERNAL_SECRETS = "github.com/external-secrets/external-secrets@v1.3.2"
CHECKSUM = "h1:u2J8RjlHIeF0oZCqtl92adI/uZWUwOesJIDkfql6LqQ="
TOKEN = "from the team's store"


@dataclass(frozen=True)
class Tool:
    """What applies the folders of a repository."""

    module: Module
    start: Callable[[Lab], AbstractContextManager[None]]
    kind: str
    """A kind of object that its manifests in the page have."""
    compared: Callable[[Site, str], None]
    """Have it look at a commit, and wait until the cluster is as that says."""
    applied_again: Callable[[Site], None]
    """Have it apply the run's objects once more."""


def _until_handled(site: Site, what: str) -> dict[str, Any]:
    """Have one of Flux's objects reconciled now; return its status."""
    asked = str(next(_NUMBERS))
    site.kubectl("annotate", "--overwrite", what, f"reconcile.fluxcd.io/requestedAt={asked}")

    def status() -> dict[str, Any]:
        return json.loads(site.kubectl("get", what, "-o", "json")).get("status", {})

    return until(lambda: (known := status()).get("lastHandledReconcileAt") == asked and known, f"{what}: {status()}")


def _flux_compared(site: Site, commit: str) -> None:
    def fetched() -> bool:  # a first attempt may fail on a busy machine
        return commit in _until_handled(site, "gitrepository/runs").get("artifact", {}).get("revision", "")

    until(fetched, "the commit was fetched")
    status = _until_handled(site, "kustomization/runs")
    assert commit in status["lastAppliedRevision"], status


def _flux_applied_again(site: Site) -> None:
    _until_handled(site, "kustomization/runs")


def _application(site: Site) -> dict[str, Any]:
    found = site.lab.kubectl("get", "application", RUN, "-n", NAMESPACE, "-o", "json", "--ignore-not-found")
    return json.loads(found) if found else {}


def _argo_compared(site: Site, commit: str) -> None:
    annotation = "argocd.argoproj.io/application-set-refresh"
    site.lab.kubectl("annotate", "applicationset", "runs", "-n", NAMESPACE, f"{annotation}=true")
    done = ("get", "applicationset", "runs", "-n", NAMESPACE, "-o", "jsonpath={.metadata.annotations}")
    until(lambda: annotation not in site.lab.kubectl(*done), "the ApplicationSet was compared")
    known = _application(site)
    if not known or "deletionTimestamp" in known["metadata"]:
        return
    site.lab.kubectl("annotate", "application", RUN, "-n", NAMESPACE, "argocd.argoproj.io/refresh=hard")

    def is_synced() -> bool:
        known = _application(site)
        sync = known.get("status", {}).get("sync", {})
        refreshed = "argocd.argoproj.io/refresh" not in known["metadata"].get("annotations", {})
        return refreshed and (sync.get("status"), sync.get("revision")) == ("Synced", commit)

    until(is_synced, "it is synced")


def _argo_applied_again(site: Site) -> None:
    before = _application(site)["status"]["operationState"]["finishedAt"]
    sync = {"syncOptions": ["ServerSideApply=true"], "prune": True}
    patch = json.dumps({"operation": {"initiatedBy": {"username": "test"}, "sync": sync}})
    site.lab.kubectl("patch", "application", RUN, "-n", NAMESPACE, "--type=merge", "-p", patch)

    def finished() -> dict[str, Any]:
        known = _application(site)
        state = known["status"]["operationState"]
        is_over = "operation" not in known and state.get("finishedAt") and state["startedAt"] >= before
        return state if is_over else {}

    state = until(finished, "it was synced")
    assert state["phase"] == "Succeeded", state


ARGO = "argo-cd"
TOOLS = {
    "flux": Tool(FLUX, flux_controllers, "Kustomization", _flux_compared, _flux_applied_again),
    ARGO: Tool(ARGO_CD, argo_cd, "ApplicationSet", _argo_compared, _argo_applied_again),
}


BUILT = [name for name in TOOLS if name != ARGO or is_built(ARGO_CD)]
"""Argo CD takes too long to build for every change: `python -m lab build argocd`."""


@pytest.fixture(params=BUILT)
def tool(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Tool]:
    chosen = TOOLS[request.param]
    if reason := build_impossible_reason(chosen.module):
        pytest.skip(f"{request.param} is not built, and {reason}")
    with chosen.start(lab):
        yield chosen


@pytest.fixture
def site(
    lab: Lab, lab_client: LabClient, namespace: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    project = tmp_path / "project"
    project.mkdir()
    lab.kubectl("create", "-f", "-", input=QUEUES.replace("NAME", namespace).replace("default", "train"))
    yield Site(lab, lab_client, namespace, project)
    lab.kubectl("delete", f"clusterqueue/{namespace}", f"resourceflavor/{namespace}", "--wait=false")


def shown(kind: str, url: str, namespace: str) -> str:
    """The page's manifests with an object of a kind, for another repository and namespace."""
    blocks = re.findall(r"^```yaml\n(.+?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (each for each in blocks if f"kind: {kind}\n" in each)
    return re.sub(r"namespace: ml\b", f"namespace: {namespace}", block.replace(URL, url))


def make_secret(site: Site, name: str, value: str) -> None:
    """Do what External Secrets does for an ExternalSecret whose store has one value."""
    asked = json.loads(site.kubectl("get", "externalsecret", name, "-o", "json"))
    owner = {key: asked["metadata"][key] for key in ("name", "uid")}
    owner |= {"apiVersion": asked["apiVersion"], "kind": asked["kind"], "controller": True}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": asked["spec"]["target"]["name"], "ownerReferences": [owner]},
        "stringData": {each["secretKey"]: value for each in asked["spec"]["data"]},
    }
    site.kubectl("create", "-f", "-", input=json.dumps(secret))


def test_tree_in_a_repository_is_applied_once_and_deleted_with_its_folder(
    site: Site, tool: Tool, tmp_path: Path
) -> None:
    program = "import os, time; print(os.environ['HF_TOKEN'], flush=True); time.sleep(3600)\n"
    (site.folder / "wait.py").write_text(program)
    fields = ["image=none", "nodes=2", "queue=train", "resources.cpu=0.1", "secrets.HF_TOKEN.env=HF_TOKEN"]
    job = api.load(None, command=("python", "wait.py"), overrides=fields)
    (claim,) = (
        each for each in api.render(job, "lab", base=site.folder).objects if each["kind"] == "PersistentVolumeClaim"
    )
    site.kubectl("apply", "-f", "-", input=json.dumps(claim))
    tree = {
        f"runs/{RUN}/run.yaml": api.render(job, "lab", base=site.folder, tree=RUN).text,
        f"runs/{RUN}/secrets.yaml": shown("ExternalSecret", URL, site.namespace),
    }
    crd = "config/crds/bases/external-secrets.io_externalsecrets.yaml"
    defined = source_folder(OPERATORS, EXTERNAL_SECRETS, checksum=CHECKSUM) / crd
    site.lab.kubectl("apply", "--server-side", "-f", defined)

    def spec() -> tuple[int, dict[str, Any]]:
        owner = json.loads(site.kubectl("get", "jobset", RUN, "-o", "json"))
        return owner["metadata"]["generation"], owner["spec"]

    with git_repository(tmp_path / "repository") as repository:
        first = repository.commit({**EMPTY, **tree})
        manifests = shown(tool.kind, repository.url, site.namespace)
        site.lab.kubectl("apply", "-f", "-", input=manifests)
        tool.compared(site, first)
        make_secret(site, f"{RUN}-secrets", TOKEN)
        site.kubectl("wait", "--for=create", f"secret/{RUN}-keys", "--timeout=240s")
        run = api.find_run(RUN, "lab", base=site.folder)
        reach(run, lambda known: known.phase is RunPhase.RUNNING)
        until(lambda: {path.read_text() for path in find_rank_logs(run).values()} == {f"{TOKEN}\n"}, "both have it")
        admitted = spec()
        tool.applied_again(site)
        tool.compared(site, repository.commit({**EMPTY, **tree, "runs/README.md": "Changed.\n"}))
        assert spec() == admitted

        api.cancel(run)
        assert to_its_end(run)[0].outcome is Outcome.CANCELLED
        tool.applied_again(site)
        assert spec() == admitted
        until(lambda: not site.pods("node"), "no node is left")

        tool.compared(site, repository.commit(EMPTY))
        until(lambda: RUN not in str(site.left()), f"left: {site.left()}")
        site.lab.kubectl("delete", "-f", "-", input=manifests)
    site.kubectl("delete", "localqueue", "--all")
    until(lambda: not site.left(), f"left: {site.left()}")
