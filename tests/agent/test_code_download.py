"""Pulling code over real HTTP: from controllers that are well, away, wrong or cut off; by one node or many."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.code_cache import CodeCache
from holdfast.agent.code_download import download_code
from holdfast.errors import HoldfastError
from holdfast.findings import Finding, Owner
from holdfast.host.processes import command_line, descendants
from holdfast.job.spec import Job
from holdfast.launch.code.archive import PackedArchive, pack
from holdfast.launch.code.file_list import list_files

TOKEN = "node0.0:secret"

Answer = Callable[[bytes], bytes | int | None]
"""What a controller makes of an archive: the body, a status, or None to hang up in the middle."""


class Controller:
    """Serves one archive; each answer that is given is used once, the archive itself ever after."""

    def __init__(self, packed: PackedArchive) -> None:
        self.content = packed.path.read_bytes()
        self.digest = packed.digest
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        self.port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/code/{self.digest}"

    def where(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/agent"

    def listen(self) -> None:
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                controller.asked.append(self.headers["Authorization"])
                answer = controller.answers.pop(0)(controller.content) if controller.answers else controller.content
                self.send_response(answer if isinstance(answer, int) else 200)
                body = answer if isinstance(answer, bytes) else controller.content
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body if answer is not None else body[:100])

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')")
    made = Controller(pack(list_files(Job(command=("train",)), project), tmp_path / "archives"))
    made.listen()
    yield made
    made.close()


def test_code_is_pulled_once_and_lies_under_its_digest(controller: Controller, tmp_path: Path) -> None:
    folder = download_code(controller.url, TOKEN, tmp_path / "code")
    assert folder == tmp_path / "code" / controller.digest
    assert (folder / "train.py").read_text() == "print('hello')"
    assert download_code(controller.url, TOKEN, tmp_path / "code") == folder
    assert controller.asked == [f"Bearer {TOKEN}"]
    assert sorted(path.name for path in folder.parent.iterdir()) == [controller.digest, f"{controller.digest}.lock"]


@pytest.mark.parametrize(
    "answer", [lambda content: content[:-1] + b"x", lambda content: content[:500], lambda content: None]
)
def test_code_that_arrives_damaged_is_pulled_again(controller: Controller, tmp_path: Path, answer: Answer) -> None:
    controller.answers = [answer, answer]
    assert (download_code(controller.url, TOKEN, tmp_path) / "train.py").exists()
    assert len(controller.asked) == 3


def test_code_that_stays_damaged_is_a_finding(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [lambda content: b"garbage"] * 10
    with pytest.raises(HoldfastError) as error:
        download_code(controller.url, TOKEN, tmp_path / "code")
    (finding,) = error.value.findings
    assert (finding.code, finding.owner) == ("code-not-delivered", Owner.CLUSTER)
    assert "damaged 3 times" in finding.what
    assert "its digest is" in finding.evidence[0]
    assert [path.suffix for path in (tmp_path / "code").iterdir()] == [".lock"]


@pytest.mark.parametrize("status", [401, 410, 500])
def test_refusal_is_a_finding_at_once(controller: Controller, tmp_path: Path, status: int) -> None:
    controller.answers = [lambda content: status]
    with pytest.raises(HoldfastError, match=str(status)):
        download_code(controller.url, TOKEN, tmp_path / "code")
    assert len(controller.asked) == 1


def test_folder_that_cannot_be_written_is_a_finding(controller: Controller, tmp_path: Path) -> None:
    (tmp_path / "code").write_text("a file where the folder should be")
    with pytest.raises(HoldfastError) as error:
        download_code(controller.url, TOKEN, tmp_path / "code")
    assert "File exists" in error.value.findings[0].evidence[0]


def test_controller_that_is_away_is_waited_for(controller: Controller, tmp_path: Path) -> None:
    controller.close()
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.agent.code_download", controller.url, str(tmp_path / "code")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(TOKEN.encode())
    process.stdin.close()
    assert b"out of reach" in process.stderr.readline()
    controller.listen()
    assert process.wait(30) == 0
    process.stderr.close()
    assert (tmp_path / "code" / controller.digest / "train.py").exists()


@pytest.mark.slow
def test_controller_that_returns_at_another_port_is_found_there(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = (
        "import sys; from holdfast.agent import code_download; code_download.RETRY_DELAYS_S = (); "
        "sys.exit(code_download.main())"
    )
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{elsewhere}' \"$@\"\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    asked: list[str] = []

    def where() -> str:
        asked.append("ws://127.0.0.1:1/v1/agent" if len(asked) < 2 else controller.where())
        return asked[-1]

    folder = asyncio.run(CodeCache(where, TOKEN, tmp_path / "code").get(controller.digest))
    assert (folder / "train.py").exists()
    assert len(asked) == 3


@pytest.mark.slow
def test_many_nodes_of_a_machine_pull_once_and_all_have_it(controller: Controller, tmp_path: Path) -> None:
    async def scene() -> None:
        nodes = [CodeCache(controller.where, TOKEN, tmp_path / "code") for _ in range(5)]
        folders = await asyncio.gather(*(node.get(controller.digest) for node in nodes))
        assert {(folder / "train.py").read_text() for folder in folders} == {"print('hello')"}

    asyncio.run(scene())
    assert len(controller.asked) == 1


def test_node_killed_while_it_pulls_holds_up_no_other(controller: Controller, tmp_path: Path) -> None:
    def end_it(content: bytes) -> bytes:
        process.kill()
        process.wait()
        return content

    controller.answers = [end_it]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.agent.code_download", controller.url, str(tmp_path)],
        stdin=subprocess.PIPE,
    )
    process.communicate(TOKEN.encode())
    assert process.returncode == -9
    assert (download_code(controller.url, TOKEN, tmp_path) / "train.py").exists()


@pytest.mark.slow
def test_agent_gets_the_finding_of_its_fetch(controller: Controller, tmp_path: Path) -> None:
    controller.answers = [lambda content: 410]
    node = CodeCache(controller.where, TOKEN, tmp_path)
    with pytest.raises(HoldfastError) as error:
        asyncio.run(node.get(controller.digest))
    assert "410" in error.value.findings[0].what


def test_fetch_that_dies_without_a_word_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HoldfastError, match="ended with status 1"):
        asyncio.run(CodeCache(lambda: "ws://127.0.0.1:1/v1/agent", TOKEN, tmp_path).get("0" * 64))


def test_given_up_fetch_leaves_no_process(controller: Controller, tmp_path: Path) -> None:
    async def scene() -> None:
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        hold = threading.Event()

        def hold_it(content: bytes) -> bytes:
            loop.call_soon_threadsafe(asked.set)
            hold.wait(30)
            return content

        controller.answers = [hold_it]
        node = CodeCache(controller.where, TOKEN, tmp_path)
        getting = asyncio.ensure_future(node.get(controller.digest))
        await asyncio.wait_for(asked.wait(), 30)
        (child,) = [pid for pid in descendants(os.getpid()) if controller.digest in command_line(pid)]
        ended = os.pidfd_open(child)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert select.select([ended], [], [], 30)[0]
        os.close(ended)
        hold.set()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_finding_travels_whole(tmp_path: Path) -> None:
    (tmp_path / "code").write_text("a file where the folder should be")
    told = subprocess.run(
        [sys.executable, "-m", "holdfast.agent.code_download", "http://127.0.0.1:1/v1/code/d", str(tmp_path / "code")],
        input=b"token",
        capture_output=True,
        check=False,
    )
    assert told.returncode == 1
    assert msgspec.json.decode(told.stdout, type=Finding).code == "code-not-delivered"


def test_first_step_of_an_agent_in_a_pod_imports_no_models_of_jobs() -> None:
    look = "import sys, holdfast.agent.bootstrap; sys.exit('pydantic' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=60)
