"""Formats and parses amounts of memory, storage and CPU as Kubernetes writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from holdfast.launch.kubernetes.manifests.yaml_writer import YamlValue, to_plain

_UNITS: Mapping[str, float] = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
}


def format_quantity(size_bytes: int | None) -> str | None:
    """Bytes in Kubernetes notation, in the largest unit that gives an integer."""
    if size_bytes is None:
        return None
    for power, unit in ((50, "Pi"), (40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{unit}"
    return str(size_bytes)


def format_cores(cpu: float | None) -> str | None:
    """CPU cores in Kubernetes notation, in thousandths if not an integer."""
    if cpu is None:
        return None
    return str(int(cpu)) if cpu == int(cpu) else f"{max(1, round(cpu * 1000))}m"


def parse_quantity(quantity: str) -> float:
    """Parse a Kubernetes quantity: `500m`, `64Gi`, `8`; 0 if it is none."""
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([a-zA-Z]*)", quantity)
    return float(found[1]) * _UNITS.get(found[2], 1.0) if found else 0.0


def parse_quantities(amounts: Mapping[str, YamlValue]) -> dict[str, float]:
    """Parse the amount of each resource, as of the requests of a pod."""
    return {name: parse_quantity(str(amount)) for name, amount in to_plain(amounts).items()}
