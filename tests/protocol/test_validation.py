"""Decodable but impossible messages are refused; every valid message passes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from holdfast.events import AgentConnected, ExitReason, FindingRaised, RankExited, RanksStarted, RankState
from holdfast.findings import Finding
from holdfast.protocol.orders import AgentMessage, NodeStep, Progress, agent_message_decoder
from holdfast.protocol.validation import MAX_METRICS, out_of_range

NOW = 1.8e9
JOINED = AgentConnected(
    at=NOW,
    source="node0.0/i",
    node=0,
    generation=0,
    incarnation="i",
    hostname="h",
    address="fe80::1%eth0",
    port=4000,
    pid=1,
    running=(RankState(rank=0, pid=2),),
)
EXITED = RankExited(
    at=NOW, node=0, replica=0, attempt=0, rank=0, reason=ExitReason.CODE, code=-(2**31), error="É" * 500
)
STEP = NodeStep(step=2**53, started=NOW, ended=0.0, metrics={"loss": -1.7e308})
HONEST: list[AgentMessage] = [
    JOINED,
    EXITED,
    RanksStarted(at=NOW, node=0, replica=0, attempt=0, ranks=(RankState(rank=16_383, pid=4_194_304),) * 16_384),
    Progress(node=0, replica=0, attempt=2, steps=(STEP,) * 500, seq=7),
    FindingRaised(at=NOW, finding=Finding(code="c", what="w", evidence=("line",) * 1000)),
]


@pytest.mark.parametrize("word", HONEST, ids=lambda word: type(word).__name__)
def test_valid_message_passes(word: AgentMessage) -> None:
    assert agent_message_decoder.decode(msgspec.json.encode(word)) == word


ABSURD: list[tuple[AgentMessage, dict[str, Any]]] = [
    (JOINED, {"at": 1e300}),
    (JOINED, {"at": -1e300}),
    (JOINED, {"port": 65_536}),
    (JOINED, {"port": -1}),
    (JOINED, {"address": ""}),
    (JOINED, {"address": "a\0b"}),
    (JOINED, {"address": "a b"}),
    (JOINED, {"node": 2**70}),
    (JOINED, {"attempt": -2}),
    (JOINED, {"hostname": "h" * 100_000}),
    (JOINED, {"running": [{"rank": -1, "pid": 1}]}),
    (JOINED, {"running": [{"rank": 1, "pid": 2**40}]}),
    (JOINED, {"running": [{"rank": 1, "pid": 1}] * 70_000}),
    (EXITED, {"rank": 2**60}),
    (EXITED, {"code": 10**30}),
    (HONEST[3], {"steps": [{"step": 2**54, "started": 1, "ended": 2}]}),
    (HONEST[3], {"steps": [{"step": -2, "started": 1, "ended": 2}]}),
    (HONEST[3], {"steps": [{"step": 1, "started": 1e308, "ended": -1e308}]}),
    (
        HONEST[3],
        {"steps": [{"step": 1, "started": 1, "ended": 2, "metrics": {str(n): 0 for n in range(MAX_METRICS + 1)}}]},
    ),
    (HONEST[3], {"steps": [{"step": 1, "started": 1, "ended": 2, "metrics": {"n" * (MAX_METRICS + 1): 0}}]}),
    (HONEST[4], {"finding": {"code": "c", "what": "w" * 100_000}}),
]


@pytest.mark.parametrize(("word", "absurd"), ABSURD, ids=[str(absurd)[:50] for _, absurd in ABSURD])
def test_out_of_range_message_is_refused_briefly(word: AgentMessage, absurd: dict[str, Any]) -> None:
    text = json.dumps(msgspec.to_builtins(word) | absurd).encode()
    with pytest.raises(msgspec.ValidationError, match="out of bounds") as refusal:
        agent_message_decoder.decode(text)
    assert len(str(refusal.value)) < 200


def test_implausible_names_the_field() -> None:
    assert out_of_range(msgspec.structs.replace(EXITED, rank=2**60)) == f"rank: {2**60}"
    assert out_of_range(msgspec.structs.replace(JOINED, running=(RankState(rank=-1, pid=1),))) == "running: rank: -1"
