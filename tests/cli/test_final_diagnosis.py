"""A failed run prints its diagnosis last, and changes nothing else by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from holdfast import api

if TYPE_CHECKING:
    from tests.cli.conftest import Cli

pytestmark = pytest.mark.usefixtures("no_run_left")

RAISES = ("30", "0.01", "raise@1@3")


@pytest.mark.slow
def test_failed_run_ends_in_its_diagnosis_and_every_verb_leads_to_it(cli: Cli, stepper: list[str]) -> None:
    ran = cli("run", "--nodes", "2", "--set", "recovery.max_restarts=0", "--", *stepper, *RAISES)
    run = api.find_run(None).run_id
    words = ran.out.partition("\nlogs  ")[2]
    assert "ValueError" in words
    assert "program-error" in words
    assert "rank 1" in words
    assert "what to do" in words
    assert "what to do:" not in ran.out, "the summary leaves that to the diagnosis"
    assert words.splitlines()[-1].startswith(f"`holdfast diagnose {run}`")
    assert ran.code == 1
    assert "what to do:" in cli("status").out
    assert cli("attach").out.endswith(words.partition("\n")[2])
    assert f"holdfast diagnose {run}" in cli("status").out
    assert cli("diagnose", run, "-o", "json").data["first_failure"]["rank"] == 1


@pytest.mark.slow
def test_failed_run_as_json_ends_in_its_diagnosis(cli: Cli, stepper: list[str]) -> None:
    words = ("run", "-o", "json", "--nodes", "2", "--set", "recovery.max_restarts=0")
    ran = cli(*words, "--", *stepper, *RAISES)
    assert ran.code == 1, ran.out + ran.err
    *_, ended, last = map(json.loads, ran.out.splitlines())
    assert (ended["type"], last["type"]) == ("run-finished", "diagnosis")
    assert (last["diagnosis"]["failure_class"], last["diagnosis"]["first_failure"]["rank"]) == ("program-error", 1), (
        ran.out
    )


@pytest.mark.slow
def test_exit_code_stays_the_jobs_where_diagnosing_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(api, "diagnose_run", broken)
    ran = cli("run", "--", "sh", "-c", "exit 7")
    assert ran.code == 7
    assert "run failed" in ran.out
    assert "by design" in ran.err
