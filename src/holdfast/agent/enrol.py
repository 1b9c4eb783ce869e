"""`python -m holdfast.agent.enrol NODE ...`: becomes the agent of whichever generation of the node it is.

Where something else than holdfast makes a node's next life, such as a cluster's own controllers, that life cannot be
told beforehand which one it is. It asks the controller, which knows, and is given the token of that generation.
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

from holdfast.agent.asking import SNI, client
from holdfast.agent.fetch import fetch
from holdfast.errors import HoldfastError
from holdfast.events import paths
from holdfast.folder import write_private
from holdfast.host.files import read_line

log = logging.getLogger("holdfast.agent")

RETRY_S = (0.05, 0.1, 0.2)
"""Seconds between requests, from the first answer of a kind on; then `PATIENT_S` each."""
PATIENT_S = 0.5
ANSWER_S = 10.0


def main() -> None:
    """Ask until there is an answer, and become the agent; the options that are not named here are the agent's."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.enrol")
    parser.add_argument("node", type=int)
    parser.add_argument("--newcomer-token-file", required=True, type=Path, help="file with the slot's token")
    parser.add_argument("--token-file", required=True, type=Path, help="file that takes the generation's token")
    parser.add_argument("--controller", required=True)
    parser.add_argument("--ca", type=Path)
    parser.add_argument("--address", required=True)
    parser.add_argument("--controller-grace-s", required=True, type=float)
    parser.add_argument("--code", required=True, type=Path)
    parser.add_argument("--copies", type=Path)
    options, rest = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    enrolled = _enrol(options)
    options.token_file.unlink(missing_ok=True)
    write_private(options.token_file, enrolled.token)
    _fetch(options, enrolled)
    named = {"controller": options.controller, "token-file": options.token_file, "address": options.address}
    named |= {"controller-grace-s": options.controller_grace_s, "code": options.code}
    named |= {name: value for name in ("ca", "copies") if (value := getattr(options, name))}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    argv = [sys.executable, "-m", "holdfast.agent", str(options.node), str(enrolled.generation), *words, *rest]
    os.execv(sys.executable, argv)


class Enrolled(msgspec.Struct, frozen=True):
    """Which generation runs here, its token, and the digest of the code that it will need."""

    generation: int
    token: str
    code: str = ""


def _fetch(options: argparse.Namespace, enrolled: Enrolled) -> None:
    """Have the code here before ranks are to start. What goes wrong goes wrong again for the agent, which says so."""
    if enrolled.code:
        with contextlib.suppress(HoldfastError, httpx.TransportError):
            url = paths.url_of(options.controller, paths.CODE + enrolled.code)
            fetch(url, enrolled.token, options.code, ca=options.ca, copies=options.copies)


def _enrol(options: argparse.Namespace) -> Enrolled:
    """Who runs here; leaves when nobody has said so for the controller's grace."""
    url = paths.url_of(options.controller, paths.ENROL)
    token = read_line(options.newcomer_token_file)
    deadline = time.monotonic() + options.controller_grace_s
    said, waits = "", iter(RETRY_S)
    with client(token, options.ca, answer_s=ANSWER_S) as controller:
        while time.monotonic() < deadline:
            try:
                answer = controller.post(url, json={"address": options.address}, extensions=SNI)
                if answer.status_code == HTTPStatus.OK:
                    return msgspec.json.decode(answer.content, type=Enrolled)
                problem = f"it answers {answer.status_code} {answer.text[:200]}"
                if answer.status_code == HTTPStatus.UNAUTHORIZED:
                    sys.exit(f"the controller does not know this node: {problem}")
            except httpx.TransportError as error:
                problem = f"it is out of reach: {error}"
            if problem != said:
                log.info("the controller does not say yet who this is: %s", problem)
                said, waits = problem, iter(RETRY_S)
            time.sleep(next(waits, PATIENT_S))
    sys.exit(f"no controller said who this is: {said}")


if __name__ == "__main__":
    main()
