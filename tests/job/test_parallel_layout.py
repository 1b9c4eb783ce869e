"""Which ranks form a parallel group."""

from __future__ import annotations

from holdfast.job.parallel_layout import Axis, ParallelLayout
from holdfast.job.rules import check_job
from holdfast.job.spec import Job, Parallel

LAYOUT = ParallelLayout(tp=2, cp=2, ep=4, dp=4, pp=2)


def test_ranks_count_along_tp_then_cp_dp_and_pp() -> None:
    assert LAYOUT.world_size == 32
    groups = {axis: tuple(LAYOUT.group(axis, 21)) for axis in Axis}
    assert groups == {
        Axis.TP: (20, 21),
        Axis.CP: (21, 23),
        Axis.EP: (17, 19, 21, 23),
        Axis.DP: (17, 21, 25, 29),
        Axis.PP: (5, 21),
    }


def test_smallest_group_is_along_one_axis_if_possible() -> None:
    cases = {
        (21,): "rank 21",
        (20, 21): "the tp group of ranks 20-21",
        (17, 19): "the cp group of ranks 17, 19",
        (17, 21): "the ep group of ranks 17, 19, 21, 23",
        (17, 25): "the dp group of ranks 17, 21, 25, 29",
        (5, 20): "the tpxpp group of ranks 4-5, 20-21",
        (16, 23): "the tpxep group of ranks 16-23",
        (0, 31): "the tpxcpxdpxpp group of ranks 0-31",
    }
    assert {ranks: LAYOUT.smallest_group(ranks).name for ranks in cases} == cases


def test_data_parallel_size_is_what_the_others_leave() -> None:
    assert ParallelLayout.of(Parallel(tp=2, pp=2), 16) == ParallelLayout(tp=2, dp=4, pp=2)
    for sizes, world_size in ((Parallel(tp=3), 16), (Parallel(tp=2, dp=4), 16), (Parallel(ep=3), 16), (Parallel(), 0)):
        assert ParallelLayout.of(sizes, world_size) is None


def test_sizes_of_a_job_must_divide_its_ranks() -> None:
    cases = {
        ("4", "tp: 4, pp: 2"): (),
        ("4", "tp: 4, dp: 4, pp: 2, ep: 4"): (),
        ("4", "tp: 3"): ("parallel",),
        ("4", "tp: 4, dp: 4"): ("parallel",),
        ("4", "tp: 8, ep: 3"): ("parallel.ep",),
        ("2..4", "tp: 8"): (),
        ("2..4", "tp: 8, dp: 2"): ("parallel.dp",),
    }
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for nodes, sizes in cases:
        parallel = {name: int(size) for name, size in (each.split(": ") for each in sizes.split(", "))}
        job = {"command": ["x"], "nodes": nodes, "ranks_per_node": 8, "parallel": parallel}
        findings = check_job(Job.model_validate(job), ())
        assert all(finding.code == "bad-parallel" for finding in findings)
        found[nodes, sizes] = tuple(finding.where for finding in findings)
    assert found == cases
