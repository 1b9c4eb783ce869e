"""The Lighthouse's messages on the wire, and garbage."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from holdfast.lighthouse.codec import BadMessage, read_heartbeat, read_request, write_response
from holdfast.lighthouse.quorum import Member, Quorum

# What the published field numbers make of replica_id "a", address "x", store_address "s", step 3, world_size 1 and
# commit_failures 2.
REQUEST = b"\x0a\x0f\x0a\x01a\x12\x01x\x1a\x01s\x20\x03\x28\x01\x40\x02"


def test_request_is_read() -> None:
    assert read_request(REQUEST) == Member(
        replica_id="a", address="x", store_address="s", step=3, world_size=1, commit_failures=2
    )
    assert read_heartbeat(b"\x0a\x01a") == "a"


def test_response_is_written() -> None:
    quorum = Quorum(quorum_id=300, members=(Member(replica_id="a", step=-1),), created_at=2.5)
    inner = (
        b"\x08\xac\x02" + b"\x12\x0e\x0a\x01a\x20" + b"\xff" * 9 + b"\x01" + b"\x1a\x08\x08\x02\x10\x80\xca\xb5\xee\x01"
    )
    assert write_response(quorum) == b"\x0a" + bytes([len(inner)]) + inner


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message_or_none(garbage: bytes) -> None:
    for read in (read_request, read_heartbeat):
        try:
            read(garbage)
        except BadMessage:
            pass


@pytest.mark.parametrize("torn", [REQUEST[:-1], b"\x0a\xff", b"\x0b", b"\xff" * 11])
def test_torn_message_is_refused(torn: bytes) -> None:
    with pytest.raises(BadMessage):
        read_request(torn)
