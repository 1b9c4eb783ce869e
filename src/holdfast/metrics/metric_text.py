"""Formats metrics as text; every MFU names its convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.metrics.step_breakdown import OVERLAPPED, StepPart, breakdown_metric

MetricFormatter = Callable[[Mapping[str, float]], str]
_ATTENTION_COUNTS = (("full", "full attention"), ("causal", "causal"))
_PARTS = {
    StepPart.FORWARD: "forward",
    StepPart.BACKWARD: "backward",
    StepPart.COMMUNICATION: "communication",
    StepPart.OPTIMIZER: "optimizer",
    StepPart.DATA: "data wait",
    StepPart.CHECKPOINT: "checkpoint",
    StepPart.OTHER: "other",
}


def format_number(value: float, digits: int = 4) -> str:
    """A number with a fixed number of significant digits, so that lines align: `2.000`, `0.01250`."""
    return f"{value:#.{digits}g}".rstrip(".")


def _phrase(name: str, words: Callable[[float], str]) -> MetricFormatter:
    """A formatter of one metric."""
    return lambda metrics: words(metrics[name]) if name in metrics else ""


_loss = _phrase("loss", lambda loss: f"loss {format_number(loss)}")
_speed = _phrase("tokens_per_s", lambda speed: f"{speed:,.0f} tokens/s")
_step = _phrase("step_s", lambda step_s: f"{format_number(step_s, 3)} s a step")
_grad_norm = _phrase("grad_norm", lambda norm: f"gradient norm {format_number(norm, 3)}")


def _mfu(metrics: Mapping[str, float]) -> str:
    ratios = [f"{metrics[f'mfu_{way}']:.1%} {words}" for way, words in _ATTENTION_COUNTS if f"mfu_{way}" in metrics]
    return f"MFU {' / '.join(ratios)}" if ratios else ""


def _tflops(metrics: Mapping[str, float]) -> str:
    """Shown if the device has no known peak; values below 0.1 are omitted."""
    if "mfu_full" in metrics or metrics.get("tflops_full", 0.0) < 0.1:
        return ""
    return f"{metrics['tflops_full']:,.1f} TFLOP/s a device, full attention"


def _memory(metrics: Mapping[str, float]) -> str:
    if "memory_peak_bytes" not in metrics:
        peak = metrics.get("host_memory_peak_bytes")
        return f"{peak / 2**30:.1f} GiB of memory at most" if peak else ""
    reserved = metrics.get("memory_reserved_bytes", 0.0)
    return f"GPU memory {metrics['memory_peak_bytes'] / 2**30:.1f} GiB at most, {reserved / 2**30:.1f} reserved"


def _data_wait(metrics: Mapping[str, float]) -> str:
    waited_s = metrics.get("data_wait_s", 0.0)
    return f"{waited_s:.2g} s waited for data" if waited_s >= 0.001 else ""


def _stall(metrics: Mapping[str, float]) -> str:
    stalled_s = metrics.get("checkpoint_stall_s", 0.0)
    return f"{format_number(stalled_s, 2)} s stalled by a checkpoint" if stalled_s >= 0.001 else ""


def _breakdown(metrics: Mapping[str, float]) -> str:
    """Parts of a profiled step; parts below 0.5 % are omitted."""
    parts = {
        words: metrics[breakdown_metric(part)] for part, words in _PARTS.items() if breakdown_metric(part) in metrics
    }
    whole_s = sum(parts.values())
    if whole_s <= 0:
        return ""
    shares = ", ".join(f"{words} {spent / whole_s:.0%}" for words, spent in parts.items() if spent >= 0.005 * whole_s)
    hidden_s = metrics.get(breakdown_metric(OVERLAPPED), 0.0)
    hidden = f"; {format_number(hidden_s, 2)} s of communication overlapped" if hidden_s >= 0.005 * whole_s else ""
    return f"of {format_number(whole_s, 3)} s a step, profiled: {shares}{hidden}"


STEP_LINE: tuple[MetricFormatter, ...] = (
    _loss,
    _speed,
    _mfu,
    _tflops,
    _step,
    _grad_norm,
    _memory,
    _data_wait,
    _stall,
    _breakdown,
)
UTILISATION: tuple[MetricFormatter, ...] = (_mfu,)
BREAKDOWN: tuple[MetricFormatter, ...] = (_breakdown,)
DETAILS: tuple[MetricFormatter, ...] = (_mfu, _tflops, _grad_norm, _memory, _data_wait, _stall)
"""Phrases besides loss and speed, which `holdfast status` computes over several steps."""


def format_metrics(metrics: Mapping[str, float], phrases: tuple[MetricFormatter, ...] = STEP_LINE) -> list[str]:
    """The metrics of a step as phrases; missing metrics are omitted."""
    return [words for phrase in phrases if (words := phrase(metrics))]
