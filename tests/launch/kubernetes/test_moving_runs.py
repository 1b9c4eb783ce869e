"""A run that moves from this machine into a cluster and back, by checkpoints in an object store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.runs.conftest import Runs, WatchedRun
from tests.runs.test_resume import ENDLESS, LOOP, assert_equal, resumed_from, to_step, unbroken, weights_of
from tests.waiting import until

from holdfast import api
from holdfast import runs as python_runs
from holdfast.events import CheckpointCommitted, Outcome, StepCommitted
from lab import Lab
from lab.programs import lab_tag

pytestmark = pytest.mark.slow

BUCKET = "models"
TARGET = (
    "kind: kubernetes\nnamespace: {namespace}\nuser: {user}\nvolume: {{claim: home, size: 1GiB, storage_class: lab}}\n"
)


@pytest.fixture
def store(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, str]]:
    """An object store that pods reach; the variables by which a program does."""
    import s3fs
    from moto.server import ThreadedMotoServer

    shown = subprocess.check_output(["ip", "-j", "-4", "address", "show", "dev", f"hf{lab_tag(lab.folder)}"])
    address = json.loads(shown)[0]["addr_info"][0]["local"]
    server = ThreadedMotoServer(address, port=0, verbose=False)
    server.start()
    told = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(BUCKET)
    yield told
    server.stop()


@pytest.fixture
def project(lab: Lab, namespace: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the program, and the target `lab`."""
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    folder = tmp_path / "project"
    targets = folder / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "lab.yaml").write_text(TARGET.format(namespace=namespace, user=os.geteuid()))
    shutil.copy(LOOP, folder)
    yield folder
    for run in api.runs():
        lab.kubectl("delete", "jobset", "-n", namespace, "--all", "--wait=false")
        until(lambda run=run: not run.alive(), "its processes here are gone")


def cancelled(watched: WatchedRun) -> int:
    """The last step that a run saved before it was cancelled."""
    watched.wait_for(StepCommitted)
    api.cancel(watched.folder)
    assert watched.wait_for_end().outcome is Outcome.CANCELLED
    return watched.all(CheckpointCommitted)[-1].step


def test_training_that_moves_into_a_cluster_and_back_is_bit_exact(
    project: Path, store: dict[str, str], tmp_path: Path
) -> None:
    env = {**store, "OMP_NUM_THREADS": "1"}
    fields = {
        "checkpoint": f"{{path: s3://{BUCKET}/run, every_steps: 1000}}",
        "env": json.dumps(env),
        "nodes": 2,
        "recovery": "{max_restarts: 0, prewarm: false}",
    }
    job = api.load(
        None,
        command=(sys.executable, "loop.py", ENDLESS, str(tmp_path / "weights")),
        overrides=[f"{name}={value}" for name, value in fields.items()],
    )
    here = WatchedRun(api.start(job, "local", base=project))
    first = cancelled(here)
    there = WatchedRun(python_runs.Run(here.folder).resume(on="lab", overrides=["image=none"]).folder)
    assert resumed_from(there) == (here.folder.run_id, first)
    second = cancelled(there)
    assert second > first
    last = second + 100
    back = WatchedRun(
        python_runs.Run(there.folder).resume(on="local", overrides=[to_step(last, tmp_path / "moved")]).folder
    )
    assert back.wait_for_end().outcome is Outcome.SUCCEEDED
    assert resumed_from(back) == (there.folder.run_id, second)
    assert_equal(weights_of(tmp_path / "moved"), unbroken(Runs(tmp_path), tmp_path, last))
