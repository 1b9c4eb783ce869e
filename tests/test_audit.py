"""The audit of dependencies against a database that answers as OSV does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCK = """\
good==1.0 \\
    --hash=sha256:00
Bad.Name==2.0+cu1 ; python_full_version < '3.15' \\
    --hash=sha256:00
    # via good
"""


class Database(ThreadingHTTPServer):
    """Answers with `status` and `answer`, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.answer = b""
        self.asked: list[object] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/querybatch"


class _Handler(BaseHTTPRequestHandler):
    server: Database

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def database() -> Iterator[Database]:
    with Database() as database:
        threading.Thread(target=database.serve_forever, daemon=True).start()
        yield database
        database.shutdown()


def audit(tmp_path: Path, url: str) -> subprocess.CompletedProcess[str]:
    lock = tmp_path / "requirements.lock"
    lock.write_text(LOCK)
    argv = [sys.executable, str(ROOT / ".ci" / "audit.py"), str(lock), url]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False, env={"no_proxy": "*"})


def test_lock_without_a_known_vulnerability_passes(database: Database, tmp_path: Path) -> None:
    database.answer = b'{"results":[{},{}]}'
    done = audit(tmp_path, database.url)
    assert (done.returncode, done.stdout) == (0, "audited: 2 packages, no known vulnerability that is not accepted\n")
    good = {"package": {"name": "good", "ecosystem": "PyPI"}, "version": "1.0"}
    bad = {"package": {"name": "Bad.Name", "ecosystem": "PyPI"}, "version": "2.0+cu1"}
    assert database.asked == [{"queries": [good, bad]}]


def test_known_vulnerability_fails_and_is_named(database: Database, tmp_path: Path) -> None:
    database.answer = b'{"results":[{},{"vulns":[{"id":"PYSEC-1","modified":"2026-01-01"}]}]}'
    done = audit(tmp_path, database.url)
    assert done.returncode == 1
    assert "Bad.Name 2.0+cu1: PYSEC-1" in done.stderr
    assert "Remedy" in done.stderr


@pytest.mark.parametrize(("status", "answer"), [(503, b""), (403, b"{}"), (200, b"<html>log in first</html>")])
def test_database_that_is_not_there_is_said_and_stops_nobody(
    database: Database, tmp_path: Path, status: int, answer: bytes
) -> None:
    database.status, database.answer = status, answer
    done = audit(tmp_path, database.url)
    assert (done.returncode, done.stdout[:12]) == (0, "not audited:")


def test_nobody_at_the_address_is_said_and_stops_nobody(tmp_path: Path) -> None:
    done = audit(tmp_path, "http://127.0.0.1:1/")
    assert (done.returncode, done.stdout[:12]) == (0, "not audited:")


@pytest.mark.parametrize(("status", "answer"), [(400, b"{}"), (200, b"{}"), (200, b'{"results":[{}]}'), (200, b"[]")])
def test_answer_that_is_none_fails(database: Database, tmp_path: Path, status: int, answer: bytes) -> None:
    database.status, database.answer = status, answer
    done = audit(tmp_path, database.url)
    assert done.returncode == 1
    assert "cannot be understood" in done.stderr
    assert "Traceback" not in done.stderr


def test_everything_in_the_lock_has_a_version_and_a_hash() -> None:
    entries = re.split(r"\n(?=[^ ])", (ROOT / "requirements.lock").read_text().strip())
    assert len(entries) > 50
    for entry in entries:
        assert re.match(r"[A-Za-z0-9._-]+==[^ ]+ ", entry), entry[:100]
        assert "--hash=sha256:" in entry, entry[:100]
