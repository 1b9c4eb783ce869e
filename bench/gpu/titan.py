"""TorchTitan's unmodified Trainer on one GPU, alone and with holdfast's Session, in turns, in one process.

Two trainers have one configuration: Llama 3.2 1B's layers, sequences of 4,096 tokens, no compiler. The text and the
tokenizer are the example's (examples/torchtitan). MFU counts TorchTitan's own FLOPs per token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from statistics import median

import msgspec

from bench.gpu.device import open_device
from bench.gpu.promises import TITAN_MFU, TITAN_STEP
from bench.gpu.section import Place, measured
from bench.paired_stats import OURS, PEER, PEER_AGAIN, interleave
from bench.result_file import Figure, Peer, Result, from_rounds
from holdfast.metrics.devices import find_device
from holdfast.train.integrations.titan_private import flops_per_token

GOAL = 1.01
ROUNDS, STEPS = 6, 5
TINY_ROUNDS, TINY_STEPS = 1, 2
FLAVOR, LENGTH = "1B", 4096
ALONE: Mapping[str, str] = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "HF_HUB_OFFLINE": "1",
}


def measure(place: Place) -> Iterator[Result]:
    """Steps with and without holdfast, and the MFU."""
    from torch import distributed as dist
    from torchtitan.models.llama3 import model_registry

    from bench import torchtitan as titan
    from holdfast.train.integrations.titan import with_holdfast

    device = open_device(place.device)
    os.environ |= {**ALONE, "HF_HOME": str(place.folder)}
    rounds, steps = (TINY_ROUNDS, TINY_STEPS) if place.tiny else (ROUNDS, STEPS)

    def config() -> titan.Trainer.Config:
        made = titan.small_config(str(place.folder))
        if not place.tiny:
            made.model_spec = model_registry(FLAVOR)
            made.training.local_batch_size, made.training.seq_len = 1, LENGTH
        return made

    alone, held = titan.Stepper(config()), titan.Stepper(with_holdfast(config()))

    def block(stepper: titan.Stepper) -> float:
        device.synchronize()
        begin = device.mark()
        for _ in range(steps):
            stepper.step()
        return device.elapsed_ms(begin, device.mark()) / steps

    sides = {PEER: lambda: block(alone), OURS: lambda: block(held), PEER_AGAIN: lambda: block(alone)}
    for warm in sides.values():
        warm()
    found = interleave(sides, rounds, unit="ms a step")
    training = alone.trainer.config.training
    tokens = training.local_batch_size * training.seq_len
    per_token = flops_per_token(alone.trainer.metrics_processor)
    dist.destroy_process_group()
    flavor = "the smallest model" if place.tiny else f"Llama 3.2 {FLAVOR}"
    conditions = f"TorchTitan 0.3, {flavor}, {tokens:,} tokens, {len(found)} rounds of {steps} steps, without an agent"
    result = from_rounds(TITAN_STEP, found, goal=GOAL, unit="ms", peer="TorchTitan alone")
    yield msgspec.structs.replace(result, conditions=conditions)
    known = find_device(place.device.name)
    peak = known.peak_tflops if known else None

    def shown(step_s: float) -> Figure:
        tflops = per_token * tokens / step_s / 1e12
        return Figure(value=100 * tflops / peak if peak else tflops, unit="%" if peak else "TFLOP/s", decimals=1)

    step_s = median(each[OURS] for each in found) / 1e3
    bare_s = median((each[PEER] + each[PEER_AGAIN]) / 2 for each in found) / 1e3
    yield measured(
        TITAN_MFU,
        shown(step_s),
        peer=Peer(name="TorchTitan alone", figure=shown(bare_s)),
        conditions=conditions,
        details={"throughput": f"{tokens / step_s:,.0f} tokens/s", "alone": f"{tokens / bare_s:,.0f} tokens/s"},
    )
