from __future__ import annotations

import pytest

from holdfast.metrics.flops import FlopsPerToken, ModelShape
from holdfast.metrics.metric_text import BREAKDOWN, DETAILS, UTILISATION, format_metrics
from holdfast.metrics.throughput import Throughput

LLAMA_3_8B = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256, intermediate=14_336
)  # fmt: skip


def test_published_speed_of_llama_3_8b_comes_to_the_published_mfu_in_both_conventions():
    """TorchTitan, 8 H100, compiled: 6,667 tokens/s a GPU, 39.0 % of the peak in its own, full, convention."""
    yardstick = Throughput(model_flops=LLAMA_3_8B, peak_tflops=989.5)
    tokens = 8 * 8192.0
    rates = yardstick.rates({"tokens": tokens, "global_batch": 8.0}, step_s=tokens / 8 / 6667, devices=8)
    assert rates["tokens_per_s_per_device"] == pytest.approx(6667)
    assert rates["tokens_per_s"] == pytest.approx(8 * 6667)
    assert rates["mfu_full"] == pytest.approx(0.390, abs=5e-4)
    assert rates["mfu_causal"] == pytest.approx(0.347, abs=5e-4)
    assert rates["tflops_full"] == pytest.approx(386, abs=0.5)
    assert format_metrics(rates, UTILISATION) == ["MFU 39.0% full attention / 34.7% causal"]


@pytest.mark.parametrize(
    ("yardstick", "metrics", "known"),
    [
        (Throughput(), {}, {"step_s"}),
        (Throughput(), {"tokens": 8.0}, {"step_s", "tokens_per_s", "tokens_per_s_per_device"}),
        (Throughput(model_flops=LLAMA_3_8B), {"tokens": 8.0}, {"step_s", "tokens_per_s", "tokens_per_s_per_device"}),
        (
            Throughput(model_flops=LLAMA_3_8B, sequence_length=4),
            {"tokens": 8.0},
            {"step_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_full", "tflops_causal"},
        ),
        (
            Throughput(model_flops=FlopsPerToken(full=1e9), peak_tflops=100.0),
            {"tokens": 8.0},
            {"step_s", "tokens_per_s", "tokens_per_s_per_device", "tflops_full", "mfu_full"},
        ),
    ],
)
def test_nothing_is_claimed_for_which_something_is_missing(yardstick, metrics, known):
    assert yardstick.rates(metrics, step_s=1.0, devices=2).keys() == known


def test_words_leave_out_what_there_is_not_and_name_the_convention_where_there_is_no_peak():
    metrics = {"tflops_full": 12.0, "grad_norm": 1.5, "memory_peak_bytes": 2.0**31, "memory_reserved_bytes": 2.0**32}
    assert format_metrics(metrics, DETAILS) == [
        "12.0 TFLOP/s a device, full attention",
        "gradient norm 1.50",
        "GPU memory 2.0 GiB at most, 4.0 reserved",
    ]
    assert format_metrics({"host_memory_peak_bytes": 2.0**30, "checkpoint_stall_s": 0.25, "loss": 2.0}) == [
        "loss 2.000",
        "1.0 GiB of memory at most",
        "0.25 s stalled by a checkpoint",
    ]
    assert format_metrics({"checkpoint_stall_s": 1e-5}) == []
    assert format_metrics({}) == []


def test_step_breakdown_is_shown_in_shares_with_overlapped_parts():
    parts = {"forward": 0.05, "backward": 0.1, "communication": 0.04, "optimizer": 0.0095, "data": 0.0005}
    metrics = {f"profile_{part}_s": spent for part, spent in parts.items()}
    shown = "of 0.200 s a step, profiled: forward 25%, backward 50%, communication 20%, optimizer 5%"
    assert format_metrics(metrics, BREAKDOWN) == [shown]
    assert format_metrics(metrics | {"profile_communication_overlapped_s": 0.03}) == [
        f"{shown}; 0.030 s of communication overlapped"
    ]
    assert format_metrics({"loss": 1.0}, BREAKDOWN) == []
