"""What the scheduler of a target accounted for a run's jobs, by its own clock and its own records."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class AccountedJob(Struct, frozen=True, kw_only=True):
    """A stretch of time in which a job had the same nodes: a job that was requeued or has lost a node has several."""

    job: str
    """Its number."""
    state: str
    """How it ended, in the scheduler's words, such as NODE_FAIL; RESIZING where it continued on fewer nodes."""
    exit_code: str
    submitted_at: float | None
    """Unix seconds, as all times here."""
    started_at: float | None
    """None while it waits."""
    ended_at: float | None
    """None while it runs or waits."""
    elapsed_s: int
    nodes: int
    node_names: str
    """In the scheduler's notation, such as `n[1-2]`; empty while it waits."""
    resources: Mapping[str, str]
    """What was allocated on all nodes together, such as `{"cpu": "64", "gres/gpu": "16"}`."""
    energy_j: int | None
    """None where no plugin measures energy."""

    @property
    def node_s(self) -> int:
        return self.elapsed_s * self.nodes

    @property
    def gpu_s(self) -> int:
        count = self.resources.get("gres/gpu", "0")
        return self.elapsed_s * int(count) if count.isdecimal() else 0


class SchedulerAccount(Struct, frozen=True, kw_only=True):
    """All stretches of a run's jobs, oldest first."""

    jobs: tuple[AccountedJob, ...] = ()
    missing: str = ""
    """Why nothing is known; empty if the scheduler answered."""

    @property
    def node_s(self) -> int:
        return sum(each.node_s for each in self.jobs)

    @property
    def gpu_s(self) -> int:
        return sum(each.gpu_s for each in self.jobs)

    @property
    def energy_j(self) -> int | None:
        """Of the jobs whose energy was measured; None if no job's was."""
        known = [each.energy_j for each in self.jobs if each.energy_j is not None]
        return sum(known) if known else None
