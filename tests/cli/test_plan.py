"""`holdfast plan`, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import ExitCode

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

JOB = """
command: python train.py
nodes: 8
gpus_per_node: 8
model: {config: llama-3-70b, sequence_length: 8192, global_batch_tokens: 1048576, token_budget: 1000000000000}
"""
ON_H100 = ("--machine", "h100-ndr")


def test_plan_lists_five_layouts_with_reasons_and_the_scaling_curve(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    answer = cli("plan", *ON_H100)
    assert answer.code == ExitCode.OK
    for shown in ("GPU-hours", "lost to", "nodes", "slower", "assumed, not measured"):
        assert shown in answer.out


def test_plan_as_json_has_all_figures(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    data = cli("plan", *ON_H100, "--set", "parallel.tp=8", "-o", "json").data
    assert {each["candidate"]["layout"]["tp"] for each in data["best"]} == {8}
    assert data["best"][0]["figures"]["gpu_hours"] > 0
    assert data["best"][0]["sent_bytes"]["tp"] > 0


def test_calibration_is_used_and_named(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    Path("rates.json").write_text(json.dumps({"matmul_tflops": 400, "network_gb_s": 40}))
    usual, measured = (
        cli("plan", *ON_H100, *more, "-o", "json").data for more in ((), ("--calibration", "rates.json"))
    )
    assert measured["best"][0]["figures"]["step_s"] > 1.2 * usual["best"][0]["figures"]["step_s"]
    assert measured["assumed"] == ["link_gb_s", "memory_gb_s"]


def test_job_without_gpus_is_planned_with_measured_rates_of_cpus(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB.replace("nodes: 8\ngpus_per_node: 8", "ranks_per_node: 2"))
    assert "holdfast check JOB --full" in cli("plan", "--machine", "cpu").err
    training = {
        "products": [{"width": 512, "tflop_s": 0.08}],
        "attention_tflop_s": 0.03,
        "elementwise_gb_s": 10.0,
        "adamw_s": 4e-9,
        "operation_s": 4e-6,
    }
    device = {"node": 0, "device": "CPU", "copy_gb_s": 20.0, "training": training}
    probe = {
        "rank": 0,
        "outcome": "passed",
        "elapsed_s": 1.0,
        "devices": [device | {"rank": rank} for rank in range(2)],
        "node_all_reduce": [
            {"node": 0, "rates": [{"size_bytes": 1 << 24, "time_s": 0.01, "algorithm_gb_s": 1.6, "bus_gb_s": 1.6}]}
        ],
    }
    Path("rates.json").write_text(json.dumps({"probe": probe | {"type": "result"}}))
    data = cli("plan", "--machine", "cpu", "--calibration", "rates.json", "-o", "json").data
    assert data["machine"] == "cpu"
    assert data["assumed"] == []
    assert data["best"][0]["figures"]["step_s"] > 0


@pytest.mark.slow
def test_failures_are_shown_by_cause_with_the_best_interval_and_standbys(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    words = ("plan", *ON_H100, "--failures", "rsc-1", "--days", "10")
    answer, data = cli(*words), cli(*words, "-o", "json").data
    for shown in ("ETTR", "GPU-hours lost to", "faulty GPU", "best checkpoint interval", "best number of standbys"):
        assert shown in answer.out
    assert data["ettr"]["low"] <= data["ettr"]["mean"] <= data["ettr"]["high"]
    assert data["inputs"][0]["source"] == "predicted"


@pytest.mark.slow
def test_ranks_are_placed_on_a_topology(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    nodes = {f"n{node}": {"block": f"b{node % 2}", "rack": f"r{node % 6}"} for node in range(24)}
    Path("nodes.json").write_text(json.dumps({"levels": ["block", "rack"], "nodes": nodes}))
    words = ("plan", *ON_H100, "--topology", "nodes.json")
    placed = cli(*words, "-o", "json").data["rank_layout"]
    assert len({*placed["nodes"]}) == 8
    assert len({nodes[name]["rack"] for name in placed["nodes"]}) == 2
    assert placed["crossing"]["block"] == 0 < placed["given"]["block"]
    assert "order of ranks" in cli(*words).out
    for content, code in (
        ('{"levels": ["rack"], "nodes": {"n1": {}}}', "bad-topology"),
        ('{"levels": [], "nodes": {}}', "bad-topology"),
        ('{"nodes": 1}', "bad-topology"),
        ('{"levels": ["rack"], "nodes": {"n1": {"rack": "r"}}}', "no-room-in-topology"),
    ):
        Path("nodes.json").write_text(content)
        assert f"[{code}]" in cli(*words).err


@pytest.mark.slow
def test_pages_and_hostfile_are_written(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB)
    nodes = {f"n{node}": {"rack": f"r{node % 3}"} for node in range(24)}
    Path("nodes.json").write_text(json.dumps({"levels": ["rack"], "nodes": nodes}))
    placed = cli(
        "plan", *ON_H100, "--topology", "nodes.json", "--hostfile", "hosts", "--html", "plan.html", "-o", "json"
    ).data["rank_layout"]
    assert Path("hosts").read_text().splitlines() == [f"{name} slots=8" for name in placed["nodes"]]
    page = Path("plan.html").read_text()
    assert page.count("<svg") == 1
    for shown in ("TP ", "64", "tokens/s/GPU", "efficiency"):
        assert shown in page
    assert cli("plan", *ON_H100, "--hostfile", "hosts").code == ExitCode.USAGE
    Path("hosts").unlink()
    words = ("--topology", "nodes.json", "--hostfile", "hosts", "--failures", "rsc-1", "--days", "1")
    assert cli("plan", *ON_H100, *words).code == ExitCode.USAGE
    assert not Path("hosts").exists()
    assert cli("plan", *ON_H100, "--failures", "rsc-1", "--days", "1", "--html", "ettr.html").code == ExitCode.OK
    page = Path("ettr.html").read_text()
    assert page.count("<svg") == 1
    for shown in ("torchrun, requeued by the scheduler", "512", "GPU-hours"):
        assert shown in page


def test_what_cannot_be_predicted_is_refused(cli: Cli) -> None:
    job = Path("job.yaml")
    job.write_text(JOB)
    Path("rates.json").write_text('{"matmul": 1}')
    Path("empty.json").write_text('{"model_type": "llama"}')
    refused = {
        "unknown-machine": ("plan",),
        "bad-calibration": ("plan", *ON_H100, "--calibration", "rates.json"),
        "unknown-model": ("plan", *ON_H100, "--set", "model.config=llama-9"),
        "bad-model-config": ("plan", *ON_H100, "--set", "model.config=empty.json"),
        "uneven-batch": ("plan", *ON_H100, "--set", "model.global_batch_tokens=8193"),
        "no-layout": ("plan", *ON_H100, "--nodes", "7"),
        "nothing-fits": ("plan", *ON_H100, "--nodes", "1"),
        "no-gpus": ("plan", *ON_H100, "--gpus-per-node", "0"),
        "unknown-failure-rate": ("plan", "--failures", "rsc-3"),
    }
    for code, words in refused.items():
        answer = cli(*words)
        assert f"[{code}]" in answer.err + answer.out, code
        assert answer.code in (ExitCode.INVALID_JOB, ExitCode.CANNOT_RUN_HERE, ExitCode.USAGE)
    job.write_text("command: 'true'\ngpus_per_node: 8\n")
    assert "[no-model]" in cli("plan").err


@pytest.mark.slow
def test_review_shows_four_artefacts_and_production_refuses_an_incomplete_one(cli: Cli) -> None:
    Path("job.yaml").write_text(JOB + "image: train:1\ncheckpoint: {path: s3://b/r, every: auto}\n")
    Path("other.yaml").write_text(JOB.replace("nodes: 8", "nodes: 16"))
    targets = Path(".holdfast/targets")
    targets.mkdir(parents=True)
    (targets / "prod.yaml").write_text("kind: kubernetes\ntemplate: production\nfabric: tcp\nmachine: h100-ndr\n")
    local = cli("review", *ON_H100, "--against", "other.yaml")
    assert local.code == ExitCode.OK
    for shown in ("parallelism layout", "recovery plan", "assumed", "predicted", "--against", "16 nodes"):
        assert shown in local.out
    refused = cli("review", "--on", "prod", "-o", "json")
    assert refused.code == ExitCode.INVALID_JOB
    assert "review-incomplete" in refused.err
    assert any("how often it may be restarted" in each for each in refused.data["missing"])
