"""What the command line prints and writes for Prometheus and Grafana."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from holdfast.errors import ExitCode
from holdfast.events import Outcome, RunCreated, RunFinished
from holdfast.events.log_writer import EventWriter

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.golden import Golden


def finished_run(home: Path, run: str) -> None:
    folder = home / "runs" / run
    folder.mkdir(parents=True, mode=0o700)
    writer = EventWriter(folder / "events.jsonl")
    created = RunCreated(at=1000.0, run=run, job={"name": "demo"})
    writer.append((created, RunFinished(at=1060.0, outcome=Outcome.FAILED, exit_code=1)))
    writer.close()


def test_metrics_of_a_finished_run_are_printed(cli: Cli, home: Path, golden: Golden) -> None:
    finished_run(home, "demo-k3m9tz")
    golden(cli("metrics", "demo-k3m9tz").out)


def test_metrics_are_served_to_other_machines_only_with_a_token(cli: Cli, tmp_path: Path) -> None:
    refused = cli("metrics", "serve", "--host", "0.0.0.0")
    assert (refused.code, "token-missing" in refused.err) == (ExitCode.USAGE, True)
    empty = tmp_path / "token"
    for text in (None, "\n"):
        if text is not None:
            empty.write_text(text)
        refused = cli("metrics", "serve", "--host", "0.0.0.0", "--token-file", str(empty))
        assert (refused.code, "token-unreadable" in refused.err) == (ExitCode.USAGE, True)


def test_port_that_is_taken_is_a_finding(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = cli("metrics", "serve", "--port", str(taken.getsockname()[1]))
    assert (answer.code, "port-unavailable" in answer.err) == (ExitCode.UNAVAILABLE, True)


def test_alerts_and_dashboards_are_files_or_objects(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = tmp_path / ".holdfast" / "targets"
    targets.mkdir(parents=True)
    (targets / "gpus.yaml").write_text("kind: kubernetes\nnamespace: team\nqueue: train\n")
    monkeypatch.chdir(tmp_path)
    written = cli("observe", "render", "--to", str(tmp_path / "monitoring")).out.splitlines()
    assert [Path(line).name for line in written] == [
        "holdfast-rules.yml",
        "holdfast-fleet.json",
        "holdfast-run.json",
        "holdfast-nodes.json",
    ]
    assert cli("observe", "render").code == ExitCode.CANNOT_RUN_HERE
    rendered = cli("observe", "render", "--on", "gpus")
    rule, *dashboards = yaml.safe_load_all(rendered.out)
    assert (rule["kind"], rule["metadata"]["namespace"]) == ("PrometheusRule", "team")
    rules = yaml.safe_load((tmp_path / "monitoring" / "holdfast-rules.yml").read_text())
    assert rule["spec"] == rules
    for path, each in zip(written[1:], dashboards, strict=True):
        assert each["data"] == {Path(path).name: Path(path).read_text()}
