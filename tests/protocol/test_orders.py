"""What goes over the wire once is what each rank is given."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.protocol.orders import (
    MAX_PROGRESS_PER_S,
    MIN_PROGRESS_INTERVAL_S,
    RankLaunch,
    StartRanks,
    decode_frame,
    encode,
    order_decoder,
    progress_interval_s,
)


def launch(rank: int, **env: str) -> RankLaunch:
    return RankLaunch(rank=rank, argv=("train",), env=env, cwd="/", log="log")


@pytest.mark.parametrize(
    "ranks",
    [
        (launch(0, A="a", RANK="0"),),
        (launch(0, A="a", RANK="0"), launch(1, A="a", RANK="1")),
        (launch(0, A="a", ONLY="here"), launch(1, A="a"), launch(2, A="other")),
        (launch(0), launch(1, A="a")),
    ],
)
def test_order_gives_each_rank_what_it_was_meant_to_be_given(ranks: tuple[RankLaunch, ...]) -> None:
    order = order_decoder.decode(encode(StartRanks(replica=0, attempt=0, ranks=ranks, env={"A": "alike", "B": "b"})))
    assert isinstance(order, StartRanks)
    alike = {"A": "alike", "B": "b"}
    assert order.launches == tuple(msgspec.structs.replace(rank, env=alike | rank.env) for rank in ranks)


@pytest.mark.parametrize("nodes", [1, 2, 128, 512, 2048, 100_000])
def test_step_messages_per_second_are_bounded_for_any_number_of_nodes(nodes: int) -> None:
    assert progress_interval_s(nodes) >= MIN_PROGRESS_INTERVAL_S
    assert nodes / progress_interval_s(nodes) <= MAX_PROGRESS_PER_S


@pytest.mark.parametrize("frame", [b"", b"\n", b'{"type":"ranks-stopped"}\n', b"null"])
def test_frame_that_holds_no_message_or_half_a_one_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError):
        decode_frame(frame)
