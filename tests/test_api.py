"""What the functions of api.py say of a run whose controller is silent, gone, over, or could not be started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import CancelRequested, DrillAction, DrillTarget, Outcome, RunCreated, RunFinished
from holdfast.events.log import EventWriter, sealed
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.launch.kubernetes.place import Place, record
from holdfast.report.status import Phase

ENDED = RunFinished(at=2.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished")


@pytest.fixture
def run(home: Path) -> RunFolder:
    """A run that was accepted, and that nobody keeps."""
    folder = RunFolder.create("lonely")
    job = api.load_job(None, command=["true"])
    folder.job.write_text(
        Accepted(job=job, base="/", created_at=1.0, fabric="tcp").model_dump_json(exclude_defaults=True)
    )
    for path in (folder.token, folder.secrets):
        path.write_text("{}")
    return folder


def end(run: RunFolder) -> None:
    writer = EventWriter(run.events)
    writer.append([ENDED])
    writer.close()


NOBODY_THERE = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}


def code_of(raised: pytest.ExceptionInfo[HoldfastError]) -> str:
    return raised.value.findings[0].code


def test_two_who_look_at_once_do_not_take_each_other_for_a_controller(run: RunFolder) -> None:
    looking = RunFolder(run.path)._locked(fcntl.LOCK_SH)
    assert looking is not None
    assert not run.alive()
    assert run.lock() is None


def test_controller_that_is_gone_is_told_from_one_that_is_silent(run: RunFolder) -> None:
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "controller-gone"
    assert raised.value.findings[0].remedy == f"holdfast attach {run.run}"
    assert run.lock() is not None
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "controller-silent"


def test_controller_in_a_cluster_that_is_not_reached_is_not_called_silent(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(run, Place(context=None, namespace="ml", owner="/apis/any/v1/namespaces/{namespace}/jobsets/any"))
    assert run.lock() is not None
    for document, code, exit_code in (
        ({}, "no-kubeconfig", ExitCode.NOT_FOUND),
        (NOBODY_THERE, "cluster-unreachable", ExitCode.UNAVAILABLE),
    ):
        kubeconfig = tmp_path / code
        if document:
            kubeconfig.write_text(json.dumps(document))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for force, becomes in ((False, "has heard nothing: ask again"), (True, "is removed as soon as it can be")):
            with pytest.raises(HoldfastError) as raised:
                api.cancel(run, force=force)
            assert (code_of(raised), raised.value.exit_code) == (code, exit_code)
            assert becomes in raised.value.findings[0].remedy


@pytest.mark.parametrize("obeys", [True, False])
def test_request_without_an_answer_is_looked_for_in_the_log(run: RunFolder, obeys: bool) -> None:
    """A controller that is killed between the log and its answer, or before either."""
    assert run.lock() is not None
    writer = EventWriter(run.events)

    def serve(server: socket.socket) -> None:
        with server.accept()[0] as peer:
            said = b""
            while not said.endswith(b"}"):
                said += peer.recv(4096)
            asked = msgspec.json.decode(said.partition(b"\r\n\r\n")[2], type=CancelRequested)
            writer.append([asked if obeys else msgspec.structs.replace(asked, request="somebody else's")])

    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(run.path):
        server.bind(run.control_socket.name)
        server.listen()
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        if obeys:
            api.cancel(run)
        else:
            with pytest.raises(HoldfastError, match="will not do it later"):
                api.cancel(run)
        serving.join()


def test_run_that_is_over_cannot_be_cancelled_or_drilled(run: RunFolder) -> None:
    end(run)
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "run-finished"
    with pytest.raises(HoldfastError) as raised:
        api.drill(run, target=DrillTarget.RANK, index=99, action=DrillAction.KILL)
    assert code_of(raised) == "run-finished"
    assert api.status(run).phase is Phase.SUCCEEDED
    assert api.summary(run).exit_code == 0


def test_keeper_that_cannot_start_is_said_and_leaves_no_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(HoldfastError) as raised:
        api.start(api.load_job(None, command=["true"]), "local", base=Path("/"))
    assert code_of(raised) == "start-failed"
    assert "ls" in "".join(raised.value.findings[0].evidence)
    assert list((home / "runs").iterdir()) == []


def test_checkpoints_go_to_the_profiles_storage(home: Path, tmp_path: Path) -> None:
    profiles = tmp_path / ".holdfast" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "shared.yaml").write_text("storage: /shared\n")
    text = api.render(api.load_job(None, command=["true"]), "shared", base=tmp_path).text
    assert "HOLDFAST_CHECKPOINT_PATH=/shared/" in text


def test_slower_of_two_that_revive_a_run_is_not_told_of_a_fault(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beaten(run: RunFolder, accepted: Accepted) -> None:
        run.lock()
        raise failure("start-failed", "the run has a controller already", exit_code=ExitCode.UNAVAILABLE, remedy="wait")

    monkeypatch.setattr(api, "start_keeper", beaten)
    assert not api.revive(run)


def test_run_that_is_over_is_folded_once_for_a_list_and_again_when_its_log_has_changed(home: Path) -> None:
    run = RunFolder.create("demo")
    created = RunCreated(at=1.0, run=run.run, job={"name": "demo"})
    finished = RunFinished(at=5.0, outcome=Outcome.SUCCEEDED, exit_code=0)
    writer = EventWriter(run.events)
    writer.append([created])
    assert api.glance(run).phase is Phase.PENDING
    assert not run.brief.exists()
    writer.append([finished])
    writer.close()
    told = api.glance(run)
    assert (told.phase, told.took_s) == (Phase.SUCCEEDED, 4.0)
    assert api.glance(run) == told
    run.brief.write_bytes(run.brief.read_bytes().replace(b"succeeded", b"cancelled"))
    assert api.glance(run).phase is Phase.CANCELLED  # so it was not folded again
    run.events.write_bytes(sealed(created))
    assert api.glance(run).phase is Phase.PENDING
    run.brief.write_text("{")
    assert api.glance(run).phase is Phase.PENDING


def test_secret_that_is_missing_is_named_before_a_cluster_is_asked(home: Path, tmp_path: Path):
    profiles = tmp_path / ".holdfast" / "profiles"
    profiles.mkdir(parents=True)
    (profiles / "far.yaml").write_text("backend: kubernetes\n")
    fields = ("image=any", "secrets={KEY: {env: NOT_SET_ANYWHERE}, OTHER: {file: not-there}}")
    with pytest.raises(HoldfastError) as refused:
        api.start(api.load(None, command=("true",), overrides=fields), "far", base=tmp_path)
    assert [finding.code for finding in refused.value.findings] == ["missing-secret", "missing-secret"]
    assert api.runs() == []
