"""Amounts as Kubernetes writes them."""

from __future__ import annotations

import pytest

from holdfast.launch.kubernetes.manifests.quantities import parse_quantity


@pytest.mark.parametrize(
    ("quantity", "amount"),
    [
        ("8", 8.0),
        ("0.5", 0.5),
        ("500m", 0.5),
        ("250u", 250e-6),
        ("10n", 10e-9),
        ("2k", 2e3),
        ("64Gi", 64.0 * 1024**3),
        ("1E", 1e18),
        ("2Ei", 2.0 * 1024**6),
        ("3e2", 300.0),
        ("3E2", 300.0),
        ("5e-1", 0.5),
    ],
)
def test_quantity_of_every_notation_is_parsed(quantity: str, amount: float) -> None:
    assert parse_quantity(quantity) == pytest.approx(amount)
