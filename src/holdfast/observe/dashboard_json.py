"""Grafana's JSON of a dashboard. Pure."""

from __future__ import annotations

from holdfast.observe.dashboard_catalog import DashboardKind, Panel, PanelKind
from holdfast.observe.exported_metrics import PREFIX

COLUMNS, PANEL_HEIGHT = 24, 8
SCHEMA_VERSION = 39
"""Of Grafana 10 and 11; later versions migrate it."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_document(kind: DashboardKind) -> dict[str, object]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": kind.uid,
        "title": kind.title,
        "tags": ["holdfast"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), *([_run_variable()] if kind.has_run else [])]},
        "panels": _panels(kind),
    }


def _source_variable() -> dict[str, object]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, object]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({PREFIX}run_info, run)", "refId": "runs"},
        "refresh": 2,  # when the time range changes: runs come and go
        "sort": 2,
    }


def _panels(kind: DashboardKind) -> list[dict[str, object]]:
    """The panels from left to right, in rows."""
    x = y = 0
    found: list[dict[str, object]] = []
    for number, panel in enumerate(kind.panels, start=1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + PANEL_HEIGHT
        place = {"x": x, "y": y, "w": panel.width, "h": PANEL_HEIGHT}
        found.append({"id": number, "gridPos": place, **_panel(panel)})
        x += panel.width
    return found


def _panel(panel: Panel) -> dict[str, object]:
    custom = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 30}} if panel.is_stacked else {}
    is_table = panel.kind is PanelKind.TABLE
    return {
        "title": panel.title,
        "description": panel.help,
        "type": panel.kind.value,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, **custom}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
                **({"instant": True, "format": "table"} if is_table else {}),
            }
            for place, query in enumerate(panel.queries)
        ],
    }
