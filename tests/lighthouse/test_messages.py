"""The Lighthouse's messages on the wire, and the file that is generated for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.lighthouse import lighthouse_pb2 as pb
from holdfast.lighthouse.quorum import Member, Quorum
from holdfast.lighthouse.service import to_member, to_response

ROOT = Path(__file__).resolve().parents[2]

# What the published field numbers make of replica_id "a", address "x", store_address "s", step 3, world_size 1 and
# commit_failures 2.
REQUEST = b"\x0a\x0f\x0a\x01a\x12\x01x\x1a\x01s\x20\x03\x28\x01\x40\x02"


def test_request_is_read() -> None:
    assert to_member(pb.QuorumRequest.FromString(REQUEST).requester) == Member(
        replica_id="a", address="x", store_address="s", step=3, world_size=1, commit_failures=2
    )
    assert pb.HeartbeatRequest.FromString(b"\x0a\x01a").replica_id == "a"


def test_response_is_written() -> None:
    quorum = Quorum(quorum_id=300, members=(Member(replica_id="a", step=-1),), created_at=2.5)
    inner = (
        b"\x08\xac\x02" + b"\x12\x0e\x0a\x01a\x20" + b"\xff" * 9 + b"\x01" + b"\x1a\x08\x08\x02\x10\x80\xca\xb5\xee\x01"
    )
    assert to_response(quorum).SerializeToString() == b"\x0a" + bytes([len(inner)]) + inner


def test_generated_messages_are_those_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run((sys.executable, ROOT / ".ci" / "protobuf.py", tmp_path), check=True)
    for name in ("lighthouse_pb2.py", "lighthouse_pb2.pyi"):
        written = Path("holdfast", "lighthouse", name)
        assert (tmp_path / written).read_text() == (ROOT / "src" / written).read_text(), f"run `make proto`: {name}"
