"""Published training runs (bench/published/throughput.jsonl) as the planner's workloads and layouts.

A run is left out if its layout, convention or architecture is not known well enough; `_why_left_out` says which. The
file has the runs' sources and lines. Where a source does not state something, the row has a `note`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from holdfast.plan.hardware import MACHINES, Machine
from holdfast.plan.layout import Layout, Recompute, Sharding
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.step_time import ALL_GATHER, SOFTWARE, Precision, Software, Workload
from holdfast.plan.transformer import Transformer

FILE = Path(__file__).parent / "published" / "throughput.jsonl"

MODEL_NAMES = (
    (r"MPT-(\w+)", r"mpt-\1"),
    (r"Llama-2-(\w+)", r"llama-2-\1"),
    (r"LLAMA2-(\w+)", r"llama-2-\1"),
    (r"(?:LLAMA|Llama-)3(?:\.1)?[-_](\w+)", r"llama-3-\1"),
    (r"GPT-?3[- ]175B.*|gpt3-175B|GPT 175B", r"gpt-3-175b"),
    (r"GPT3-20B", r"gpt-3-20b"),
    (r"(?:megatron-|GPT )22B", r"megatron-22b"),
    (r"turing-530B|GPT 530B", r"megatron-530b"),
    (r"megatron-1T", r"megatron-1t"),
    (r"Nemotron-8B", r"nemotron-3-8b"),
    (r"Nemotron-22B", r"nemotron-3-22b"),
    (r"Nemotron-340B", r"nemotron-4-340b"),
    (r"Qwen3_30B_a3B", r"qwen-3-30b-a3b"),
    (r"Qwen3_235B_a22B", r"qwen-3-235b-a22b"),
    (r"DeepSeekV3(?: \(w/o MTP\))?", r"deepseek-v3"),
    (r"Kimi_K2", r"kimi-k2"),
)
"""Names of models in the sources, and in the planner's catalogue."""

MACHINE_NAMES = {
    "h100_80gb": "h100-roce", "a100_80gb": "a100-hdr", "a100_40gb": "a100-40gb-hdr", "DGX-H100": "h100-ndr",
    "DGX-B200": "b200-ndr", "DGX-B300": "b300-xdr", "DGX-GB200": "gb200-ndr", "DGX-GB300": "gb300-xdr",
    "A100-80GB (Selene)": "a100-hdr", "A100 (Selene)": "a100-hdr", "A100": "a100-hdr", "H100": "h100-ndr",
    "A100-80G, 400 Gb/s": "a100-400g", "H100-80G, 800 Gb/s": "h100-800g",
    "H100-80GB 700W, RoCE 400 Gb/s": "h100-roce",
    "H100 500W": "h100-500w-roce",
    "H200": "h200-ndr",
}  # fmt: skip
NOT_IN_TABLE: dict[str, dict[str, Any]] = {
    "megatron-readme-gpt3": {"mbs": 1, "seq": 2048, "recompute": "full"},
    "llama3": {"mbs": 1, "vp": 8},
}
"""What a source's table does not say: from the script named there; from the paper's schedule, one layer per chunk."""
MEASURED = {"id", "release", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "source", "line", "note", "config"}
"""Fields that do not tell configurations apart."""
FP8 = {"FP8", "FP8-CS", "FP8-MX", "MXFP8", "FP8-CS (FP8-MX)", "amp_fp8"}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A run that the planner can predict."""

    id: int
    group: str
    load: Workload
    layout: Layout
    machine: Machine
    step_s: float
    source: str
    is_held_out: bool
    """Whether the run is kept from the fit."""


WHOLLY_HELD_OUT = ("llama3", "megascale", "megatron-readme-gpt3", "torchtitan", "torchtitan-h200")
"""Sources of which no run is fitted."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that is not predicted, and why."""

    id: int
    group: str
    why: str


def _model(name: str) -> Transformer | None:
    for pattern, row in MODEL_NAMES:
        if re.fullmatch(pattern, name):
            return MODELS.get(re.sub(pattern, row, name).lower())
    return None


def read_runs(path: Path = FILE) -> tuple[list[PublishedRun], list[LeftOut]]:
    """All runs of a file, those that are left out apart; of another file than the fitted one, all are held out."""
    used: list[PublishedRun] = []
    left: list[LeftOut] = []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    newest: dict[tuple[Any, ...], str] = {}
    for row in rows:
        newest[_config(row)] = max(newest.get(_config(row), ""), row.get("release", ""))
    for row in rows:
        why = _why_left_out(row, newest[_config(row)])
        if why:
            left.append(LeftOut(id=row["id"], group=row["group"], why=why))
        else:
            used.append(_run(row, path != FILE or _is_held_out(row)))
    return used, left


def repeats(path: Path = FILE) -> list[float]:
    """How much faster the faster run is, for each pair of runs of one configuration, mostly of other releases."""
    same: dict[frozenset[Any], list[float]] = defaultdict(list)
    for row in map(json.loads, path.read_text().splitlines()):
        if rate := row.get("tokens_per_s_per_gpu"):
            kept = ((field, "fp8" if value in FP8 else value) for field, value in row.items() if field not in MEASURED)
            same[frozenset(kept)].append(rate)
    return [max(pair) / min(pair) - 1 for rates in same.values() for pair in combinations(rates, 2)]


def _is_held_out(row: dict[str, Any]) -> bool:
    model = row["model"].partition(" (")[0]  # a variant, such as `(w/o MTP)`, stays with its model
    key = f"{row['group']}|{model}|{row['hardware']}"
    return row["group"] in WHOLLY_HELD_OUT or hashlib.sha256(key.encode()).digest()[0] % 2 == 0


def _config(row: dict[str, Any]) -> tuple[Any, ...]:
    precision = "fp8" if row.get("precision") in FP8 else row.get("precision")
    return (
        row["group"],
        row["model"],
        row["hardware"],
        precision,
        row.get("seq"),
        row["id"] if row["group"] != "megatron-bridge" else 0,
    )


def _why_left_out(row: dict[str, Any], newest: str) -> str:
    if row.get("kind", "Pre").startswith(("SFT", "LoRA")):
        return "fine-tuning: packed sequences, frozen weights"
    if row["model"].startswith("GPT OSS"):
        return "alternating attention windows; its FLOPs are counted differently"
    if _model(row["model"]) is None:
        return "architecture not in the planner (Mamba layers, MTP, token drop, unpublished shape)"
    if row.get("precision") == "NVFP4":
        return "fp4 is not in the planner"
    if row["group"] == "megatron-bridge" and "precision" not in row:
        return "precision not stated"
    if row.get("release", "") != newest:
        return "superseded: a later release of the same software ran the same model"
    if row["group"] == "megatron-readme-2022":
        return "same runs as korthikanti-2022"
    if row["group"] == "megatron-core-strong" or not ({"seq", "tp"} <= row.keys() or row["group"] in NOT_IN_TABLE):
        return "layout not stated"
    if row["hardware"] not in MACHINE_NAMES:
        return "machine not in the planner"
    return ""


def _run(row: dict[str, Any], is_held_out: bool) -> PublishedRun:
    model = _model(row["model"])
    assert model is not None
    group, gpus = row["group"], row["gpus"]
    tp, pp, cp = row.get("tp") or 1, row.get("pp") or 1, row.get("cp") or 1
    row = {**NOT_IN_TABLE.get(group, {}), **row}
    length = row["seq"]
    micro = row.get("mbs") or 1
    dp = gpus // (tp * pp * cp)
    batch = row.get("gbs") or dp * micro
    layout = Layout(
        tp=tp, pp=pp, cp=cp, ep=row.get("ep") or 1, dp=dp, interleave=row.get("vp") or 1 if pp > 1 else 1,
        micro_batch=micro, recompute=_recompute(row), sharding=_sharding(row),
    )  # fmt: skip
    if model.positions and length != model.positions:
        model = replace(model, positions=length)
    precision = Precision.FP8 if row.get("precision") in FP8 or group == "nemo-24.07" else Precision.BF16
    load = Workload(model=model, length=length, batch=batch, precision=precision, software=_software(row))
    machine = MACHINES[MACHINE_NAMES[row["hardware"]]]
    if "s_per_step" in row:
        seconds = row["s_per_step"]
    elif "tokens_per_s_per_gpu" in row:
        seconds = load.tokens / gpus / row["tokens_per_s_per_gpu"]
    elif "mfu_pct" in row and group != "llama3":  # over the bf16 peak, with full attention
        peak = (machine.gpu.peak.bf16 or 0.0) * 1e10
        seconds = load.tokens * model.flops(length).full / gpus / (row["mfu_pct"] * peak)
    else:  # the Llama 3 paper counts causal FLOPs
        seconds = load.tokens * (model.flops(length).causal or 0.0) / gpus / (row["tflops_per_gpu"] * 1e12)
    return PublishedRun(
        id=row["id"], group=group, load=load, layout=layout, machine=machine, step_s=seconds, source=row["source"],
        is_held_out=is_held_out,
    )  # fmt: skip


def _recompute(row: dict[str, Any]) -> Recompute:
    given = row.get("recompute")
    if given is True or given == "full":
        return Recompute.FULL
    if isinstance(given, str) and given.lower().startswith("selective"):
        return Recompute.FULL if row["group"] == "fms-fsdp" and row["model"] in FMS_FULL else Recompute.SELECTIVE
    return Recompute.NONE


FMS_FULL = ("Llama-2-34b", "Llama-2-70b")
"""fms-fsdp's selective recomputation picks layers; hardware over model utilisation is 4/3 here: all of them."""


def _sharding(row: dict[str, Any]) -> Sharding:
    if row["group"] == "fms-fsdp":
        return Sharding(row["sharding"].lower())
    return Sharding.FSDP if row.get("fsdp") or row["group"] == "llm-foundry" else Sharding.OPTIMIZER


def _software(row: dict[str, Any]) -> Software:
    match row["group"]:
        case "korthikanti-2022" | "megatron-readme-gpt3":
            return SOFTWARE["megatron-2022"]
        case "llm-foundry":
            return SOFTWARE["eager-2023"]
        case "fms-fsdp":  # its policy reduces gradients in bf16
            return replace(SOFTWARE["compiled"], gradient_bytes=2)
        case "torchtitan" | "torchtitan-h200":
            return SOFTWARE["compiled" if row.get("compile", True) else "eager"]
        case "llama3":  # its paper, section 3.3.2: keys and values are gathered, gradients are reduced in fp32
            return replace(SOFTWARE["megatron"], context=ALL_GATHER, gradient_bytes=4)
        case "nanotron":
            return SOFTWARE["eager"]
        case _ if row.get("fused_experts"):
            return SOFTWARE["megatron-fused-experts"]
        case _:
            return SOFTWARE["megatron" if row.get("cuda_graphs", True) else "megatron-without-graphs"]
