"""Step times, the search, and what a plan says of its result."""

from __future__ import annotations

import pytest
from msgspec.structs import fields, replace

from holdfast.events.probe_results import (
    AllReduceRate,
    DeviceRates,
    MatmulRate,
    NodeAllReduce,
    ProbeOutcome,
    ProbeResult,
)
from holdfast.plan.hardware import MACHINES, Calibration, calibrated
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.memory import memory
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.predict import predict
from holdfast.plan.request import from_probe
from holdfast.plan.search import layouts, search
from holdfast.plan.step_time import (
    ALL_GATHER,
    COMPILED_RING,
    PYTORCH_RING,
    RING,
    SOFTWARE,
    TORCHAO_CAST_BYTES,
    Precision,
    StepTime,
    Workload,
    step_time,
)

H100 = MACHINES["h100-ndr"]
LLAMA_8B = Workload(model=MODELS["llama-3-8b"], length=8192, batch=64)
LLAMA_70B = Workload(model=MODELS["llama-3-70b"], length=8192, batch=128)


def test_total_is_the_sum_of_all_parts() -> None:
    time = step_time(LLAMA_70B, Layout(tp=4, pp=4, cp=2, dp=2, recompute=Recompute.FULL), H100)
    parts = [getattr(time, field.name) for field in fields(StepTime)]
    assert all(part >= 0 for part in parts)
    assert time.total == pytest.approx(sum(parts))


def test_full_recomputation_costs_about_a_third() -> None:
    plain = Layout(dp=8, sharding=Sharding.FSDP)
    again = step_time(LLAMA_8B, replace(plain, recompute=Recompute.FULL), H100).total
    assert again / step_time(LLAMA_8B, plain, H100).total == pytest.approx(1.3, abs=0.04)


def test_interleaving_divides_the_bubble() -> None:
    plain = step_time(LLAMA_70B, Layout(tp=8, pp=8, dp=1), H100)
    chunks = step_time(LLAMA_70B, Layout(tp=8, pp=8, dp=1, interleave=10), H100)
    work = plain.total - plain.bubble - plain.pipeline - plain.data - plain.optimizer - plain.scale
    assert plain.bubble - chunks.bubble == pytest.approx(7 * (1 - 1 / 10) * work / 128)


def test_slow_network_makes_fsdp_wait() -> None:
    layout = Layout(dp=64, sharding=Sharding.FSDP)
    slow, fast = (step_time(LLAMA_8B, layout, MACHINES[name]).data for name in ("h100-10g-tcp", "h100-ndr"))
    assert slow > 20 * fast


def test_pytorch_fetches_keys_of_all_heads_and_merges_them_in_more_kernels() -> None:
    layout = Layout(cp=8, sharding=Sharding.FSDP)
    long = replace(LLAMA_8B, length=131_072, batch=1)
    ring, torch_ring = (
        step_time(replace(long, software=replace(SOFTWARE["compiled"], context=how)), layout, H100).context
        for how in (RING, PYTORCH_RING)
    )
    assert torch_ring > 3 * ring
    assert step_time(long, replace(layout, recompute=Recompute.FULL), H100).recompute > ring / 3


def test_compiled_ring_waits_for_keys_and_for_their_gradients_in_fp32() -> None:
    layout, how = Layout(tp=8, cp=8), replace(COMPILED_RING, merge_bytes=0)
    load = replace(LLAMA_8B, length=65_536, batch=1, software=replace(SOFTWARE["compiled"], context=how))
    sent = load.model.shape.layers * 7 * 8192 * (load.model.query_width + load.model.value_width) / 8 * 2
    exposed = step_time(load, layout, H100).context
    assert exposed == pytest.approx((1 + 1 + 2) * sent / H100.network_rate)
    hidden = replace(load, software=replace(load.software, context=replace(PYTORCH_RING, merge_bytes=0)))
    assert step_time(hidden, layout, H100).context < exposed


def test_torchao_casts_move_six_bytes_per_operand_and_are_repeated_with_their_products() -> None:
    load, shape = replace(LLAMA_8B, software=SOFTWARE["compiled"]), LLAMA_8B.model.shape
    plain = Layout(dp=8, sharding=Sharding.FSDP)
    bf16, fp8 = (
        step_time(replace(load, precision=each), plain, H100).elementwise for each in (Precision.BF16, Precision.FP8)
    )
    operands = 4 * shape.hidden + 2 * LLAMA_8B.model.query_width + LLAMA_8B.model.kv_width + 3 * shape.intermediate
    moved = TORCHAO_CAST_BYTES * operands * shape.layers * LLAMA_8B.tokens / 8
    assert fp8 - bf16 == pytest.approx(moved / (H100.gpu.memory_rate * H100.gpu.memory))

    costly = replace(load, precision=Precision.FP8, software=replace(load.software, cast_bytes=2 * TORCHAO_CAST_BYTES))
    cheap = replace(load, precision=Precision.FP8)
    again = replace(plain, recompute=Recompute.SELECTIVE)
    more, less = (step_time(each, again, H100).recompute for each in (costly, cheap))
    assert more - less == pytest.approx((fp8 - bf16) / 3)


def test_keys_gathered_before_attention_hide_behind_nothing() -> None:
    layout, load = Layout(cp=2, dp=4), replace(LLAMA_8B, batch=4)
    exposed = step_time(replace(load, software=replace(load.software, context=ALL_GATHER)), layout, H100).context
    sent = load.model.shape.layers * 3 * 4096 * load.model.kv_width * 2
    assert exposed == pytest.approx(sent / H100.link_rate)


def test_selective_recomputation_repeats_every_fp8_product() -> None:
    layout = Layout(dp=8, sharding=Sharding.FSDP, recompute=Recompute.SELECTIVE)
    load = replace(LLAMA_8B, software=SOFTWARE["compiled"])
    repeated = [replace(load, precision=each).repeated_products for each in Precision]
    assert repeated == [0.5, 1.0, 0.5]
    fewer = replace(load, software=replace(load.software, selective_products_fp8=0.5), precision=Precision.FP8)
    more = replace(load, precision=Precision.FP8)
    assert step_time(more, layout, H100).recompute > 1.2 * step_time(fewer, layout, H100).recompute


def test_layers_with_experts_wait_for_the_host_without_graphs_and_are_faster_fused() -> None:
    load, layout = Workload(model=MODELS["qwen-3-30b-a3b"], length=4096, batch=64), Layout(dp=8, ep=8)
    graphs, without, fused = (
        step_time(replace(load, software=SOFTWARE[name]), layout, H100)
        for name in ("megatron", "megatron-without-graphs", "megatron-fused-experts")
    )
    assert without.host > 10 * graphs.host
    assert fused.matmul < graphs.matmul
    dense = step_time(replace(LLAMA_8B, software=SOFTWARE["megatron-without-graphs"]), Layout(dp=8), H100)
    assert dense.host == step_time(LLAMA_8B, Layout(dp=8), H100).host


def test_eager_program_is_slower_than_a_compiled_one() -> None:
    layout = Layout(dp=8, sharding=Sharding.FSDP)
    eager, compiled = (
        step_time(replace(LLAMA_8B, software=SOFTWARE[name]), layout, H100).total for name in ("eager", "compiled")
    )
    assert eager > 1.03 * compiled


def test_calibration_replaces_the_catalogue() -> None:
    measured = calibrated(H100, Calibration(matmul_tflops=500, link_gb_s=300))
    assert measured.gpu.matmul == pytest.approx(500 / 989.5)
    assert measured.link_rate == 300e9
    assert measured.network_rate == H100.network_rate
    assert measured.measured == ("matmul_tflops", "link_gb_s")


def test_every_layout_uses_all_gpus_and_the_whole_batch() -> None:
    found = list(layouts(LLAMA_70B, H100, 64, {}))
    assert len(found) == len({*found}) > 1000
    assert all(each.gpus == 64 for each in found)
    assert all(each.micro_batches(128) * each.micro_batch * each.dp == 128 for each in found)


def test_search_finds_the_fastest_layout_that_fits() -> None:
    fitting = [
        each
        for each in layouts(LLAMA_70B, H100, 64, {})
        if memory(LLAMA_70B.model, each, LLAMA_70B.program, length=8192, micro_batches=each.micro_batches(128)).total
        <= 80e9
    ]
    found = search(LLAMA_70B, H100, 64)
    assert found.fitting == len(fitting)
    assert found.best[0].time.total == min(step_time(LLAMA_70B, each, H100).total for each in fitting)


def test_axes_that_a_job_sets_are_kept() -> None:
    found = search(LLAMA_70B, H100, 64, fixed={"tp": 8, "pp": 2})
    assert {(each.layout.tp, each.layout.pp) for each in found.best} == {(8, 2)}


def test_model_that_fits_nowhere_names_the_smallest_layout() -> None:
    found = search(replace(LLAMA_70B, model=MODELS["llama-3-405b"]), H100, 8)
    assert not found.best
    assert found.smallest is not None
    assert found.smallest.memory.total > 80e9


def test_plan_says_what_would_let_the_second_layout_win() -> None:
    plan, found = predict(LLAMA_70B, MACHINES["h100-800g"], nodes=8, per_node=8, fixed={})
    assert str(found.best[1].layout) in plan.next_wins_if
    assert [point.nodes for point in plan.scaling] == [1, 2, 4, 8]
    assert plan.scaling[0].reason == "does not fit in memory"
    assert plan.scaling[-1].layout == plan.best[0].layout


def test_plan_of_a_budget_counts_gpu_hours_and_cost() -> None:
    plan, _ = predict(LLAMA_8B, H100, nodes=1, per_node=8, fixed={}, budget_tokens=10**12, price=2.0)
    shown = plan.best[0].figures
    assert shown.gpu_hours == pytest.approx(1e12 / shown.tokens_per_s_per_gpu / 3600)
    assert shown.cost == pytest.approx(2 * (shown.gpu_hours or 0))
    assert shown.mfu_full / shown.mfu_causal == pytest.approx(57.91 / 51.47, rel=1e-3)


def test_probes_of_a_check_calibrate_the_machine() -> None:
    devices = tuple(
        DeviceRates(
            rank=rank,
            node=rank // 2,
            device="NVIDIA H100",
            matmul=(
                MatmulRate(dtype="bfloat16", tflop_s=600 + rank, products=1),
                MatmulRate(dtype="float32", tflop_s=50, products=1),
            ),
            copy_gb_s=2800,
        )
        for rank in range(4)
    )
    rates = tuple(
        AllReduceRate(size_bytes=size, time_s=1.0, algorithm_gb_s=bus, bus_gb_s=bus)
        for size, bus in ((1, 5.0), (1 << 30, 80.0))
    )
    result = ProbeResult(
        rank=0,
        outcome=ProbeOutcome.PASSED,
        elapsed_s=1.0,
        devices=devices,
        node_all_reduce=(NodeAllReduce(node=0, rates=rates),),
        all_reduce=rates,
    )
    assert from_probe(result) == Calibration(matmul_tflops=601.5, memory_gb_s=2800, link_gb_s=80, network_gb_s=40)
