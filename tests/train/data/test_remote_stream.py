"""Text that a server has, laid out as C4's repository is: read through `datasets` over HTTP, exactly over restarts."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.train.data.fake_training import FakeTraining

from holdfast.errors import ExitCode, HoldfastError
from holdfast.train import Data
from holdfast.train.data.packed import Packed

pytestmark = pytest.mark.slow  # its imports are

PARTS, ROWS = 3, 400
LENGTH = 64


class Server:
    """Serves files by their names, whole or in ranges as the real one does; and can be gone from a part on."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.gone: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(send=False)

            def do_GET(self) -> None:
                self._answer(send=True)

            def _answer(self, *, send: bool) -> None:
                name = self.path.lstrip("/")
                if name in server.gone:
                    self.close_connection = True  # without an answer, as one that has died
                    return
                content = files.get(name)
                if content is None:
                    self.send_error(404)
                    return
                wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                first = int(wanted[1]) if wanted else 0
                last = min(int(wanted[2]) if wanted and wanted[2] else len(content) - 1, len(content) - 1)
                self.send_response(206 if wanted else 200)
                if wanted:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{name}"')
                self.send_header("Content-Length", str(last - first + 1))
                self.end_headers()
                if send:
                    self.wfile.write(content[first : last + 1])

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def rows(part: int) -> list[dict[str, str]]:
    """As C4's are: text, timestamp, url."""
    return [
        {"text": f"document {part}.{number}: " + "word " * (number % 7), "timestamp": "2019-04-25T12:57:54Z", "url": ""}
        for number in range(ROWS)
    ]


def packed_json(part: int) -> bytes:
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows(part)).encode())


def parquet(part: int) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    written = pyarrow.BufferOutputStream()
    write_table(pyarrow.Table.from_pylist(rows(part)), written, row_group_size=50)
    return written.getvalue().to_pybytes()


KINDS = {"json": ("json.gz", packed_json), "parquet": ("parquet", parquet)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def name(kind: str, part: int) -> str:
    return f"en/c4-train.{part:05d}-of-{PARTS:05d}.{KINDS[kind][0]}"


@pytest.fixture
def server(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    from datasets import config

    for setting in ("RETRY_INTERVAL", "SERVER_UNAVAILABLE_RETRY_INTERVAL", "MAX_RETRIES"):
        value = 1 if setting == "MAX_RETRIES" else 0
        monkeypatch.setattr(config, f"STREAMING_READ_{setting}", value, raising=False)  # datasets 4.0 has not all three
    server = Server({name(kind, part): KINDS[kind][1](part) for part in range(PARTS)})
    yield server
    server.close()


def load(server: Server, kind: str, cache: Path) -> Any:
    from datasets import load_dataset

    files = [f"{server.url}/{name(kind, part)}" for part in range(PARTS)]
    return load_dataset(kind, data_files=files, split="train", streaming=True, cache_dir=str(cache))


def as_bytes(windows: list[Any]) -> list[bytes]:
    return [bytes(window.tolist()) for window in windows]


def data(documents: Any, workers: int = 0) -> Data:
    return Data(Packed(documents, length=LENGTH, shuffle=False), batch_size=4, num_workers=workers, collate=as_bytes)


def text() -> bytes:
    return b"".join(row["text"].encode() + b"\n\n" for part in range(PARTS) for row in rows(part))


def test_stream_continues_in_its_middle_exactly_and_a_server_that_is_gone_is_named(
    server: Server, kind: str, tmp_path: Path
):
    training = FakeTraining(ranks_of_batch=2)
    for world_size, steps, workers in ((2, 8, 0), (1, 9, 1)):
        training.run(data(load(server, kind, tmp_path), workers), world_size=world_size, steps=steps)
    stream = load(server, kind, tmp_path)
    server.gone.add(name(kind, PARTS - 1))
    with pytest.raises(HoldfastError) as cut:
        training.run(data(stream), world_size=2, steps=1000)
    (finding,) = cut.value.findings
    assert (finding.code, cut.value.exit_code) == ("data-unreadable", ExitCode.STORAGE_FAILED)
    assert any(server.url.partition("//")[2] in line or "isconnected" in line for line in finding.evidence)
    server.gone.clear()
    before, whole = len(training.taken), len(text()) // LENGTH // 8
    assert 8 + 9 <= before // 8 < whole
    training.run(data(load(server, kind, tmp_path), 1), world_size=2, steps=whole - before // 8)
    assert b"".join(training.taken) == text()[: LENGTH * 8 * whole]
    assert training.findings == []
