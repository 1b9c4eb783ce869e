"""Messages about runs reach webhooks, mail servers and programs once, and no secret of theirs is shown."""

from __future__ import annotations

import asyncio
import http.server
import json
import socketserver
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.observe.test_alerts import SCENARIOS

from holdfast.errors import HoldfastError
from holdfast.events import AnyEvent, RankHung
from holdfast.events.log import encode_line
from holdfast.findings import Finding
from holdfast.job.notify import Email, Notification, Occasion
from holdfast.job.spec import SecretRef
from holdfast.job.targets import read_target
from holdfast.observe.notifier import Notifier
from holdfast.observe.run_messages import Message, RunMessages

EVERY = tuple(Occasion)
ANY = SecretRef(env="ANY")


def messages(events: list[AnyEvent]) -> list[Message]:
    of_run = RunMessages("r-1")
    return [found for event in events if (found := of_run.add(event)) is not None]


@pytest.mark.parametrize(
    ("scenario", "occasions"),
    [
        ("HoldfastRunFailed", [Occasion.FAILED]),
        ("HoldfastGpuFault", [Occasion.RECOVERED]),
        ("HoldfastDegraded", [Occasion.DEGRADED]),
        ("HoldfastStraggler", []),
    ],
)
def test_events_cause_the_message_for_them(scenario: str, occasions: list[Occasion]) -> None:
    assert [each.occasion for each in messages(SCENARIOS[scenario].events)] == occasions


def test_many_of_a_kind_are_one_message_that_counts_the_rest() -> None:
    def hung(at: float) -> RankHung:
        return RankHung(at=at, node=0, replica=0, attempt=0, rank=1, last_step=3, last_step_at=at - 9, waited_s=9.0)

    found = messages([*SCENARIOS["HoldfastRunStalled"].events[:9], *(hung(at) for at in (1000, 1001, 1002, 1400))])
    assert [each.sentence for each in found] == [
        "r-1: rank 1 on node0 hangs: no step for 9.0 s",
        "r-1: rank 1 on node0 hangs: no step for 9.0 s (2 more like this were not sent)",
    ]


@contextmanager
def web_server(status: int = 200) -> Generator[tuple[str, list[Any]]]:
    """A receiver of webhooks: its URL and what it got."""
    got: list[Any] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/s3cret", got
        server.shutdown()


@contextmanager
def mail_server() -> Generator[tuple[int, list[str]]]:
    """A mail server without TLS and login: its port and the mails it took."""
    got: list[str] = []

    class Session(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 mail\r\n")
            while line := self.rfile.readline().decode().strip().upper():
                if line == "DATA":
                    self.wfile.write(b"354 go on\r\n")
                    text = ""
                    while (part := self.rfile.readline().decode()).strip() != ".":
                        text += part
                    got.append(text)
                self.wfile.write(b"221 bye\r\n" if line == "QUIT" else b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], got
        server.shutdown()


def send(
    folder: Path, events: list[AnyEvent], *receivers: Notification, secrets: dict[str, str] | None = None
) -> list[Finding]:
    """Send what a log causes; the findings."""
    log, found = folder / "events.jsonl", list[Finding]()
    log.write_bytes(b"".join(map(encode_line, events)))
    notifier = Notifier("r-1", log, folder / "notified", receivers, secrets or {}, found.append)
    notifier.stop()
    asyncio.run(notifier.run())
    return found


def test_webhook_slack_mail_and_program_get_it(tmp_path: Path) -> None:
    file = tmp_path / "given"
    program = f"import pathlib, sys; pathlib.Path({str(file)!r}).write_text(sys.stdin.read())"
    with web_server() as (hook, posted), mail_server() as (port, mails):
        findings = send(
            tmp_path,
            SCENARIOS["HoldfastRunFailed"].events,
            Notification(webhook=ANY),
            Notification(slack=ANY),
            Notification(email=Email(to=("a@example.com",), sender="b@example.com", host="127.0.0.1", port=port)),
            Notification(command=(sys.executable, "-c", program)),
            Notification(on=(Occasion.STALLED,), webhook=ANY),
            secrets={"0": hook, "1": hook, "4": hook},
        )
    assert findings == []
    (message,) = (each for each in posted if "occasion" in each)
    assert (message["run"], message["occasion"]) == ("r-1", "failed")
    assert [each["text"] for each in posted if "occasion" not in each] == [f"r-1: {message['text']}"]
    assert json.loads(file.read_text()) == message
    assert len(mails) == 1
    assert "Subject: r-1 failed" in mails[0]


def test_later_controller_sends_nothing_twice(tmp_path: Path) -> None:
    with web_server() as (hook, posted):
        for _ in range(2):
            send(tmp_path, SCENARIOS["HoldfastRunFailed"].events, Notification(webhook=ANY), secrets={"0": hook})
    assert len(posted) == 1


def test_receiver_that_refuses_is_reported_once_without_its_secret(tmp_path: Path) -> None:
    events = [*SCENARIOS["HoldfastGpuFault"].events, *SCENARIOS["HoldfastRunFailed"].events[-1:]]
    refused = Notification(on=EVERY, webhook=ANY)
    nothing = Notification(on=EVERY, slack=ANY)
    ended = Notification(on=EVERY, command=(sys.executable, "-c", "import sys; sys.exit('not today')"))
    with web_server(403) as (hook, posted):
        findings = send(
            tmp_path, events, refused, nothing, ended, secrets={"0": hook, "1": "http://127.0.0.1:1/s3cret"}
        )
    assert len(posted) == 2
    assert sorted(each.where for each in findings) == ["notify.0", "notify.1", "notify.2"]
    assert {each.code for each in findings} == {"notification-failed"}
    words = " ".join(line for each in findings for line in each.evidence)
    assert "403" in words
    assert "not today" in words
    assert "s3cret" not in words


def test_password_is_not_sent_without_tls(tmp_path: Path) -> None:
    with mail_server() as (port, mails):
        mail = Email(
            to=("a@example.com",), sender="b@example.com", host="127.0.0.1", port=port, user="me", password=ANY
        )
        (finding,) = send(
            tmp_path, SCENARIOS["HoldfastRunFailed"].events, Notification(email=mail), secrets={"0": "s3cret"}
        )
    assert mails == []
    assert "no TLS" in finding.evidence[0]


def test_entry_without_a_receiver_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "told.yaml"
    path.write_text("capacity: 2\nnotify:\n  - on: [failed]\n")
    with pytest.raises(HoldfastError) as refused:
        read_target(path)
    (finding,) = refused.value.findings
    assert (finding.code, finding.where) == ("bad-notify", f"{path}:3")
