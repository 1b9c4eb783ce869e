"""A device whose mini model ends unlike that of most devices of its type is named."""

from __future__ import annotations

from holdfast.events.probe_results import MiniModelAnswer
from holdfast.train.probe.stages import unlike_answers


def answers(*digests: str, arithmetic: str = "A") -> list[MiniModelAnswer | None]:
    return [MiniModelAnswer(arithmetic=arithmetic, digest=digest) for digest in digests]


def test_minority_among_equal_devices_is_named_and_a_pair_proves_nothing() -> None:
    mixed = [*answers("aa", "aa", "ab"), *answers("cc", "cc", "cc", arithmetic="B"), None]
    found = unlike_answers(dict(enumerate(mixed)))
    assert found == {2: "the mini model gives ab, and aa on 2 other devices (A)"}
    assert unlike_answers(dict(enumerate(answers("aa", "ab")))) == {}
    assert unlike_answers(dict(enumerate([*answers("aa"), *answers("ab", arithmetic="B")]))) == {}
