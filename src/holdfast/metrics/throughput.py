"""Throughput and MFU from a step's tokens and duration. Pure functions.

flops.py has the models' FLOPs, devices.py the devices' peaks.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from holdfast.metrics.flops import FlopsPerToken, ModelShape


class Throughput(Struct, frozen=True, kw_only=True):
    """Inputs of throughput and MFU; metrics that need a missing input are omitted."""

    model_flops: ModelShape | FlopsPerToken | None = None
    """The model's shape, or its FLOPs per token."""
    sequence_length: int | None = None
    """Tokens per sequence; none means a step's tokens divided by its samples."""
    peak_tflops: float | None = None
    """Peak of one device, in TFLOP/s."""

    def flops_per_token(self, metrics: Mapping[str, float]) -> FlopsPerToken | None:
        """FLOPs per token of this step."""
        if not isinstance(self.model_flops, ModelShape):
            return self.model_flops
        samples = metrics.get("global_batch")
        length = self.sequence_length or (round(metrics["tokens"] / samples) if samples else 0)
        return self.model_flops.per_token(length) if length else None

    def rates(self, metrics: Mapping[str, float], *, step_s: float, devices: int) -> dict[str, float]:
        """Rates of a step of `step_s` seconds, by their names in the catalogue."""
        tokens = metrics.get("tokens")
        if not tokens or step_s <= 0:
            return {"step_s": step_s}
        each = tokens / step_s / devices
        found = {"step_s": step_s, "tokens_per_s": tokens / step_s, "tokens_per_s_per_device": each}
        needs = self.flops_per_token(metrics)
        for way, flops in (("full", needs and needs.full), ("causal", needs and needs.causal)):
            if flops:
                found[f"tflops_{way}"] = tflops = each * flops / 1e12
                if self.peak_tflops:
                    found[f"mfu_{way}"] = tflops / self.peak_tflops
        return found
