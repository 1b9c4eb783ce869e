"""A pickle is read as data, and nothing in it is ever run."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path

import pytest

from holdfast.diagnose.structured.safe_pickle import UnsafePickle, read

VALUE = {
    "entries": [{"name": "all_reduce", "sizes": [[4, 2**40], []], "at": 1.5, 3: None}, ("a", ("b",), True, False)],
    "big": 2**70,
    "bytes": b"\x00\xff",
    "long": "é" * 300,
    "negative": [-1, -(2**31), 255, 256, 65536],
    "empty": [{}, [], ()],
}


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_containers_are_read_in_every_protocol(protocol: int) -> None:
    value = {key: item for key, item in VALUE.items() if protocol >= 3 or key != "bytes"}
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"entries": [Harmful(tmp_path / "made")]}, protocol)
    with pytest.raises(UnsafePickle):
        read(data)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02.",
        b"\x80\x02}",
        b"\x80\x02t.",
        b"\x80\x02s.",
        b"\x80\x02}]Ns.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02h\x05.",
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x05\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"(I1\nI2\nios\nsystem\n.",
        b"Pa\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02" + b"\x85" * 100_000 + b"}",
    ],
)
def test_damage_is_refused(data: bytes) -> None:
    with pytest.raises(UnsafePickle):
        read(data)


@pytest.mark.slow
def test_key_nested_without_end_is_refused() -> None:
    with pytest.raises(UnsafePickle):
        read(b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.")


def test_any_bytes_give_a_value_or_are_refused() -> None:
    draw = random.Random(6)
    whole = [pickle.dumps(VALUE, protocol) for protocol in (2, 5)]
    for _ in range(3000):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 12)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            read(bytes(data[: draw.randrange(len(data) + 1)]))
        except UnsafePickle:
            pass
