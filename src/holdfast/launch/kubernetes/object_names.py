"""Owns what a run's objects are called, and where its parts find one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.job.spec import Job

VOLUME_ROOT = "/holdfast"
"""Where the shared volume is mounted in every pod; a job's relative checkpoint path starts from it."""

RUNS = "runs"
"""Folder of the shared volume with a folder for each run."""

PLACEHOLDER_ID = "000000"
"""Stands in a rendered manifest for the six characters that a run's id ends in; none of them is a zero."""

MAX_NAME_LENGTH = 43
"""Of a label's 63 characters the longest tail takes 20: `-node-0-` with a pod's five digits and `-` with five of chance
(the JobSet webhook counts them so), and a point to spare."""

RUN_LABEL = "holdfast/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PART_LABEL = "holdfast/part"
NODE = "node"
CONTROLLER = "controller"
CODE_KEY = "code.tar"
"""Under which name the controller's Secret has the run's code."""


@dataclass(frozen=True)
class ObjectNames:
    """Names of one run's objects; `name` is the run's id, with less of the job's name where that is too long."""

    name: str

    @classmethod
    def of(cls, job: Job, run_id: str) -> ObjectNames:
        """Names for a run whose id ends in these characters."""
        return cls(f"{name_stem(job)}-{run_id}")

    @property
    def controller(self) -> str:
        return f"{self.name}-controller"

    @property
    def secrets(self) -> str:
        return f"{self.name}-secrets"

    @property
    def keys(self) -> str:
        return f"{self.name}-keys"

    @property
    def first_node(self) -> str:
        """DNS name of a JobSet's first pod."""
        return f"{self.name}-{NODE}-0-0.{self.name}"

    def labels(self, part: str | None = None) -> dict[str, str]:
        """What every object of the run is found by, or those of one part of it."""
        labels = {"app.kubernetes.io/name": "holdfast", RUN_LABEL: self.name}
        return labels if part is None else labels | {PART_LABEL: part}

    def selector(self, part: str | None = None) -> dict[str, dict[str, str]]:
        """The same as a selector."""
        labels = {RUN_LABEL: self.name} | ({} if part is None else {PART_LABEL: part})
        return {"matchLabels": labels}


def name_stem(job: Job) -> str:
    """As much of a job's name as the names of its objects have room for."""
    return job.name[: MAX_NAME_LENGTH - len(PLACEHOLDER_ID) - 1].rstrip("-")
