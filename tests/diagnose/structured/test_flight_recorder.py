"""Combined flight recorder dumps of several ranks."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from holdfast.diagnose.fact import Fact
from holdfast.diagnose.flight_facts import flight_facts
from holdfast.diagnose.log_chunk import LogSource
from holdfast.diagnose.structured import flight_recorder

REAL = Path(__file__).parents[2] / "incidents" / "flight"
"""Of torch 2.15 over Gloo: three ranks, three all_reduces, and a fourth that rank 1 never makes."""


def entry(seq: int, op: str = "all_reduce", *, done: bool = True, group: str = "0", **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": seq,
        "process_group": [group, "default_pg"],
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "state": "completed" if done else "scheduled",
        "time_created_ns": 1_700_000_000_000_000_000 + seq,
        **more,
    }


def dump(
    rank: int, *entries: dict[str, Any], groups: dict[str, list[int]] | None = None, as_pickle: bool = False
) -> flight_recorder.FlightDump:
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in (groups or {}).items()}
    document = {"version": "2.4", "pg_config": config, "pg_status": {}, "entries": list(entries)}
    data = pickle.dumps(document) if as_pickle else json.dumps(document).encode()
    assert flight_recorder.is_dump(data[:4096])
    found = flight_recorder.read(LogSource(name=f"nccl_trace_rank_{rank}"), data)
    assert found is not None
    return found


def told(*dumps: flight_recorder.FlightDump) -> list[tuple[str, int | None]]:
    return [(fact.rule.code, fact.process.rank) for fact in flight_facts(dumps)]


@pytest.mark.parametrize("ending", ["", ".json"])
def test_rank_that_never_made_the_call_is_named_from_real_dumps(ending: str) -> None:
    dumps = [
        flight_recorder.read(LogSource(name=path.name), path.read_bytes())
        for path in sorted(REAL.iterdir())
        if path.suffix == ending
    ]
    assert len(dumps) == 3
    (fact,) = flight_facts([one for one in dumps if one is not None])
    assert isinstance(fact, Fact)
    assert (fact.rule.code, fact.process.rank, fact.values["seq"]) == ("flight-behind", 1, "4")
    assert "ranks 0, 2 in collective 4" in fact.text
    if not ending:
        assert "/workspace/j/train.py:9" in fact.text


@pytest.mark.parametrize("as_pickle", [False, True])
def test_other_call_of_one_rank_is_a_mismatch(as_pickle: bool) -> None:
    common = {"groups": {"0": [0, 1, 2]}, "as_pickle": as_pickle}
    dumps = [dump(rank, entry(1), entry(2, done=False), **common) for rank in (0, 2)]
    other = dump(1, entry(1), entry(2, "broadcast", done=False), **common)
    assert told(*dumps, other) == [("flight-mismatch", 1)]


def test_other_size_is_a_mismatch_where_sizes_must_be_equal() -> None:
    groups = {"0": [0, 1, 2]}
    for op, expected in (("all_reduce", [("flight-mismatch", 2)]), ("all_to_all", [])):
        dumps = [dump(rank, entry(1, op), groups=groups) for rank in (0, 1)]
        assert told(*dumps, dump(2, entry(1, op, input_sizes=[[8]]), groups=groups)) == expected


def test_two_ranks_that_differ_leave_open_which_is_wrong() -> None:
    assert told(dump(0, entry(1, "all_reduce")), dump(1, entry(1, "broadcast"))) == [("flight-mismatch", None)]


def test_rank_that_waits_in_another_group_is_not_the_root_cause() -> None:
    groups = {"0": [0, 1, 2], "tp": [1, 2]}
    waiting = dump(0, entry(5, done=False), groups=groups)
    held_up = dump(1, entry(4), entry(9, group="tp", done=False), groups=groups)
    guilty = dump(2, entry(4), entry(8, group="tp"), groups=groups)
    assert told(waiting, held_up, guilty) == [("flight-behind", 2), ("flight-behind", 2)]


def test_rank_without_a_dump_is_named_when_nobody_else_is_behind() -> None:
    groups = {"0": [0, 1, 2]}
    assert told(*(dump(rank, entry(3, done=False), groups=groups) for rank in (0, 1))) == [("flight-absent", 2)]


def test_all_inside_points_away_from_the_program() -> None:
    groups = {"0": [0, 1]}
    dumps = [dump(rank, entry(3, done=False), groups=groups) for rank in (0, 1)]
    assert told(*dumps) == [("flight-all-waiting", 0)]


def test_ranks_that_wait_for_nothing_say_nothing() -> None:
    assert told(*(dump(rank, entry(1), entry(2), groups={"0": [0, 1]}) for rank in (0, 1))) == []
    assert told(dump(0, entry(1, done=False))) == []


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"entries": 5, "pg_config": [], "pg_status": "x"},
        {"entries": [1, {"process_group": []}, {"collective_seq_id": "9" * 9999, "frames": [{}, 3]}], "pg_config": {}},
        {"entries": [entry(2**80)], "pg_config": {"0": {"ranks": [0, [1]]}}, "pg_status": {"0": {"x": None}}},
    ],
)
def test_strange_dump_is_read_as_far_as_it_goes(document: object) -> None:
    dumps = [flight_recorder.read(LogSource(name=f"trace_{rank}"), json.dumps(document).encode()) for rank in (0, 1)]
    assert list(flight_facts([one for one in dumps if one is not None])) == []


def test_parts_shared_a_billion_times_take_no_room() -> None:
    laughs: list[object] = ["ha"] * 10
    for _ in range(60):
        laughs = [laughs] * 10
    shared = entry(1, done=False, input_sizes=laughs, input_dtypes=laughs, process_group=[laughs], pg_id=laughs)
    data = pickle.dumps({"entries": [shared], "pg_config": {"0": {"name": laughs, "ranks": laughs}}, "pg_status": {}})
    dumps = [flight_recorder.read(LogSource(name=f"trace_{rank}"), data) for rank in (0, 1)]
    assert [one is not None for one in dumps] == [True, True]
    assert all(len(fact.text) < 10_000 for fact in flight_facts([one for one in dumps if one is not None]))
