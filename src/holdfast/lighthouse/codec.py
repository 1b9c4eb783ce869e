"""Encodes and decodes the Lighthouse's messages: the few Protocol Buffers types that they use.

Unknown fields are skipped, and missing ones have their type's zero value, as the format requires.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.lighthouse.quorum import Member, Quorum

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# message QuorumMember { string replica_id = 1; string address = 2; string store_address = 3; int64 step = 4;
#   uint64 world_size = 5; bool shrink_only = 6; string data = 7; int64 commit_failures = 8; }
_MEMBER = {
    1: ("replica_id", str),
    2: ("address", str),
    3: ("store_address", str),
    4: ("step", int),
    5: ("world_size", int),
    6: ("shrink_only", bool),
    7: ("data", str),
    8: ("commit_failures", int),
}


class BadMessage(ValueError):
    """Bytes that do not encode such a message."""


def read_heartbeat(message: bytes) -> str:
    """`LighthouseHeartbeatRequest { string replica_id = 1; }`: the sender's id."""
    return next((_text(value) for number, value in _fields(message) if number == 1), "")


def read_request(message: bytes) -> Member:
    """`LighthouseQuorumRequest { QuorumMember requester = 1; }`: the requester."""
    inner = next((value for number, value in _fields(message) if number == 1), b"")
    if not isinstance(inner, bytes):
        raise BadMessage("the requester is no message")
    found: dict[str, str | int | bool] = {}
    for number, value in _fields(inner):
        name, kind = _MEMBER.get(number, ("", str))
        if name:
            found[name] = _text(value) if kind is str else kind(_number(value))
    return Member(**{"replica_id": "", **found})  # pyright: ignore[reportArgumentType] - by the table above


def write_response(quorum: Quorum) -> bytes:
    """`LighthouseQuorumResponse { Quorum quorum = 1; }`."""
    seconds, rest = divmod(quorum.created_at, 1)
    # message Quorum { int64 quorum_id = 1; repeated QuorumMember participants = 2; Timestamp created = 3; }
    inner = _write(1, quorum.quorum_id)
    inner += b"".join(_write(2, _member(member)) for member in quorum.members)
    inner += _write(3, _write(1, int(seconds)) + _write(2, int(rest * 1e9)))
    return _write(1, inner)


def _member(member: Member) -> bytes:
    return b"".join(_write(number, getattr(member, name)) for number, (name, _) in _MEMBER.items())


def _write(number: int, value: str | bytes | int) -> bytes:
    if not value:
        return b""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value & (1 << 64) - 1)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise BadMessage(f"a field of type {kind}")
        if at + length > len(message):
            raise BadMessage("it ends inside a field")
        yield key >> 3, message[at : at + length]
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise BadMessage("it ends inside a number")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return value, at
    raise BadMessage("a number of more than ten bytes")


def _text(value: bytes | int) -> str:
    if not isinstance(value, bytes):
        raise BadMessage("a number where a text is due")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadMessage("a text that is not UTF-8") from None


def _number(value: bytes | int) -> int:
    """An int64: values above its range are negative."""
    if not isinstance(value, int):
        raise BadMessage("a text where a number is due")
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
