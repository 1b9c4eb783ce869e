"""Generates the Lighthouse's messages from lighthouse.proto: `make proto`, or `python .ci/protobuf.py FOLDER`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parents[1] / "src"
PROTO = "holdfast/lighthouse/lighthouse.proto"
HEADER = "# Generated from lighthouse.proto by `make proto` (grpcio-tools); do not edit.\n"
# The check refuses every runtime older than the generator. These messages need nothing newer than protobuf 4.21, and
# users' images have older runtimes than this project's lock.
VERSION_CHECK = re.compile(
    r"^(?:from google\.protobuf import runtime_version|_runtime_version\.[^)]*\)|# NO CHECKED-IN|# Protobuf Py).*\n",
    re.MULTILINE,
)


def main(folder: Path = SOURCE) -> None:
    """Write `lighthouse_pb2.py` and its types below a folder."""
    if failed := protoc.main(("protoc", f"-I{SOURCE}", f"--python_out={folder}", f"--pyi_out={folder}", PROTO)):
        sys.exit(failed)
    for written in (folder / PROTO).parent.glob("lighthouse_pb2.py*"):
        written.write_text(HEADER + VERSION_CHECK.sub("", written.read_text()))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
