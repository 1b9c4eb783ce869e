"""Fabrics are rows, and a row never lets NCCL choose another network in silence."""

from __future__ import annotations

import pytest

from holdfast.fabric.catalog import AUTO, CATALOG, NAMES, resolve
from holdfast.fabric.fabric import Fabric


def test_names_auto_and_every_row() -> None:
    assert ("auto", *CATALOG) == NAMES
    assert len(NAMES) == len(set(NAMES)) > 14


@pytest.mark.parametrize("fabric", CATALOG.values(), ids=lambda fabric: fabric.name)
def test_row_pins_the_network_and_names_its_source(fabric: Fabric) -> None:
    assert fabric.env["NCCL_NET"] == fabric.network
    assert fabric.source.startswith("https://")
    assert fabric.description.endswith(".")
    assert fabric.expected_bandwidth
    assert len(fabric.env) == len(fabric.variables)
    for variable in fabric.variables:
        assert variable.value
        assert variable.reason.endswith(".")


@pytest.mark.parametrize(
    ("job", "target", "name"),
    [("auto", None, "tcp"), ("auto", "roce", "roce"), ("auto", "auto", "tcp"), ("infiniband", "roce", "infiniband")],
)
def test_auto_takes_the_targets_fabric_else_tcp(job: str, target: str | None, name: str) -> None:
    assert resolve(job, target).name == name


def test_auto_is_no_row() -> None:
    assert AUTO not in CATALOG
