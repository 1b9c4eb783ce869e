"""Traces of several ranks: what they show together, and the file that Perfetto loads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.metrics.profiler_events import BACKWARD, STEP
from holdfast.metrics.rank_trace import RankTrace, UnreadableTrace, parse_rank_trace, read_rank_trace
from holdfast.metrics.step_breakdown import StepPart
from holdfast.metrics.trace_merge import clock_offsets, merged_trace
from holdfast.metrics.trace_summary import gains, rank_profile, summary_lines

BASE_NS = 1_700_000_000_000_000_000
LOOP, GLOO = 41, 42
"""Threads."""


def complete(name: str, cat: str, ts: float, dur: float, *, pid: int | str = 7, tid: int | str = LOOP, **args: Any):
    return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def parsed(rank: int, *events: dict[str, Any], host: str = "a", ahead_ns: int = 0) -> RankTrace:
    whole = {
        "schemaVersion": 1,
        "host_name": host,
        "baseTimeNanoseconds": BASE_NS + ahead_ns,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 7,
                "tid": LOOP,
                "ts": 0.0,
                "args": {"name": "thread 41 (python)"},
            },
            *events,
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9},
        ],
    }
    return parse_rank_trace(json.dumps(whole).encode(), rank=rank, node=f"node{rank}")


def step_of(at: float, *, work_us: float, wait_us: float, optimizer_us: float = 10.0) -> list[dict[str, Any]]:
    """Forward, an all-reduce that waits for the other rank, and the optimizer."""
    sent = at + work_us
    return [
        complete(STEP, "user_annotation", at, 0),
        complete("aten::linear", "cpu_op", at, work_us),
        complete("aten::addmm", "cpu_op", at + 1, work_us - 2),
        complete(BACKWARD, "user_annotation", at + 1, work_us - 1 + wait_us),
        complete("gloo:all_reduce", "user_annotation", sent, wait_us, tid=GLOO),
        complete("Optimizer.step#SGD.step", "user_annotation", sent + wait_us, optimizer_us),
        complete("aten::add_", "cpu_op", sent + wait_us, optimizer_us),
    ]


def two_ranks(*, host: str = "a", ahead_ns: int = 0) -> list[RankTrace]:
    """Steps of 100 µs: rank 1 computes for 80, rank 0 for 30 and waits; the transfer takes 10."""
    end = complete(STEP, "user_annotation", 300, 0)
    fast = [event for at in (0, 100, 200) for event in step_of(at, work_us=30, wait_us=60)]
    slow = [event for at in (0, 100, 200) for event in step_of(at, work_us=80, wait_us=10)]
    return [parsed(0, *fast, end), parsed(1, *slow, end, host=host, ahead_ns=ahead_ns)]


def test_profile_of_ranks_splits_own_work_from_communication_and_names_the_gains() -> None:
    fast, slow = map(rank_profile, two_ranks())
    assert fast.step_s == slow.step_s == pytest.approx(100e-6)
    assert [each.parts[StepPart.COMMUNICATION] for each in (fast, slow)] == pytest.approx([60e-6, 10e-6])
    assert [each.own_s for each in (fast, slow)] == pytest.approx([40e-6, 90e-6])
    found = {gain.without: gain for gain in gains([fast, slow])}
    assert list(found) == ["waiting for the slowest rank", "optimizer", "transfers"]
    # Were rank 1 as fast as rank 0; without the 10 µs of the slowest rank's optimizer; were all-reduces free.
    assert [gain.step_s for gain in found.values()] == pytest.approx([50e-6, 90e-6, 90e-6])
    assert found["optimizer"].share_of(100e-6) == pytest.approx(0.1)
    # Self time: an operator's own, without those that it calls.
    assert dict(slow.top) == pytest.approx({"aten::addmm": 78e-6, "aten::add_": 10e-6, "aten::linear": 2e-6})


def test_summary_of_ranks_is_read_in_words() -> None:
    assert summary_lines(two_ranks()) == [
        "If it were gone, a step of 0.1 ms would take at least:",
        "  0.05 ms (50% less) without waiting for the slowest rank: 0.025 ms on average",
        "  0.09 ms (10% less) without optimizer: 0.01 ms on average",
        "  0.09 ms (10% less) without transfers: 0.01 ms on average",
        "rank 0 on node0: own work 0.04 ms, exposed communication 0.06 ms, overlapped 0 ms",
        "  0.028 ms aten::addmm",
        "  0.01 ms aten::add_",
        "  0.002 ms aten::linear",
        "rank 1 on node1: own work 0.09 ms, exposed communication 0.01 ms, overlapped 0 ms",
        "  0.078 ms aten::addmm",
        "  0.01 ms aten::add_",
        "  0.002 ms aten::linear",
    ]


def test_gpu_trace_shows_kernels_exposed_communication_bubbles_and_idle_device() -> None:
    """Rows as Kineto writes them for CUDA: a launch and its kernel share `correlation`, streams are threads."""
    gpu: dict[str, Any] = {"pid": 0, "tid": 7}
    trace = parsed(
        0,
        complete(STEP, "user_annotation", 0, 0),
        complete("aten::mm", "cpu_op", 0, 8, **{"External id": 1}),
        complete("cudaLaunchKernel", "cuda_runtime", 2, 4, correlation=11),
        complete("ampere_sgemm_128x64_tn", "kernel", 10, 50, **gpu, device=0, stream=7, correlation=11),
        # 20 µs of the all-reduce run beside the GEMM.
        complete("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 40, 30, pid=0, tid=20, correlation=12),
        complete("ncclDevKernel_SendRecv", "kernel", 70, 20, pid=0, tid=20, correlation=13),
        complete(STEP, "user_annotation", 100, 0),
    )
    found = rank_profile(trace)
    assert found.top[0] == ("ampere_sgemm_128x64_tn", pytest.approx(50e-6))
    assert found.parts[StepPart.COMMUNICATION] == pytest.approx(30e-6)
    assert found.overlapped_s == pytest.approx(20e-6)
    assert found.bubble_s == pytest.approx(20e-6)
    assert found.idle_s == pytest.approx(20e-6)
    assert {"device idle", "pipeline bubbles"} <= {gain.without for gain in gains([found])}


@pytest.mark.parametrize("ahead_ns", [-3_000_000_000, 0, 250, 70_000_000])
def test_clock_of_another_machine_is_found_from_the_ends_of_collectives(ahead_ns: int) -> None:
    offset = clock_offsets(two_ranks(host="b", ahead_ns=ahead_ns))[1]
    assert (offset.ahead_ns, offset.error_ns, offset.collectives) == (ahead_ns, 0, 3)


def test_ranks_of_one_machine_are_not_shifted() -> None:
    assert clock_offsets(two_ranks(ahead_ns=1000))[1].ahead_ns == 0


def test_merged_trace_is_one_clock_one_process_a_rank_and_keeps_flows_apart() -> None:
    flow = {"name": "fwdbwd", "cat": "fwdbwd", "pid": 7, "tid": LOOP, "id": 5}
    first, second = two_ranks(host="b", ahead_ns=70_000_000)
    flows = parsed(0, *({**flow, "ph": end, "ts": ts, "bp": "e"} for end, ts in (("s", 20.0), ("f", 90.0))))
    traces = [RankTrace(rank=0, node="node0", host="a", base_ns=BASE_NS, entries=first.entries + flows.entries), second]
    found = json.loads(b"".join(merged_trace(traces[::-1], clock_offsets(traces))))
    assert found["displayTimeUnit"] == "ms"
    rows = [row for row in found["traceEvents"] if row["ph"] != "M"]
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
    names = {row["pid"]: row["args"]["name"] for row in found["traceEvents"] if row["name"] == "process_name"}
    assert names == {1000: "rank 0 · node0", 2000: "rank 1 · node1"}
    ends = {row["pid"]: row["ts"] + row["dur"] for row in rows if row["name"] == "gloo:all_reduce"}
    assert ends[1000] == pytest.approx(ends[2000])
    assert {row["id"] for row in rows if row["ph"] in "sf"} == {5}
    assert all(row["pid"] in names for row in rows)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": 3}', b"\xff", b'{"traceEvents": [{"ts": 1}]}'])
def test_file_that_is_no_trace_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(UnreadableTrace):
        read_rank_trace(path, rank=0, node="node0")
    path.write_bytes(content)
    with pytest.raises(UnreadableTrace):
        read_rank_trace(path, rank=0, node="node0")


def test_trace_without_a_step_has_no_profile() -> None:
    with pytest.raises(ValueError, match="no step is recorded"):
        rank_profile(parsed(0, complete("aten::mm", "cpu_op", 0, 8)))
