"""`python -m holdfast.agent.trace_upload URL FILE < TOKEN`: an agent's process that uploads the trace of a profile.

A separate process, like code_download.py. It writes why the trace was not uploaded, with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx

from holdfast.agent.http_client import SNI_EXTENSION, make_client
from holdfast.host.files import open_regular
from holdfast.run_dir import MAX_TRACE_BYTES

READ_TIMEOUT_S = 30.0


def main() -> int:
    """Upload one file."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.trace_upload")
    parser.add_argument("url", help="where the controller stores the trace")
    parser.add_argument("file", type=Path)
    parser.add_argument("--ca", type=Path, help="certificate that the controller presents")
    options = parser.parse_args()
    try:
        with (
            make_client(sys.stdin.read().strip(), options.ca, read_timeout_s=READ_TIMEOUT_S) as controller,
            open_regular(options.file) as file,
        ):
            data = file.read(MAX_TRACE_BYTES + 1)
            answer = controller.put(options.url, content=data, extensions=SNI_EXTENSION)
            if answer.is_success:
                return 0
            sys.stdout.write(f"the controller refused the trace: {answer.status_code} {answer.text[:200]}\n")
    except (httpx.HTTPError, OSError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
