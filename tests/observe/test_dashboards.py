"""Grafana's own model of a dashboard takes ours and loses nothing of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from holdfast.observe.dashboard_catalog import DASHBOARDS, DashboardKind
from holdfast.observe.dashboard_json import COLUMNS, dashboard_document


def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """The paths at which a document has something that another lacks."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = ours.keys() & theirs.keys()
        inner = [each for key in both for each in lost(ours[key], theirs[key], f"{path}/{key}")]
        return [*inner, *(f"{path}/{key}" for key in ours.keys() - theirs.keys())]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for at, pair in enumerate(zip(ours, theirs, strict=True)) for each in lost(*pair, f"{path}/{at}")]
    return [] if ours == theirs else [path]


@pytest.mark.parametrize("kind", DASHBOARDS, ids=lambda kind: kind.uid)
def test_dashboard_fits_grafanas_schema(kind: DashboardKind) -> None:
    document = json.loads(json.dumps(dashboard_document(kind)))
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert lost(document, read) == []


@pytest.mark.parametrize("kind", DASHBOARDS, ids=lambda kind: kind.uid)
def test_panels_do_not_overlap(kind: DashboardKind) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard_document(kind)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = {(x, place["y"]) for x in range(place["x"], place["x"] + place["w"])}
        assert not cells & taken, panel["title"]
        taken |= cells
