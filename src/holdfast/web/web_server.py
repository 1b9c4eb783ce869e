"""Serves the live page on this machine until interrupted."""

from __future__ import annotations

import contextlib
import html
import webbrowser
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode

import uvicorn

from holdfast.findings import Finding
from holdfast.host.files import atomic_write
from holdfast.launch.target_machines import TargetMachines
from holdfast.observe.metrics_server import listen
from holdfast.run_dir import RunDir
from holdfast.security.tokens import new_token
from holdfast.web.run_action import RunAction
from holdfast.web.web_app import WebApp, no_problems

HOST = "127.0.0.1"


def serve_web(
    port: int,
    run: str,
    runs: Callable[[], list[RunDir]],
    *,
    opener: Path | None = None,
    machines: Callable[[str], TargetMachines] | None = None,
    problems: Callable[[RunDir], Sequence[Finding]] = no_problems,
    actions: Sequence[RunAction] = (),
    ready: Callable[[str], None],
) -> None:
    """Serve the page at a port of this machine's loopback; `ready` gets its address, with the token in the fragment.

    With `actions`, the fragment has a second token, which permits them.

    `opener` is a file for a browser to open, so that the token is in no process's arguments. Raises HoldfastError if
    the port is taken.
    """
    token, action_token = new_token(), new_token() if actions else ""
    with listen(HOST, port) as listener:
        at = f"http://{HOST}:{listener.getsockname()[1]}/"
        fragment = {"token": token, **({"actions": action_token} if actions else {}), "run": run}
        address = f"{at}#{urlencode(fragment, quote_via=quote)}"
        ready(address)
        config = uvicorn.Config(
            WebApp(runs, token, machines=machines, problems=problems, actions=actions, action_token=action_token).app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        with _opened(opener, address):
            uvicorn.Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _opened(opener: Path | None, address: str) -> Generator[None]:
    """A browser, told by a private file where to go."""
    if opener is None:
        yield
        return
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">'
    atomic_write(opener, page.encode())
    try:
        webbrowser.open(opener.as_uri())
        yield
    finally:
        opener.unlink(missing_ok=True)
