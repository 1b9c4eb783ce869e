"""Formats a changed world size: the number of ranks, and the effect on batch size and learning rate."""

from __future__ import annotations

import msgspec

from holdfast.events import ScalingEffect, StepCommitted, WorldSizeChanged
from holdfast.report.formatting import count, duration, sanitize


def with_observed_batch(world: WorldSizeChanged, step: StepCommitted) -> WorldSizeChanged:
    """The change with the batch size observed in a step: ranks with a Session report their samples."""
    samples = step.metrics.get("global_batch")
    if samples is not None:
        return msgspec.structs.replace(world, samples=int(samples), confirmed=True)
    own = ScalingEffect.AS_CONFIGURED
    return msgspec.structs.replace(world, global_batch=own, learning_rate=own, learning_rate_factor=1.0, confirmed=True)


def format_world_size(world: WorldSizeChanged) -> str:
    """`degraded: world size 2 of 4 on 2 of 4 nodes (it was 4); global batch kept at 32 samples, ...`."""
    nodes, slots = len(world.nodes), len(world.nodes) + len(world.missing_nodes)
    head = "degraded" if world.missing_nodes else "whole again"
    ranks = f"world size {world.world_size} of {world.full_world_size} on {nodes} of {count(slots, 'node')}"
    before = f" (it was {world.previous_world_size})" if world.previous_world_size else ""
    left = "" if world.remaining_s is None else f"; about {duration(world.remaining_s)} left at that size"
    because = f"; {world.reason}" if world.reason else ""
    return sanitize(f"{head}: {ranks}{before}; {format_effects(world)}{left}{because}")


def format_effects(world: WorldSizeChanged) -> str:
    """The effect on global batch and learning rate."""
    effects = f"global batch {_batch(world)}, learning rate {_rate(world)}"
    if world.confirmed:
        return effects
    return f"{effects}, if the program takes its micro-batches from a Session (else as configured)"


def _batch(world: WorldSizeChanged) -> str:
    if world.samples is None or world.global_batch is ScalingEffect.AS_CONFIGURED:
        return world.global_batch.value
    preposition = "at" if world.global_batch is ScalingEffect.KEPT else "to"
    return f"{world.global_batch.value} {preposition} {world.samples:,} samples"


def _rate(world: WorldSizeChanged) -> str:
    factor = f" by {world.learning_rate_factor:.4g}" if world.learning_rate is ScalingEffect.SCALED else ""
    return f"{world.learning_rate.value}{factor}"
