"""Formats amounts of memory, storage and CPU as Kubernetes writes them."""

from __future__ import annotations


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
