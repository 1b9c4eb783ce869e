"""Messages of a rank to its agent: a malformed one is distinguished from one of a later version."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from holdfast.protocol.rank_messages import RankToAgent, UnknownKindError, decode_rank_message

KINDS = [kind for kind in get_args(RankToAgent) if kind.__struct_fields__]


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_message_of_a_known_kind_is_not_taken_for_one_of_a_later_version(kind: type[msgspec.Struct]) -> None:
    malformed = {name: [[]] for name in kind.__struct_fields__}
    line = msgspec.json.encode({"type": kind.__struct_config__.tag, **malformed})
    with pytest.raises(ValueError, match="Expected") as raised:
        decode_rank_message(line)
    assert not isinstance(raised.value, UnknownKindError)


def test_message_of_a_kind_that_is_not_known_is_of_a_later_version() -> None:
    with pytest.raises(UnknownKindError):
        decode_rank_message(b'{"type":"from-the-future","rank":0}')
