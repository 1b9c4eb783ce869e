"""A job and its target as the planner's input: the model, the machine, the fixed parallel axes."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events.probe_results import AllReduceRate, ProbeResult
from holdfast.job.loader import read_text
from holdfast.job.spec import Job, ModelSpec
from holdfast.plan.hardware import (
    CPU,
    MACHINES,
    TERA,
    Calibration,
    CpuCalibration,
    CpuRates,
    Machine,
    calibrated,
    cpu_machine,
)
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.search import Found
from holdfast.plan.step_time import SOFTWARE, Precision, Workload
from holdfast.plan.transformer import Transformer, from_config

DDP_BUCKET_BYTES = 25 << 20
"""PyTorch's default."""


class PlanRequest(Struct, frozen=True, kw_only=True):
    """What is predicted."""

    load: Workload
    machine: Machine
    nodes: int
    per_node: int
    fixed: Mapping[str, int]
    """Sizes of the parallel axes that the job sets."""
    budget_tokens: int | None


def plan_request(job: Job, *, base: Path, machine: str | None, calibration: Path | None) -> PlanRequest:
    """The input of a prediction; raises HoldfastError for a job without a model, an unknown model or machine."""
    spec = job.model
    if spec is None:
        what = f"job `{job.name}` does not say what it trains"
        remedy = (
            "Add `model: {config: llama-3-8b, sequence_length: 8192, global_batch_tokens: 1048576}` with your values."
        )
        raise failure("no-model", what, exit_code=ExitCode.INVALID_JOB, where="model", remedy=remedy)
    if job.gpus_per_node == 0 and machine != CPU:
        what = f"job `{job.name}` has no GPUs, and the machine is not `{CPU}`"
        remedy = f"Set `gpus_per_node`, or give `--machine {CPU} --calibration FILE`."
        raise failure("no-gpus", what, exit_code=ExitCode.INVALID_JOB, where="gpus_per_node", remedy=remedy)
    batch, rest = divmod(spec.global_batch_tokens, spec.sequence_length)
    if rest:
        tokens, length = spec.global_batch_tokens, spec.sequence_length
        what = f"`global_batch_tokens` {tokens} is not a multiple of `sequence_length` {length}"
        remedy = f"Set it to {max(1, batch) * spec.sequence_length}."
        raise failure("uneven-batch", what, exit_code=ExitCode.INVALID_JOB, where="model", remedy=remedy)
    load = Workload(
        model=find_model(spec, base),
        length=spec.sequence_length,
        batch=batch,
        precision=Precision.FP32 if machine == CPU else Precision(spec.precision.value),
        software=SOFTWARE[spec.software.value],
    )
    place = find_machine(machine, calibration)
    if place.cpu and (lacking := _lacking_rates(job, place)):
        remedy = "Measure them with `holdfast check JOB --full -o json` for this job."
        raise failure("bad-calibration", lacking, exit_code=ExitCode.INVALID_JOB, where=str(calibration), remedy=remedy)
    parallel = job.parallel
    fixed = {name: getattr(parallel, name) for name in parallel.model_fields_set} if parallel else {}
    return PlanRequest(
        load=load,
        machine=place,
        nodes=job.nodes.max,
        per_node=job.local_world_size,
        fixed={name: size for name, size in fixed.items() if size is not None},
        budget_tokens=spec.token_budget,
    )


def _lacking_rates(job: Job, place: Machine) -> str:
    """Why rates of CPUs do not fit a job: ranks that share a node's cores slow each other down."""
    if place.domain != job.local_world_size:
        return f"the rates are those of {place.domain} ranks per node, and the job has {job.local_world_size}"
    if job.nodes.max > 1 and math.isinf(place.network_rate):
        return "there is no rate of all-reduces between nodes"
    return ""


def find_model(spec: ModelSpec, base: Path) -> Transformer:
    """The model that a job names: of the catalogue, or of a config file."""
    if spec.config in MODELS:
        return MODELS[spec.config]
    if not spec.config.endswith(".json"):
        what = f"no published model in the catalogue is called `{spec.config}`"
        remedy = f"{_near(spec.config, MODELS)}Or name a transformers config, which ends with `.json`."
        raise failure("unknown-model", what, exit_code=ExitCode.INVALID_JOB, where="model.config", remedy=remedy)
    path = base / spec.config
    config = json_object(path, "bad-model-config", "a transformers config")
    try:
        model = from_config(config, path.stem if path.stem != "config" else path.absolute().parent.name)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what = f"{path} lacks a size, or has one that is not a number: {error!r}"
        remedy = "Use the `config.json` that transformers saves with the model."
        raise failure(
            "bad-model-config", what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy
        ) from None
    if model is None:
        what = f"{path} has model type {config.get('model_type')!r}, which the planner does not know"
        remedy = f"Name the closest published model instead: {', '.join(MODELS)}."
        raise failure("unknown-model", what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy)
    return model


def find_machine(name: str | None, calibration: Path | None) -> Machine:
    """The machine of the catalogue with the rates of a calibration file, or CPUs with nothing but these."""
    if name == CPU and calibration:
        return cpu_machine(_cpu_calibration(calibration))
    if name is None or name not in MACHINES:
        what = "nothing says which machines the job runs on" if name is None else f"no machine is called `{name}`"
        remedy = f"{_near(name or '', MACHINES)}Set `machine` in the target's file, or give `--machine NAME`."
        if name == CPU:
            what = f"the catalogue has no rates of `{CPU}`"
            remedy = (
                "Measure them with `holdfast check JOB --full -o json > rates.json`; give `--calibration rates.json`."
            )
        raise failure("unknown-machine", what, exit_code=ExitCode.INVALID_JOB, where="machine", remedy=remedy)
    machine = MACHINES[name]
    return machine if calibration is None else calibrated(machine, _calibration(calibration))


def _calibration(path: Path) -> Calibration:
    found = json_object(path, "bad-calibration", "a calibration")
    if "probe" in found:
        return from_probe(_probe_result(found["probe"], path))
    known = {field.name for field in fields(Calibration)}
    wrong = [name for name, value in found.items() if name not in known or not _is_rate(value)]
    if wrong or not found:
        what = f"{path} has no positive number for {', '.join(wrong) or 'any rate'}"
        remedy = f"Give the output of `holdfast check --full -o json`, or some of: {', '.join(sorted(known))}."
        raise failure("bad-calibration", what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy)
    return Calibration(**found)


def _cpu_calibration(path: Path) -> CpuCalibration:
    probe = json_object(path, "bad-calibration", "a calibration").get("probe")
    found = cpu_from_probe(_probe_result(probe, path)) if probe else None
    if found is None:
        what = f"{path} has no rates of training on CPUs"
        remedy = "Give the output of `holdfast check JOB --full -o json` for a job without GPUs."
        raise failure("bad-calibration", what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy)
    return found


def _probe_result(document: object, path: Path) -> ProbeResult:
    """What the probes of `holdfast check --full` measured."""
    try:
        return msgspec.convert(document, ProbeResult)
    except msgspec.ValidationError as error:
        what = f"`probe` in {path} is not what `holdfast check --full -o json` prints: {error}"
        remedy = "Write its output to a file again."
        raise failure("bad-calibration", what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy=remedy) from None


def from_probe(result: ProbeResult) -> Calibration:
    """Medians over the devices, and bandwidths of the largest all-reduces."""
    products = [rate.tflop_s for each in result.devices for rate in each.matmul if rate.dtype == "bfloat16"]
    copies = [each.copy_gb_s for each in result.devices if each.copy_gb_s]
    within = [each.rates[-1].bus_gb_s for each in result.node_all_reduce if each.rates]
    per_node = len(result.devices) / len({each.node for each in result.devices}) if result.devices else 1.0
    return Calibration(
        matmul_tflops=median(products) if products else None,
        memory_gb_s=median(copies) if copies else None,
        link_gb_s=median(within) if within else None,
        network_gb_s=result.all_reduce[-1].bus_gb_s / per_node if result.all_reduce else None,
    )


def cpu_from_probe(result: ProbeResult) -> CpuCalibration | None:
    """Medians over the ranks, and bandwidths of all-reduces as large as DDP's; None if no CPU was measured."""
    ranks = [(each.training, each.copy_gb_s) for each in result.devices if each.training and each.copy_gb_s]
    if not ranks:
        return None
    trained = [training for training, _ in ranks]
    per_node = len(result.devices) // len({each.node for each in result.devices})
    within = [_near_bucket(each.rates) for each in result.node_all_reduce if each.rates]
    return CpuCalibration(
        ranks_per_node=per_node,
        rates=CpuRates(
            products={
                each[0].width: median(rate.tflop_s for rate in each) * TERA
                for each in zip(*(training.products for training in trained), strict=True)
            },
            adamw_s=median(each.adamw_s for each in trained),
            operation_s=median(each.operation_s for each in trained),
            data_parallel=next((each.data_parallel for each in result.node_all_reduce if each.data_parallel), None),
        ),
        attention_tflops=median(each.attention_tflop_s for each in trained),
        elementwise_gb_s=median(each.elementwise_gb_s for each in trained),
        copy_gb_s=median(copied for _, copied in ranks),
        link_gb_s=median(within) if within else None,
        network_gb_s=_near_bucket(result.all_reduce) / per_node if result.all_reduce else None,
    )


def _near_bucket(rates: Sequence[AllReduceRate]) -> float:
    """Bus bandwidth at the size that is nearest to a bucket's."""
    return min(rates, key=lambda each: abs(math.log(each.size_bytes / DDP_BUCKET_BYTES))).bus_gb_s


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def json_object(path: Path, code: str, kind: str) -> dict[str, Any]:
    """The JSON object of a file; raises HoldfastError with this code if it is none."""
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        what = f"{path} is not {kind}: it is no JSON object"
        raise failure(code, what, exit_code=ExitCode.INVALID_JOB, where=str(path), remedy="Give another file.")
    return cast("dict[str, Any]", found)


def _near(name: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean `{near[0]}`? " if near else f"Known: {', '.join(known)}. "


def nothing_fits(request: PlanRequest, found: Found) -> HoldfastError:
    """The error for a job that no layout fits, with the one that comes closest."""
    gpus = request.nodes * request.per_node
    if found.smallest is None:
        given = ", ".join(f"{name} {size}" for name, size in request.fixed.items())
        what = f"no layout{' with ' + given if given else ''} divides {request.load.batch} sequences over {gpus} GPUs"
        remedy = "Change the number of nodes, `model.global_batch_tokens` or `parallel`."
        return failure("no-layout", what, exit_code=ExitCode.INVALID_JOB, where="parallel", remedy=remedy)
    needed, room = found.smallest.memory.total / 1e9, request.machine.gpu.memory_bytes / 1e9
    what = f"none of {found.tried} layouts fits in {room:.0f} GB per GPU; the smallest needs {needed:.0f} GB"
    return failure(
        "nothing-fits",
        what,
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where="parallel",
        evidence=(str(found.smallest.layout),),
        remedy="Take more nodes or GPUs with more memory, or leave `parallel` out to search all layouts.",
    )
