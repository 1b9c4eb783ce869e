"""Real runs whose nodes are checked before they get ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs.conftest import Runs
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.errors import ExitCode
from holdfast.events import AttemptStarted, FindingRaised, NodeChecked, Outcome


def test_ranks_start_on_nodes_that_have_passed_their_checks(runs: Runs) -> None:
    watched = runs.start("true", overrides=("checks=quick",))
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    checked = watched.all(NodeChecked)
    assert sorted(event.node for event in checked) == [0, 1]
    assert not [event.problem for event in checked if event.problem]
    assert watched.seen.index(watched.all(AttemptStarted)[0]) > max(map(watched.seen.index, checked))


def test_run_on_nodes_without_the_fabric_of_its_job_gets_no_ranks(runs: Runs) -> None:
    watched = runs.start("true", overrides=("checks=quick", "fabric=infiniband"))
    end = watched.wait_for_end()
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, ExitCode.CANNOT_RUN_HERE)
    assert not watched.all(AttemptStarted)
    found = [event.finding for event in watched.all(FindingRaised)]
    assert "rdma-no-device" in {finding.code for finding in found}


def test_check_of_nodes_prints_each_check_of_each_node(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["check", "--nodes", "2"])
    assert answer.exit_code == ExitCode.OK
    header, *rows = answer.stdout.splitlines()
    assert header.split() == ["check", "node", "0-1"]
    assert any(row.split()[:2] == ["shared-memory", "pass"] for row in rows)
    document = json.loads(CliRunner().invoke(app, ["check", "--nodes", "2", "-o", "json"]).stdout)
    assert sorted(document["nodes"]) == ["0", "1"]


@pytest.mark.slow
def test_full_check_of_nodes_probes_and_measures_them(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["check", "--nodes", "2", "--full"])
    assert answer.exit_code == ExitCode.OK, answer.stdout
    rows = [line.split() for line in answer.stdout.splitlines()]
    assert [row[3:5] for row in rows if row[0] == "probe,"][-2:] == [["all-reduce", "over"], ["all", "nodes"]]
    assert ["probe-pairs", "pass"] in rows
    assert ["probe-all-reduce", "pass"] in rows
    assert ["probe-storage", "pass"] in rows
    assert sorted(row[:2] for row in rows if row[:1] == ["node"]) == [["node", "0"], ["node", "1"]]
    assert ["probe-node-all-reduce", "not", "looked", "at:", "not", "run"] in rows  # there is one rank a node
    assert [row[0] for row in rows if row[1:2] == ["bytes"]][:2] == ["8", "64"]
