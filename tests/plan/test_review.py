"""The review of a job: four artefacts, what each line rests on, and what is missing."""

from __future__ import annotations

from functools import cache

import pytest

from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job
from holdfast.job.targets import ManifestTemplate, TargetSpec
from holdfast.plan.hardware import MACHINES, Calibration, calibrated
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.predict import predict
from holdfast.plan.reliability_plan import ReliabilityPlan, predict_reliability, reliability_request
from holdfast.plan.review import (
    NOT_GUARANTEED,
    ArtefactKind,
    Predictions,
    Review,
    ReviewLine,
    Standing,
    differences,
    review,
)
from holdfast.plan.step_time import Workload

CLUSTER = TargetSpec(kind="kubernetes", template=ManifestTemplate.PRODUCTION, fabric="infiniband")
LOAD = Workload(model=MODELS["llama-3-8b"], length=8192, batch=64)


def job(**fields: object) -> Job:
    return Job.model_validate({
        "version": 1, "command": ["train"], "image": "i", "nodes": 8, "gpus_per_node": 8,
        "checkpoint": {"every": "auto"}, **fields,
    })  # fmt: skip


@cache
def reliability() -> ReliabilityPlan:
    return predict_reliability(reliability_request(job(), rate="rsc-1", days=1.0, step_s=5.0))


@cache
def complete() -> Predictions:
    machine = calibrated(MACHINES["h100-ndr"], Calibration(matmul_tflops=600))
    plan, _ = predict(LOAD, machine, nodes=8, per_node=8, fixed={"tp": 8})
    return Predictions(plan=plan, reliability=reliability())


def line(found: Review, name: str) -> ReviewLine:
    (one,) = (line for artefact in found.artefacts for line in artefact.lines if line.name == name)
    return one


@pytest.mark.slow
def test_complete_review_has_four_artefacts_and_says_what_each_line_rests_on() -> None:
    found = review(job(), "prod", CLUSTER, complete())
    assert [each.kind for each in found.artefacts] == [*ArtefactKind]
    assert found.missing == ()
    assert all(line.value and line.proof for artefact in found.artefacts for line in artefact.lines)
    expected = {
        "layout": Standing.PREDICTED,
        "matmul_tflops": Standing.MEASURED,
        "link_gb_s": Standing.ASSUMED,
        "fabric": Standing.ASSUMED,
        "ETTR": Standing.PREDICTED,
    }
    assert {name: line(found, name).standing for name in expected} == expected


@pytest.mark.slow
def test_verified_fabric_is_measured() -> None:
    verified = CLUSTER.model_copy(update={"fabric_verified": "2026-11-01, NCCL_DEBUG"})
    fabric = line(review(job(), "prod", verified, complete()), "fabric")
    assert (fabric.standing, fabric.proof) == (Standing.MEASURED, "2026-11-01, NCCL_DEBUG")


@pytest.mark.slow
def test_each_gap_is_named_in_its_artefact() -> None:
    nothing = Predictions(no_plan="no model", no_reliability="no GPUs")
    bare = CLUSTER.model_copy(update={"fabric": None})
    refused = Finding(code="fabric-not-verified", severity=Severity.ERROR, what="not verified")
    warned = Finding(code="demo-template", severity=Severity.WARNING, what="only a warning")
    found = review(job(image=None, checkpoint={}), "prod", bare, nothing, (refused, warned))
    missing = {each.kind: each.missing for each in found.artefacts}
    assert missing[ArtefactKind.LAYOUT] == ("no model",)
    assert missing[ArtefactKind.TEMPLATE] == ("the job has no `image`",)
    assert missing[ArtefactKind.NETWORK] == ("neither the job nor the target names a fabric", "not verified")
    assert missing[ArtefactKind.RECOVERY] == (
        "`checkpoint` has no interval, so that none is saved before the end",
        "no GPUs",
    )
    given = review(job(parallel={"tp": 8}), "prod", CLUSTER, Predictions(no_plan="no model", reliability=reliability()))
    assert given.missing == ()
    assert line(given, "layout").standing is Standing.ASSUMED


def test_differences_are_the_lines_that_two_jobs_do_not_share() -> None:
    one, other = (
        review(each, "prod", CLUSTER, complete()) for each in (job(), job(recovery={"replicas": 4, "standby": 2}))
    )
    assert differences(one, one) == ()
    assert {(each.name, each.value, each.other) for each in differences(one, other)} == {
        ("a rank or node fails", "all ranks restart from the last checkpoint", "its replica restarts"),
        ("replicas", "1", "4"),
        ("standbys", "0", "2"),
    }


def test_every_template_says_what_it_does_not_ensure() -> None:
    assert {*NOT_GUARANTEED} == {*ManifestTemplate}
