"""`python -m holdfast.agent.bootstrap NODE ...`: becomes the agent of the node's current generation.

Where something other than holdfast restarts a node, such as a Kubernetes controller, the generation is not known in
advance. The bootstrap process requests it from the holdfast controller, together with that generation's token.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
from http import HTTPStatus
from pathlib import Path

import httpx
import msgspec

from holdfast.agent.code_download import download_code
from holdfast.agent.http_client import SNI_EXTENSION, make_client
from holdfast.errors import HoldfastError
from holdfast.host.files import read_line
from holdfast.protocol import routes
from holdfast.run_dir import write_private

log = logging.getLogger("holdfast.agent")

RETRY_DELAYS_S = (0.05, 0.1, 0.2)
"""Seconds between requests while the controller gives the same answer; then `MAX_RETRY_DELAY_S` each."""
MAX_RETRY_DELAY_S = 0.5
READ_TIMEOUT_S = 10.0


def main() -> None:
    """Request the assignment, then exec the agent; options that are not parsed here are passed on to it."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.bootstrap")
    parser.add_argument("node", type=int)
    parser.add_argument("--bootstrap-token-file", required=True, type=Path, help="file with the slot's token")
    parser.add_argument("--token-file", required=True, type=Path, help="file that takes the generation's token")
    parser.add_argument("--controller", required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--controller-grace-s", required=True, type=float)
    parser.add_argument("--code", required=True, type=Path)
    parser.add_argument("--log-replica", type=Path)
    options, rest = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    assignment = _request_assignment(options)
    options.token_file.unlink(missing_ok=True)
    write_private(options.token_file, assignment.token)
    _prefetch_code(options, assignment)
    named = {"controller": options.controller, "token-file": options.token_file, "address": options.address}
    named |= {"controller-grace-s": options.controller_grace_s, "code": options.code}
    named |= {name: value for name in ("ca", "log-replica") if (value := getattr(options, name.replace("-", "_")))}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    argv = [sys.executable, "-m", "holdfast.agent", str(options.node), str(assignment.generation), *words, *rest]
    os.execv(sys.executable, argv)


class NodeAssignment(msgspec.Struct, frozen=True):
    """The node's generation, its token, and the digest of the code it will need."""

    generation: int
    token: str
    code: str = ""


def _prefetch_code(options: argparse.Namespace, assignment: NodeAssignment) -> None:
    """Download the code before ranks start. Errors are ignored: the agent repeats the download and reports them."""
    if assignment.code:
        with contextlib.suppress(HoldfastError, httpx.TransportError):
            url = routes.http_url(options.controller, routes.CODE + assignment.code)
            download_code(url, assignment.token, options.code, ca=options.ca, log_replica=options.log_replica)


def _request_assignment(options: argparse.Namespace) -> NodeAssignment:
    """Request the assignment; exit when no controller has given one within the controller's grace."""
    url = routes.http_url(options.controller, routes.BOOTSTRAP)
    token = read_line(options.bootstrap_token_file)
    deadline = time.monotonic() + options.controller_grace_s
    last_problem, waits = "", iter(RETRY_DELAYS_S)
    with make_client(token, options.ca, read_timeout_s=READ_TIMEOUT_S) as controller:
        while time.monotonic() < deadline:
            try:
                answer = controller.post(url, json={"address": options.address}, extensions=SNI_EXTENSION)
                if answer.status_code == HTTPStatus.OK:
                    return msgspec.json.decode(answer.content, type=NodeAssignment)
                problem = f"it answers {answer.status_code} {answer.text[:200]}"
                if answer.status_code == HTTPStatus.UNAUTHORIZED:
                    sys.exit(f"the controller does not know this node: {problem}")
            except httpx.TransportError as error:
                problem = f"it is out of reach: {error}"
            if problem != last_problem:
                log.info("the controller has not assigned a generation yet: %s", problem)
                last_problem, waits = problem, iter(RETRY_DELAYS_S)
            time.sleep(next(waits, MAX_RETRY_DELAY_S))
    sys.exit(f"no controller assigned a generation: {last_problem}")


if __name__ == "__main__":
    main()
