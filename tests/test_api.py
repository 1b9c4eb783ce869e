"""Functions of api.py on a run whose controller is silent, gone, finished, or failed to start."""

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
from holdfast.events import (
    AnyEvent,
    CancelRequested,
    FaultAction,
    FaultTarget,
    Outcome,
    RunCreated,
    RunFinished,
    StepCommitted,
)
from holdfast.events.log import encode_line
from holdfast.events.log_writer import EventWriter
from holdfast.job.quarantine import Quarantine, QuarantineRow
from holdfast.job.run_spec import RunSpec
from holdfast.launch import prestarted_supervisor, supervised_target
from holdfast.launch.kubernetes.cluster_ref import ClusterRef, write_cluster_ref
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.report.run_status import RunPhase
from holdfast.report.run_summary import format_summary
from holdfast.run_dir import RunDir

ENDED = RunFinished(at=2.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="every rank finished")


@pytest.fixture
def run(home: Path) -> RunDir:
    """A run that was accepted, without a supervisor."""
    folder = RunDir.create("lonely")
    job = api.load_job(None, command=["true"])
    folder.job.write_text(
        RunSpec(job=job, base="/", created_at=1.0, fabric="tcp").model_dump_json(exclude_defaults=True)
    )
    for path in (folder.token, folder.secrets):
        path.write_text("{}")
    return folder


def end(run: RunDir) -> None:
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


def test_two_who_look_at_once_do_not_take_each_other_for_a_controller(run: RunDir) -> None:
    looking = RunDir(run.path)._locked(fcntl.LOCK_SH)
    assert looking is not None
    assert not run.alive()
    assert run.lock() is None


def test_controller_that_is_gone_is_told_from_one_that_is_silent(run: RunDir) -> None:
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "controller-dead"
    assert raised.value.findings[0].remedy == f"holdfast attach {run.run_id}"
    assert run.lock() is not None
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "controller-timeout"


def test_controller_in_a_cluster_that_is_not_reached_is_not_called_silent(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = api.load_job(None, command=["true"])
    accepted = RunSpec(job=job, base="/", created_at=1.0, fabric="tcp", target_kind="kubernetes")
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    write_cluster_ref(
        run, ClusterRef(context=None, namespace="ml", owner="/apis/any/v1/namespaces/{namespace}/jobsets/any")
    )
    assert run.lock() is not None
    for document, code, exit_code in (
        ({}, "no-kubeconfig", ExitCode.NOT_FOUND),
        (NOBODY_THERE, "cluster-unreachable", ExitCode.UNAVAILABLE),
    ):
        kubeconfig = tmp_path / code
        if document:
            kubeconfig.write_text(json.dumps(document))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for force, becomes in (
            (False, "has not received the request: repeat it"),
            (True, "is removed as soon as it can be"),
        ):
            with pytest.raises(HoldfastError) as raised:
                api.cancel(run, force=force)
            assert (code_of(raised), raised.value.exit_code) == (code, exit_code)
            assert becomes in raised.value.findings[0].remedy


@pytest.mark.parametrize("obeys", [True, False])
def test_request_without_an_answer_is_looked_for_in_the_log(run: RunDir, obeys: bool) -> None:
    """A controller that is killed between the log and its answer, or before either."""
    assert run.lock() is not None
    writer = EventWriter(run.events)

    def serve(server: socket.socket) -> None:
        with server.accept()[0] as peer:
            said = b""
            while not said.endswith(b"}"):
                said += peer.recv(4096)
            asked = msgspec.json.decode(said.partition(b"\r\n\r\n")[2], type=CancelRequested)
            writer.append([asked if obeys else msgspec.structs.replace(asked, request_id="somebody else's")])

    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(run.path):
        server.bind(run.control_socket.name)
        server.listen()
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        if obeys:
            api.cancel(run)
        else:
            with pytest.raises(HoldfastError, match="will not run"):
                api.cancel(run)
        serving.join()


def test_run_that_is_over_cannot_be_cancelled_or_drilled(run: RunDir) -> None:
    end(run)
    with pytest.raises(HoldfastError) as raised:
        api.cancel(run)
    assert code_of(raised) == "run-finished"
    with pytest.raises(HoldfastError) as raised:
        api.inject_fault(run, target=FaultTarget.RANK, index=99, action=FaultAction.KILL)
    assert code_of(raised) == "run-finished"
    assert api.status(run).phase is RunPhase.SUCCEEDED
    assert api.summary(run).exit_code == 0


MODEL = """
command: python train.py
gpus_per_node: 8
model: {config: llama-3-8b, sequence_length: 8192, global_batch_tokens: 262144}
parallel: {dp: 8}
"""


@pytest.mark.parametrize(("machine", "steps"), [("machine: h100-ndr", 40), ("machine: h100-ndr", 29), ("", 40)])
def test_steps_are_compared_with_the_prediction_where_there_is_one(
    run: RunDir, tmp_path: Path, machine: str, steps: int
) -> None:
    targets = tmp_path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "lab.yaml").write_text(f"kind: local\n{machine}\n")
    (tmp_path / "job.yaml").write_text(MODEL)
    job = api.load_job(tmp_path / "job.yaml")
    spec = RunSpec(job=job, base=str(tmp_path), created_at=0.0, fabric="tcp", target="lab")
    run.job.write_text(spec.model_dump_json(exclude_defaults=True))
    expected_s = api.plan(job, "lab", base=tmp_path, machine="h100-ndr").best[0].figures.step_s
    took_s = 2 * expected_s
    log: list[AnyEvent] = [
        StepCommitted(
            at=at + took_s,
            replica=0,
            attempt=0,
            step=step,
            started=at,
            ended=at + took_s,
            metrics={"data_wait_s": took_s if step < steps - 1 else 0.0},
        )
        for step in range(steps)
        for at in (100 + step * took_s,)
    ]
    writer = EventWriter(run.events)
    writer.append([spec.created_event(run.run_id), *log])
    found = api.record(run).predicted_step
    assert api.summary(run).predicted_step is None
    writer.append([RunFinished(at=10_000.0, outcome=Outcome.SUCCEEDED, exit_code=0, reason="")])
    writer.close()
    assert api.summary(run).predicted_step == api.record(run).predicted_step == found
    if not machine or steps < 30:
        assert found is None
        return
    assert found is not None
    assert (found.predicted_s, found.measured_s) == (expected_s, pytest.approx(took_s))
    assert "100% longer" in (shown := format_summary(api.summary(run)))
    assert "most of it is waiting for data" in shown
    assert "waiting for data" in api.report_document(api.record(run))["figures"]["predicted time of a step"]  # type: ignore[index]


def test_hosts_get_the_order_of_ranks_on_their_topology(home: Path, tmp_path: Path) -> None:
    targets = tmp_path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "lab.yaml").write_text("kind: hosts\nhosts: [a, b, c, d, e, f]\ntopology: nodes.json\n")
    racks = {"a": "r1", "b": "r2", "c": "r3", "d": "r2", "e": "r1", "f": "r2", "other": "r3"}
    nodes = {name: {"rack": rack} for name, rack in racks.items()}
    (tmp_path / "nodes.json").write_text(json.dumps({"levels": ["rack"], "nodes": nodes}))
    three = api.load_job(None, command=["true"], overrides=("nodes=3", "checkpoint.path=/shared"))
    order = api._submission(three, "lab", tmp_path).spec.hosts  # pyright: ignore[reportPrivateUsage]
    assert order == ("b", "d", "f", "a", "c", "e")
    avoided = QuarantineRow(machine="d", since=0.0, until=1e12, code="node-lost")
    QuarantineFile("lab").change(lambda _: Quarantine(rows=(avoided,)))
    for overrides, order, code in (
        (("nodes=2",), ("a", "e", "b", "c", "d", "f"), None),
        (("nodes=2..8",), ("a", "e", "b", "f", "c", "d"), None),
        (("nodes=8",), ("a", "e", "b", "f", "c", "d"), "too-few-nodes"),
        (("nodes=4", "parallel.tp=4"), ("a", "b", "c", "d", "e", "f"), "no-room-in-topology"),
    ):
        job = api.load_job(None, command=["true"], overrides=(*overrides, "checkpoint.path=/shared"))
        assert api._submission(job, "lab", tmp_path).spec.hosts == order  # pyright: ignore[reportPrivateUsage]
        told = {finding.code for finding in api.check(job, "lab", base=tmp_path)}
        assert told & {"too-few-nodes", "no-room-in-topology"} == ({code} if code else set())
    (tmp_path / "nodes.json").write_text(json.dumps({"levels": ["rack"], "nodes": {"a": {"rack": "r1"}}}))
    with pytest.raises(HoldfastError) as raised:
        api.check(three, "lab", base=tmp_path)
    assert code_of(raised) == "bad-topology"
    assert "b, c, d, e, f" in raised.value.findings[0].what


def test_supervisor_that_cannot_start_is_reported_and_leaves_no_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prestarted_supervisor._prestarted, "process", None)  # what another test has left
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(HoldfastError) as raised:
        api.start(api.load_job(None, command=["true"]), "local", base=Path("/"))
    assert code_of(raised) == "start-failed"
    assert "ls" in "".join(raised.value.findings[0].evidence)
    assert list((home / "runs").iterdir()) == []


def test_checkpoints_go_to_the_targets_storage(home: Path, tmp_path: Path) -> None:
    targets = tmp_path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "shared.yaml").write_text("checkpoint_root: /shared\n")
    text = api.render(api.load_job(None, command=["true"]), "shared", base=tmp_path).text
    assert "HOLDFAST_CHECKPOINT_PATH=/shared/" in text


def test_slower_of_two_that_revive_a_run_is_not_told_of_a_fault(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def beaten(run: RunDir, accepted: RunSpec) -> None:
        run.lock()
        raise failure("start-failed", "the run has a controller already", exit_code=ExitCode.UNAVAILABLE, remedy="wait")

    monkeypatch.setattr(supervised_target, "start_supervisor", beaten)
    assert not api.restart_controller(run)


def test_run_that_is_over_is_folded_once_for_a_list_and_again_when_its_log_has_changed(home: Path) -> None:
    run = RunDir.create("demo")
    created = RunCreated(at=1.0, run=run.run_id, job={"name": "demo"})
    finished = RunFinished(at=5.0, outcome=Outcome.SUCCEEDED, exit_code=0)
    writer = EventWriter(run.events)
    writer.append([created])
    assert api.run_row(run).phase is RunPhase.PENDING
    assert not run.run_row.exists()
    writer.append([finished])
    writer.close()
    told = api.run_row(run)
    assert (told.phase, told.took_s) == (RunPhase.SUCCEEDED, 4.0)
    assert api.run_row(run) == told
    run.run_row.write_bytes(run.run_row.read_bytes().replace(b"succeeded", b"cancelled"))
    assert api.run_row(run).phase is RunPhase.CANCELLED  # so it was not folded again
    run.events.write_bytes(encode_line(created))
    assert api.run_row(run).phase is RunPhase.PENDING
    run.run_row.write_text("{")
    assert api.run_row(run).phase is RunPhase.PENDING
