"""Names, labels and addresses of a run's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from holdfast.job.spec import Job

VOLUME_ROOT = "/holdfast"
"""Mount path of the shared volume in every pod; a job's relative checkpoint path starts from it."""

RUNS = "runs"
"""The shared volume's folder that has a folder for each run."""

PLACEHOLDER_ID = "000000"
"""Placeholder in rendered manifests for the six characters that end a run's id; a real id has no zero there."""

MAX_NAME_LENGTH = 43
"""A label has 63 characters, of which the longest suffix takes 20: `-node-0-`, five digits of a pod's index, `-` and
five random characters (as the JobSet webhook counts), and one spare."""

RUN_LABEL = "holdfast/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
"""Kueue's name of the controller that sends objects to worker clusters."""
PART_LABEL = "holdfast/part"
FABRIC_LABEL = "holdfast/fabric"
"""The fabric of a node's pod."""
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
"""The annotation by which Volcano knows the PodGroup of a pod."""
CHECKPOINT_ANNOTATION = "holdfast/checkpoint"
"""The object store of a run's checkpoints, on a node's pod."""
USER_ANNOTATION = "holdfast/user"
"""The user who started the run, on the run's object."""
NODES_ANNOTATION = "holdfast/nodes"
"""The largest number of nodes of the run, on the run's object."""
CANCELLED_REASON = "RunCancelled"
"""Reason in the condition `Failed` of a cancelled run's object: no kind has a condition for cancelling."""
NODE = "node"
CONTROLLER = "controller"
CODE_KEY = "code.tar"
"""Key of the run's code in the controller's Secret."""
JOB_KEY = "job.json"
"""Key of the accepted run in its ConfigMap."""
METRICS_TOKEN_KEY = "metrics-token"
"""Key of the token that only reads metrics, in the Secret of the nodes' tokens."""
TREE_ANNOTATION = "holdfast/tree"
"""On the run's object, if others apply and delete the run's objects: holdfast deletes none of them."""


class ObjectNames(Struct, frozen=True):
    """Names of one run's objects; `name` is the run's id, with the job's name shortened if too long."""

    name: str

    @classmethod
    def of(cls, job: Job, run_id: str) -> ObjectNames:
        """Names for a run whose id ends in `run_id`."""
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
    def code(self) -> str:
        return f"{self.name}-code"

    @property
    def fabric_claim(self) -> str:
        return f"{self.name}-fabric"

    @property
    def first_node(self) -> str:
        """DNS name of a JobSet's first pod."""
        return f"{self.name}-{NODE}-0-0.{self.name}"

    def labels(self, part: str | None = None) -> dict[str, str]:
        """Labels of all objects of the run, or of one part of it."""
        labels = {"app.kubernetes.io/name": "holdfast", RUN_LABEL: self.name}
        return labels if part is None else labels | {PART_LABEL: part}

    def selector(self, part: str | None = None) -> dict[str, dict[str, str]]:
        """The same as a label selector."""
        labels = {RUN_LABEL: self.name} | ({} if part is None else {PART_LABEL: part})
        return {"matchLabels": labels}


def name_stem(job: Job) -> str:
    """The job's name, cut to the length that object names allow."""
    return job.name[: MAX_NAME_LENGTH - len(PLACEHOLDER_ID) - 1].rstrip("-")
