"""`holdfast accept` with real runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.accept.acceptance import FOLDER, RECORD
from holdfast.accept.agreement import FirstRunTerms
from holdfast.accept.first_run_check import first_run_page
from holdfast.errors import ExitCode

HOLDFAST = Path(sys.executable).with_name("holdfast")


def accept(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [HOLDFAST, "accept", *words, "-o", "json"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {report["check"]: report["verdict"] for report in found["reports"]}


@pytest.mark.slow
def test_healthy_machine_is_accepted_and_an_interrupted_acceptance_resumes(tmp_path: Path, home: Path) -> None:
    code, found = accept(tmp_path, "restart", "gang", "fabric", "--smoke")
    not_passed = [report["finding"] for report in found["reports"] if report["verdict"] != "passed"]
    assert code == ExitCode.OK, json.dumps(not_passed)
    assert verdicts(found) == {"fabric": "passed", "gang": "not applicable", "restart": "passed"}
    (restart,) = (report for report in found["reports"] if report["check"] == "restart")
    figures = {figure["name"]: figure["value"] for figure in restart["figures"]}
    assert figures["faults injected"] == "3"
    assert figures["equal to the run without failures"] == "every step that was kept, bit-exact"
    page = (tmp_path / f"{found['name']}.html").read_text()
    assert "Acceptance of local" in page
    assert "every step that was kept, bit-exact" in page

    record = tmp_path / FOLDER / found["name"] / RECORD
    kept = json.loads(record.read_text())
    record.write_text(json.dumps(kept | {"reports": [kept["reports"][0], kept["reports"][2]]}))
    code, resumed = accept(tmp_path, "--resume", found["name"])
    assert code == ExitCode.OK
    assert resumed["reports"][:2] == [kept["reports"][0], kept["reports"][2]]
    assert verdicts(resumed) == verdicts(found)


@pytest.mark.slow
def test_documented_commands_start_a_run_and_a_missing_step_is_named(tmp_path: Path, home: Path) -> None:
    code, found = accept(tmp_path, "first-run")
    assert (code, verdicts(found)) == (ExitCode.OK, {"first-run": "passed"})
    page = first_run_page(FirstRunTerms(), tmp_path)
    (tmp_path / "page.md").write_text(page.replace('holdfast init ${IMAGE:+--image "$IMAGE"}', "true"))
    (tmp_path / "acceptance.yaml").write_text("first_run: {page: page.md}\n")
    code, found = accept(tmp_path, "first-run", "--agreement", "acceptance.yaml")
    assert code == ExitCode.FIRST_RUN_NOT_ACCEPTED
    finding = found["reports"][0]["finding"]
    assert finding["code"] == "first-run-failed"
    assert "in section `Run` of the page failed" in finding["what"]
    assert any("no file job.yaml" in line for line in finding["evidence"])


@pytest.mark.slow
def test_unknown_check_target_and_acceptance_are_refused(tmp_path: Path, home: Path) -> None:
    for words, code in (
        (("bandwidth",), ExitCode.USAGE),
        (("--on", "nowhere"), ExitCode.NOT_FOUND),
        (("--resume", "local-1"), ExitCode.NOT_FOUND),
        (("--resume", "local-1", "--smoke"), ExitCode.USAGE),
    ):
        done = subprocess.run([HOLDFAST, "accept", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "what to do" in done.stderr
        assert "Traceback" not in done.stderr
