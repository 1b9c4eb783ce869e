"""Prometheus's rules file with all alerts, plain or as the PrometheusRule of its operator. Pure."""

from __future__ import annotations

from holdfast.observe.alert_catalog import ALERTS, Alert

GROUP = "holdfast"


def rules_document() -> dict[str, object]:
    """The rules file."""
    return {"groups": [{"name": GROUP, "rules": [_rule(alert) for alert in ALERTS]}]}


def prometheus_rule(name: str) -> dict[str, object]:
    """The same as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name},
        "spec": rules_document(),
    }


def _rule(alert: Alert) -> dict[str, object]:
    held = {"for": f"{alert.for_s}s"} if alert.for_s else {}
    return {
        "alert": alert.name,
        "expr": alert.expression,
        **held,
        "labels": {"severity": alert.severity.value},
        "annotations": {"summary": alert.summary, "command": alert.explain},
    }
