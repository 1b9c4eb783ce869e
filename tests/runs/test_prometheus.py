"""A real Prometheus scrapes a real run by `holdfast metrics serve`: alerts reach Alertmanager, panels have data."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.runs.conftest import Runs
from tests.waiting import until

from holdfast import api
from holdfast.events import CheckpointCommitted, FaultAction, FaultTarget, RecoveryDecided, StepCommitted
from holdfast.observe.dashboard_catalog import DASHBOARDS
from holdfast.observe.monitoring_files import RULES_FILE

WATCHED_LOOP = Path(__file__).parents[2] / "bench" / "programs" / "watched_loop.py"
ALERT = "HoldfastNotFinite"
NOT_ON_A_CPU = ("step_mfu_", "step_memory_peak_bytes")
"""Metrics that only ranks with a GPU have."""
OF_EXPORTERS = """
DCGM_FI_DEV_GPU_UTIL{{gpu="0",Hostname="{host}"}} 97
DCGM_FI_DEV_GPU_TEMP{{gpu="0",Hostname="{host}"}} 61
kube_pod_info{{namespace="ml",pod="{host}-x2b4z",node="machine-7"}} 1
kube_pod_info{{namespace="ml",pod="other-x2b4z",node="machine-8"}} 1
kube_pod_status_phase{{namespace="ml",pod="{host}-x2b4z",phase="Running"}} 1
kube_pod_status_phase{{namespace="ml",pod="{host}-x2b4z",phase="Pending"}} 0
kube_node_status_condition{{node="machine-7",condition="Ready",status="true"}} 1
kube_node_status_condition{{node="machine-7",condition="DiskPressure",status="true"}} 1
kube_node_status_condition{{node="machine-8",condition="DiskPressure",status="true"}} 1
"""
"""Series of the DCGM exporter and of kube-state-metrics, as their pages list them."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def program(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file, subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT) as running:
        try:
            yield running
        finally:
            running.terminate()


@contextmanager
def exporters(host: str) -> Iterator[int]:
    """Answers like DCGM's exporter on a machine of that name, and like kube-state-metrics with a pod of a Job there."""

    class Exporter(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(OF_EXPORTERS.format(host=host).lstrip().encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Exporter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def asked(url: str, **parameters: str) -> Any:
    """The JSON at a URL; None while nothing answers there."""
    try:
        return httpx.get(url, params=parameters, timeout=10.0, trust_env=False).json()
    except (httpx.TransportError, ValueError):
        return None


@pytest.mark.needs("prometheus", "prometheus-alertmanager")
def test_alerts_of_a_run_reach_alertmanager_and_every_panel_has_data(runs: Runs, tmp_path: Path) -> None:
    command = (sys.executable, str(WATCHED_LOOP), "4000", "0.1")
    watched = runs.start(*command, nodes=2, overrides=("checkpoint.every_steps=10",))
    run = watched.folder.run_id
    token = tmp_path / "token"
    token.write_text("a-long-random-line\n")
    api.write_monitoring_files(tmp_path)
    prometheus, alertmanager, metrics = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        exporter = stack.enter_context(exporters(socket.gethostname()))
        scrape = {
            "job_name": "holdfast",
            "authorization": {"credentials_file": str(token)},
            "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}],
        }
        others = {
            "job_name": "exporters",
            "honor_labels": True,
            "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}],
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(tmp_path / RULES_FILE)],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]},
            "scrape_configs": [scrape, others],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        (tmp_path / "alertmanager.yml").write_text(
            yaml.safe_dump({"route": {"receiver": "nobody"}, "receivers": [{"name": "nobody"}]})
        )
        serve = ("metrics", "serve", "--port", str(metrics), "--token-file", str(token))
        stack.enter_context(program(sys.executable, "-m", "holdfast", *serve, log=tmp_path / "metrics.log"))
        stack.enter_context(
            program(
                "prometheus-alertmanager",
                f"--config.file={tmp_path}/alertmanager.yml",
                f"--storage.path={tmp_path}/alertmanager",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
                log=tmp_path / "alertmanager.log",
            )
        )
        stack.enter_context(
            program(
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/tsdb",
                f"--web.listen-address=127.0.0.1:{prometheus}",
                log=tmp_path / "prometheus.log",
            )
        )
        watched.first(CheckpointCommitted)
        watched.drill(FaultTarget.RANK, 1, FaultAction.KILL)
        watched.wait_for(RecoveryDecided)
        watched.wait_for(StepCommitted, lambda event: event.attempt == 1)
        watched.drill(FaultTarget.LOSS, 0, FaultAction.NAN)

        def reported() -> bool:
            alerts = asked(f"http://127.0.0.1:{alertmanager}/api/v2/alerts") or []
            return any(alert["labels"]["alertname"] == ALERT and alert["labels"]["run"] == run for alert in alerts)

        until(reported, every_s=0.5)

        def data(expression: str) -> list[Any]:
            query = expression.replace("$run", run).replace("$__rate_interval", "60s")
            answer = asked(f"http://127.0.0.1:{prometheus}/api/v1/query", query=query)
            assert answer, f"Prometheus did not answer {query}"
            assert answer["status"] == "success", answer
            return answer["data"]["result"]

        queries = [
            query.expression
            for dashboard in DASHBOARDS
            for panel in dashboard.panels
            for query in panel.queries
            if not any(metric in query.expression for metric in NOT_ON_A_CPU)
        ]
        for query in queries:
            until(partial(data, query), query, every_s=0.5)
        for query in queries:
            if "kube_node_status_condition" in query:
                (only,) = data(query)
                assert (only["metric"]["node"], only["metric"]["condition"]) == ("machine-7", "DiskPressure")
        refused = httpx.get(f"http://127.0.0.1:{metrics}/metrics", trust_env=False)
        assert refused.status_code == 401
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
