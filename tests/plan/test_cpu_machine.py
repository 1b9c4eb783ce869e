"""CPUs as a machine: all rates are measured, and a job without GPUs is predicted with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.errors import HoldfastError
from holdfast.events.probe_results import (
    AllReduceRate,
    DataParallelRates,
    DeviceRates,
    NodeAllReduce,
    ProbeOutcome,
    ProbeResult,
    TrainingRates,
    WidthRate,
)
from holdfast.job.spec import Job
from holdfast.plan.collectives import Library
from holdfast.plan.hardware import CPU, CpuRates, Machine
from holdfast.plan.layout import Layout, Sharding
from holdfast.plan.memory import ProgramMemory, memory
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.request import PlanRequest, find_machine, plan_request
from holdfast.plan.step_time import SOFTWARE, Precision, Workload, step_time, traffic_of
from holdfast.plan.traffic import step_traffic

MODEL = MODELS["llama-3-8b"]
LOAD = Workload(model=MODEL, length=1024, batch=2, precision=Precision.FP32, software=SOFTWARE["eager"])


def _probe(ranks: int, *, bus_gb_s: Sequence[float] = (0.5, 2.0, 1.0)) -> ProbeResult:
    sizes = (8, 16 << 20, 1 << 30)
    swept = tuple(
        AllReduceRate(size_bytes=size, time_s=1.0, algorithm_gb_s=bus, bus_gb_s=bus)
        for size, bus in zip(sizes, bus_gb_s, strict=True)
    )
    training = TrainingRates(
        products=(WidthRate(width=128, tflop_s=0.05), WidthRate(width=512, tflop_s=0.1)),
        attention_tflop_s=0.03,
        elementwise_gb_s=10.0,
        adamw_s=4e-9,
        operation_s=4e-6,
    )
    return ProbeResult(
        rank=0,
        outcome=ProbeOutcome.PASSED,
        elapsed_s=1.0,
        devices=tuple(
            DeviceRates(rank=rank, node=0, device="CPU", training=training, copy_gb_s=20.0, shared=True)
            for rank in range(ranks)
        ),
        node_all_reduce=(NodeAllReduce(node=0, rates=swept),) if ranks > 1 else (),
    )


def _file(folder: Path, ranks: int) -> Path:
    path = folder / f"rates-{ranks}.json"
    path.write_bytes(msgspec.json.encode({"probe": _probe(ranks)}))
    return path


def _machine(folder: Path, ranks: int) -> Machine:
    return find_machine(CPU, _file(folder, ranks))


def _request(path: Path, *, ranks: int, nodes: int = 1) -> PlanRequest:
    model = {"config": "llama-3-8b", "sequence_length": 1024, "global_batch_tokens": 4096}
    job = Job.model_validate({"command": ["true"], "nodes": nodes, "ranks_per_node": ranks, "model": model})
    return plan_request(job, base=path.parent, machine=CPU, calibration=path)


def test_rates_between_two_widths_lie_between_theirs() -> None:
    rates = CpuRates(products={128: 1.0, 512: 3.0}, adamw_s=0.0, operation_s=0.0)
    assert [rates.product_rate(width) for width in (64, 128, 256, 512, 9999)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_products_take_what_the_measured_rate_gives(tmp_path: Path) -> None:
    time = step_time(LOAD, Layout(micro_batch=2), _machine(tmp_path, 1))
    weights = MODEL.parameters - MODEL.embedding_weights - MODEL.shape.hidden - MODEL.shape.layers * MODEL.norm_weights
    assert time.matmul == pytest.approx(6 * weights * LOAD.tokens / 0.1e12)
    assert time.data == time.scale == 0.0


def test_gradients_are_reduced_at_the_rate_of_a_bucket_and_hide_behind_nothing(tmp_path: Path) -> None:
    machine, layout = _machine(tmp_path, 2), Layout(dp=2, sharding=Sharding.DDP)
    traffic = traffic_of(LOAD, layout, machine)
    assert traffic.library is Library.GLOO
    sent = step_traffic(traffic)["dp"]
    assert sent == pytest.approx(4 * MODEL.parameters)
    copied = 16 * MODEL.parameters / 20e9
    assert step_time(LOAD, layout, machine).data == pytest.approx(sent / 2e9 + copied, rel=1e-3)
    sharded = replace(layout, sharding=Sharding.FSDP)
    assert step_time(LOAD, sharded, machine).data > step_time(LOAD, layout, machine).data


def test_data_parallelism_within_a_node_takes_what_it_took_there_when_measured(tmp_path: Path) -> None:
    measured = DataParallelRates(ddp_parameter_s=3e-9, fsdp_layer_s=0.5, fsdp_parameter_s=2e-9)
    within = NodeAllReduce(node=0, rates=_probe(2).node_all_reduce[0].rates, data_parallel=measured)
    path = tmp_path / "rates.json"
    path.write_bytes(msgspec.json.encode({"probe": replace(_probe(2), node_all_reduce=(within,))}))
    machine, layout = find_machine(CPU, path), Layout(dp=2, sharding=Sharding.FSDP)
    assert step_time(LOAD, layout, machine).data == pytest.approx(0.5 * 33 + 2e-9 * MODEL.parameters, rel=1e-3)
    ddp = Layout(dp=2, sharding=Sharding.DDP)
    assert step_time(LOAD, ddp, machine).data == pytest.approx(3e-9 * MODEL.parameters, rel=1e-3)
    assert step_time(LOAD, replace(layout, dp=4), machine).data == pytest.approx(
        step_time(LOAD, replace(layout, dp=4), _machine(tmp_path, 2)).data
    )


def test_weights_in_fp32_are_kept_once() -> None:
    kept = memory(MODEL, Layout(), ProgramMemory(element_bytes=4), length=1024, micro_batches=1)
    assert (kept.weights + kept.gradients + kept.optimizer) / MODEL.parameters == pytest.approx(16, rel=1e-3)


def test_job_without_gpus_is_planned_for_its_ranks(tmp_path: Path) -> None:
    request = _request(_file(tmp_path, 2), ranks=2)
    assert (request.per_node, request.load.precision) == (2, Precision.FP32)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 1), (2, 2)])
def test_rates_of_another_load_are_refused(tmp_path: Path, ranks: int, nodes: int) -> None:
    path = _file(tmp_path, 2)
    with pytest.raises(HoldfastError) as refused:
        _request(path, ranks=ranks, nodes=nodes)
    assert refused.value.findings[0].code == "bad-calibration"


def test_cpus_have_no_rates_of_a_catalogue(tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    gpus.write_text('{"matmul_tflops": 600}')
    for calibration, code in ((None, "unknown-machine"), (gpus, "bad-calibration")):
        with pytest.raises(HoldfastError) as refused:
            find_machine(CPU, calibration)
        assert refused.value.findings[0].code == code
