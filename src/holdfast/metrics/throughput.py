"""Owns what follows from a step's tokens and its time: speed, and what share of the devices it is.

Pure; refuses to own what a model needs (flops.py) and what devices can do (devices.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.metrics.flops import FlopsPerToken, ModelShape


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What speed is measured against; of what is None nothing is claimed."""

    model_flops: ModelShape | FlopsPerToken | None = None
    """What the model is, or what it needs for a token."""
    sequence_length: int | None = None
    """Tokens of a sequence; none means as many as a step has for each of its samples."""
    peak_tflops: float | None = None
    """Of one device."""

    def flops_per_token(self, metrics: Mapping[str, float]) -> FlopsPerToken | None:
        """FLOPs for a token of this step."""
        if not isinstance(self.model_flops, ModelShape):
            return self.model_flops
        samples = metrics.get("global_batch")
        length = self.sequence_length or (round(metrics["tokens"] / samples) if samples else 0)
        return self.model_flops.per_token(length) if length else None

    def rates(self, metrics: Mapping[str, float], *, step_s: float, devices: int) -> dict[str, float]:
        """Speeds of a step that took so long, by their names in the catalogue."""
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
