"""What a target's scheduler accounted for a run, as rows and a line of text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from holdfast.job.scheduler_account import SchedulerAccount
from holdfast.report.formatting import count, duration

ACCOUNTED_HEAD = ("job", "state", "elapsed", "nodes", "allocated", "node seconds", "energy")


def accounted_rows(account: SchedulerAccount) -> list[tuple[str, ...]]:
    """A row for each stretch of a job."""
    return [
        (
            each.job,
            each.state,
            duration(each.elapsed_s),
            f"{each.nodes} ({each.node_names})" if each.nodes else "",
            ", ".join(f"{name} {amount}" for name, amount in each.resources.items()),
            f"{each.node_s:,}",
            _energy(each.energy_j),
        )
        for each in account.jobs
    ]


def accounted_sentence(account: SchedulerAccount) -> str:
    """All of it together, or why nothing is known."""
    if account.missing:
        return f"Nothing is known: {account.missing}."
    if not account.jobs:
        return "The scheduler knows no job of this run."
    return f"{', '.join(_totals(account))}."


def accounted_document(account: SchedulerAccount | None) -> Mapping[str, object] | None:
    """The same as data; None on a target without a scheduler."""
    if account is None:
        return None
    totals = {"node_s": account.node_s, "gpu_s": account.gpu_s, "energy_j": account.energy_j}
    return {**msgspec.to_builtins(account), **totals}


def _totals(account: SchedulerAccount) -> Iterator[str]:
    yield count(len({each.job for each in account.jobs}), "job")
    yield f"{account.node_s / 3600:,.2f} node hours"
    if account.gpu_s:
        yield f"{account.gpu_s / 3600:,.2f} GPU hours"
    if account.energy_j is not None:
        yield _energy(account.energy_j)


def _energy(joules: int | None) -> str:
    return "" if joules is None else f"{joules / 3.6e6:,.3g} kWh"
