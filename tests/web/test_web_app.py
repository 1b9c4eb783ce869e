"""The live page's server: data only with the token, parts only when they change, output as ranks wrote it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.report.test_report_page import run as events_of_a_run

from holdfast import api
from holdfast.errors import ExitCode, failure
from holdfast.events import AnyEvent, RunCreated, StepCommitted
from holdfast.events.log import encode_line
from holdfast.findings import Finding
from holdfast.job.quarantine import QuarantineRow
from holdfast.job.run_spec import RunSpec
from holdfast.launch.cluster_contact import LostContact
from holdfast.launch.code.upload_progress import UploadRecord
from holdfast.launch.target_machines import MachineState, MachineStatus, TargetMachines
from holdfast.report.run_record import record_run
from holdfast.run_dir import RunDir
from holdfast.web.run_action import RunAction
from holdfast.web.run_view import RunView
from holdfast.web.web_app import FILES, WebApp, no_problems

RUN, TOKEN = "demo-k3m9tz", "t0ken"


def made_run(folder: Path, events: list[AnyEvent], output: str = "") -> RunDir:
    made = RunDir(folder / RUN)
    logs = made.path / "logs" / "attempt-0"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text(output)
    made.events.write_bytes(b"".join(map(encode_line, events)))
    return made


def asked(made: RunDir, *paths: str, token: str = TOKEN) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(WebApp(lambda: [made], TOKEN, machines=machines).app)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://page", headers=headers) as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(ask())


def test_page_needs_no_token_and_data_does(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run())
    data = ("/api/runs", f"/api/runs/{RUN}/stream", f"/api/runs/{RUN}/output?rank=0")
    assert [answer.status_code for answer in asked(made, *data, token="t0ke")] == [401] * 3
    assert [answer.status_code for answer in asked(made, *data)] == [200] * 3
    pages = asked(made, "/", *(f"/static/{name}" for name in FILES), token="")
    assert [answer.status_code for answer in pages] == [200] * (1 + len(FILES))
    assert all("default-src 'none'" in answer.headers["content-security-policy"] for answer in pages)
    hidden = asked(made, "/static/..%2fweb_app.py", "/static/uplot.LICENSE", "/api/runs/other-k3m9tz/stream")
    assert [answer.status_code for answer in hidden] == [404] * 3


def acted(
    made: RunDir, name: str = "note", *, text: str = "x", action_token: str = "act", **headers: str
) -> httpx.Response:
    async def ask() -> httpx.Response:
        app = WebApp(lambda: [made], TOKEN, actions=ACTIONS if action_token else (), action_token=action_token)
        transport = httpx.ASGITransport(app.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page", headers=headers) as client:
            return await client.post(f"/api/runs/{RUN}/actions/{name}", content=text)

    return asyncio.run(ask())


def noted(run: RunDir, text: str) -> str:
    if text == "never":
        raise failure("not-possible", "it is not possible", exit_code=ExitCode.USAGE, remedy="Try something else.")
    (run.path / "note").write_text(text)
    return f"noted {text}"


ACTIONS = (
    RunAction(name="note", label="Note it", effect="It is noted.", perform=noted, argument="Words", example="x"),
)


def test_actions_need_their_own_token_and_the_pages_origin(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run())
    allowed = {"Authorization": "Bearer act"}
    refused = (
        acted(made, Authorization=f"Bearer {TOKEN}"),
        acted(made),
        acted(made, action_token="", Authorization=f"Bearer {TOKEN}"),
        acted(made, action_token="", Authorization="Bearer "),
        acted(made, **allowed, Origin="http://elsewhere"),
        acted(made, **allowed, Origin="null"),
    )
    assert [answer.status_code for answer in refused] == [403] * len(refused)
    assert "--allow-actions" in refused[2].json()["error"]
    assert not (made.path / "note").exists()
    assert acted(made, **allowed, Origin="http://page").json() == {"done": "noted x"}
    assert (made.path / "note").read_text() == "x"


def test_action_that_fails_tells_why(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run())
    allowed = {"Authorization": "Bearer act"}
    impossible = acted(made, text="never", **allowed)
    assert (impossible.status_code, impossible.json()["error"]) == (409, "it is not possible. Try something else.")
    assert acted(made, "other", **allowed).status_code == 404
    assert acted(made, text="x" * 1000, **allowed).status_code == 400


def machines(target: str) -> TargetMachines:
    if target == "silent":
        raise failure("unreachable", "it does not answer", exit_code=ExitCode.UNAVAILABLE, remedy="Wait.")
    row = QuarantineRow(machine="b", code="gpu-failed", run="old-k3m9tz", since=1.0, until=2.0, evidence=("Xid 79",))
    used = MachineStatus(name="a", state=MachineState.USED, runs=(RUN,))
    avoided = MachineStatus(name="b", state=MachineState.QUARANTINED, quarantine=row)
    return TargetMachines(machines=(used, avoided), limit=1)


def test_machines_of_a_runs_target_are_listed_with_why_they_are_avoided(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run())
    job = api.load_job(None, command=("true",))
    spec = RunSpec(job=job, fabric="tcp", target="silent", created_at=0.0, base=str(tmp_path))
    made.job.write_text(spec.model_dump_json())
    (unknown, silent) = asked(made, "/api/machines?target=other", "/api/machines?target=silent")
    assert (unknown.status_code, silent.status_code, silent.json()["error"]) == (404, 502, "it does not answer")
    made.job.write_text(spec.model_copy(update={"target": "cluster"}).model_dump_json())
    (rows, answer) = asked(made, "/api/runs", "/api/machines?target=cluster")
    assert [row["target"] for row in rows.json()] == ["cluster"]
    first, second = answer.json()
    assert (first["machine"], first["state"], first["runs"]) == ("a", "used", [RUN])
    assert (second["state"], second["evidence"]) == ("quarantined", ["Xid 79"])
    assert "gpu-failed, found by old-k3m9tz" in second["why"]


def test_stream_of_a_finished_run_ends(tmp_path: Path) -> None:
    (answer,) = asked(made_run(tmp_path, events_of_a_run()), f"/api/runs/{RUN}/stream")
    first, end, rest = answer.text.split("\n\n")
    view = json.loads(first.removeprefix("data: "))
    assert (end, rest) == ("event: over\ndata: {}", "")
    assert (view["head"]["phase"], view["head"]["step"], view["head"]["restarts"]) == ("succeeded", 99, 1)
    assert view["head"]["checkpoint_size"] == "1.23 GB"
    assert [each["code"] for each in view["failures"]] == ["rank-killed"]
    assert len(view["curves"]["0"]["loss"]) == 100


def first_view(made: RunDir, problems: Callable[[RunDir], Sequence[Finding]] = no_problems) -> dict[str, Any]:
    """The first that a reader of a run gets."""

    async def ask() -> dict[str, Any]:
        app = WebApp(lambda: [made], TOKEN, problems=problems).app
        scope = {
            "type": "http",
            "method": "GET",
            "path": f"/api/runs/{RUN}/stream",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        }
        first: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            if message.get("body") and not first.done():
                first.set_result(message["body"])
                gone.set()

        await asyncio.wait_for(app(scope, receive, send), 20.0)
        return json.loads(first.result().removeprefix(b"data: "))

    return asyncio.run(ask())


def test_log_of_another_version_is_named_in_the_list_and_in_the_view(tmp_path: Path) -> None:
    made = made_run(tmp_path, [RunCreated(at=0.0, run=RUN, job={}, format=99), *events_of_a_run()[1:9]])
    view = first_view(made)
    assert [each["code"] for each in view["problems"]] == ["log-format-unsupported"]
    assert "head" not in view
    (rows,) = asked(made, "/api/runs")
    (row,) = rows.json()
    assert row["phase"] == "unreadable"
    assert "format 99" in row["waiting_for"]


@pytest.mark.parametrize("damage", [b"x\n", b"gone"])
def test_missing_lines_are_counted_and_what_is_left_is_shown(tmp_path: Path, damage: bytes) -> None:
    made = made_run(tmp_path, events_of_a_run()[:9])
    lines = made.events.read_bytes().splitlines(keepends=True)
    made.events.write_bytes(b"".join([lines[0], damage, *lines[2:]] if damage == b"x\n" else lines[1:]))
    view = first_view(made)
    (problem,) = view["problems"]
    assert (problem["code"], problem["what"].partition(" of ")[0]) == ("run-file-corrupt", "1 line")
    assert ("head" in view) == (damage == b"x\n")


def test_log_that_is_no_file_is_named(tmp_path: Path) -> None:
    made = made_run(tmp_path, [])
    made.events.unlink()
    made.events.mkdir()
    view = first_view(made)
    assert [each["code"] for each in view["problems"]] == ["run-file-corrupt"]
    assert "head" not in view


def test_cluster_that_is_out_of_contact_is_told_next_to_what_was_heard_last(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run()[:9])
    made.remote.write_text("{}")
    silent = LostContact(since=time.time() - 3600, reason="connect: refused", command="kubectl get pods")
    made.cluster_contact.write_bytes(msgspec.json.encode(silent))
    view = first_view(made, api.run_problems)
    (stale, *_) = view["problems"]
    assert (stale["code"], stale["evidence"]) == ("cluster-status-stale", ["connect: refused"])
    assert "1 h 00 min old" in stale["what"]
    assert view["head"]["step"] is not None


def test_upload_of_the_code_is_told(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run()[:1])
    UploadRecord(made, 480 << 20).add(12 << 20)
    assert first_view(made)["upload"] == "the code is uploaded: 12 of 480 MiB"


def test_parts_are_sent_when_they_change() -> None:
    events = events_of_a_run()
    view = RunView()
    begun = record_run(events[:10], RUN)
    assert {"nodes", "ranks", "curves", "marks", "failures", "findings"} < view.changed(begun, 20.0).keys()
    assert view.changed(begun, 21.0).keys() == {"head"}
    step = next(event for event in events[10:] if isinstance(event, StepCommitted))
    grown = record_run([*events[:10], step], RUN)
    assert "curves" in view.changed(grown, 22.0)


def test_output_is_searched_in_the_attempt_that_is_asked_for(tmp_path: Path) -> None:
    made = made_run(tmp_path, events_of_a_run(), "loss 1.0\n\x1b[31mError: <b>no</b>\x1b[0m\nloss 2.0\n")
    path = f"/api/runs/{RUN}/output"
    lines: Callable[[httpx.Response], Any] = lambda answer: answer.json()["lines"]  # noqa: E731
    every, found, none, wrong = asked(
        made, f"{path}?rank=0", f"{path}?rank=0&q=ERROR", f"{path}?rank=0&attempt=7", f"{path}?rank=a"
    )
    assert lines(every) == ["loss 1.0", "Error: <b>no</b>", "loss 2.0"]
    assert lines(found) == ["Error: <b>no</b>"]
    assert lines(none) == []
    assert wrong.status_code == 400
