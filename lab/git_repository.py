"""A git repository, served over HTTP as GitOps tools fetch it."""

from __future__ import annotations

import contextlib
import gzip
import subprocess
import threading
from collections.abc import Generator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_SERVICE = "git-upload-pack"
_NEVER_CACHED = {"Cache-Control": "no-cache"}


class GitRepository:
    """A repository with one branch, `main`, whose commits replace all files."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        """Where it is served."""

    def commit(self, files: Mapping[str, str]) -> str:
        """Commit these files and no others; return the commit's hash."""
        for path in self._git("ls-files").splitlines():
            (self.folder / path).unlink()
        for path, text in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)
        self._git("add", "--all")
        self._git("commit", "--quiet", "--allow-empty", "--message=change")
        return self._git("rev-parse", "HEAD").strip()

    def _git(self, *words: str) -> str:
        author = ("-c", "user.name=lab", "-c", "user.email=lab@localhost", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ("git", *author, *words), cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout


class _SmartHttp(BaseHTTPRequestHandler):
    """Git's protocol for reading over HTTP, by git's own program for it."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self._folder = folder
        super().__init__(*args)

    def do_GET(self) -> None:
        if not self.path.endswith(f"/info/refs?service={_SERVICE}"):
            self.send_error(404)
            return
        service = f"# service={_SERVICE}\n"
        refs = self._upload_pack("--advertise-refs")
        self._answer("advertisement", f"{len(service) + 4:04x}{service}0000".encode() + refs)

    def do_POST(self) -> None:
        if not self.path.endswith(f"/{_SERVICE}"):
            self.send_error(404)
            return
        request = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            request = gzip.decompress(request)
        self._answer("result", self._upload_pack(request=request))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _upload_pack(self, *options: str, request: bytes = b"") -> bytes:
        command = ("git", "upload-pack", "--stateless-rpc", *options, self._folder)
        return subprocess.run(command, input=request, capture_output=True, check=True).stdout

    def _answer(self, what: str, body: bytes) -> None:
        self.send_response(200)
        for name, value in {**_NEVER_CACHED, "Content-Type": f"application/x-{_SERVICE}-{what}"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def git_repository(folder: Path) -> Generator[GitRepository]:
    """Create an empty repository in a folder, and serve it."""
    subprocess.run(("git", "init", "--quiet", "--initial-branch=main", folder), check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_SmartHttp, folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield GitRepository(folder, f"http://127.0.0.1:{server.server_port}/repository.git")
        finally:
            server.shutdown()
