"""What a monitoring system needs for holdfast's runs, as files or as objects of a cluster. Pure."""

from __future__ import annotations

import json

import yaml

from holdfast.observe.dashboard_catalog import DASHBOARDS
from holdfast.observe.dashboard_json import dashboard_document
from holdfast.observe.rules_file import prometheus_rule, rules_document

RULES_FILE = "holdfast-rules.yml"
DASHBOARD_LABEL = "grafana_dashboard"
"""The label by which Grafana's Helm chart finds ConfigMaps with dashboards."""


def monitoring_files() -> dict[str, str]:
    """Texts by file name: the rules for Prometheus and the dashboards for Grafana."""
    dashboards = {f"{kind.uid}.json": _to_json(dashboard_document(kind)) for kind in DASHBOARDS}
    return {RULES_FILE: _to_yaml(rules_document()), **dashboards}


def monitoring_objects() -> list[dict[str, object]]:
    """The same for a cluster: a PrometheusRule of the Prometheus operator, and a ConfigMap for each dashboard."""
    return [
        prometheus_rule("holdfast"),
        *(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": kind.uid, "labels": {DASHBOARD_LABEL: "1"}},
                "data": {f"{kind.uid}.json": _to_json(dashboard_document(kind))},
            }
            for kind in DASHBOARDS
        ),
    ]


def _to_json(document: dict[str, object]) -> str:
    return json.dumps(document, indent=2) + "\n"


def _to_yaml(document: dict[str, object]) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=1000)
