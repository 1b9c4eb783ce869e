"""Owns a run as a JobSet: with an agent one Job for each node, without one Job for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.incluster.exec_commands import RETENTION_S
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container, jobset_rank_env
from holdfast.launch.kubernetes.manifests.pod_template import ContainerSpec, pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import NODE, QUEUE_LABEL

NODE_INDEX = "$(HOLDFAST_NODE_INDEX)"

RESTARTS_COUNTED_BY_CONTROLLER = "recovery.max_restarts is counted by the controller; two counts would fight."
NO_RESTARTS: YamlValue = {
    "maxRestarts": Commented(0, "A JobSet restarts all of its nodes; holdfast restarts ranks, and counts them.")
}
UNLIMITED_RETRIES = 2**31 - 1
REPLACE_AT_ONCE = Commented(
    "TerminatingOrFailed",
    "The pod of a dead machine never finishes terminating, and is replaced all the same. A pod failure policy would "
    "forbid this.",
)
RENDEZVOUS_NETWORK: YamlValue = {
    "enableDNSHostnames": True,
    "publishNotReadyAddresses": Commented(True, "Ranks meet before their pods count as ready."),
}


def jobset(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The JobSet of a run."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": owner_metadata(ctx),
        "spec": {
            "suspend": suspended(ctx),
            "network": RENDEZVOUS_NETWORK,
            "ttlSecondsAfterFinished": Commented(
                RETENTION_S, "A day to look at it; then it goes with all that it owns."
            ),
            **(_with_agent(ctx) if ctx.target.agent else _without_agent(ctx)),
        },
    }


def owner_metadata(ctx: RenderContext) -> YamlValue:
    """Name and labels of the object that stands for the run: what owns the others, and what a queue admits."""
    labels = ctx.names.labels()
    if ctx.queue:
        labels |= {QUEUE_LABEL: ctx.queue}
    return {"name": ctx.names.name, "namespace": ctx.target.namespace, "labels": labels}


def suspended(ctx: RenderContext) -> YamlValue:
    """A run in a queue waits until there is room for the whole of it."""
    return Commented(True, "Kueue starts it, once the whole gang has room.") if ctx.queue else None


def _with_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """A Job for each node, none of which gives up; what is restarted, and how often, is the controller's to say."""
    index: YamlValue = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    occupant = agent_container(ctx, NODE, index=NODE_INDEX, index_from=index)
    job = {
        "parallelism": 1,
        "completions": 1,
        "completionMode": "Indexed",
        "backoffLimit": Commented(UNLIMITED_RETRIES, RESTARTS_COUNTED_BY_CONTROLLER),
        "podReplacementPolicy": REPLACE_AT_ONCE,
        "template": pod_template(ctx, occupant, restart="Never"),
    }
    nodes = Commented(
        ctx.job.nodes.max,
        "One Job for each node: pods of one Job would share the pause before a failed one is replaced, which doubles "
        "with every failure.",
    )
    return {
        "failurePolicy": NO_RESTARTS,
        "replicatedJobs": [{"name": NODE, "replicas": nodes, "template": {"spec": job}}],
    }


def _without_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """One Job of all nodes, which JobSet makes anew as a whole when a pod fails."""
    occupant = command_container(ctx, NODE, rank_env=jobset_rank_env(ctx, torchrun=True))
    return {
        "failurePolicy": restart_policy(ctx),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": gang_job_spec(ctx, occupant)}}],
    }


def restart_policy(ctx: RenderContext) -> YamlValue:
    """How a JobSet without a controller of ours restarts: as a whole, as often as the job says."""
    return {
        "maxRestarts": ctx.job.recovery.max_restarts,
        "restartStrategy": Commented("BlockingRecreate", "No rank of a new attempt may meet one of the last."),
        "rules": [
            Commented(
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
                "A drain or a preemption is not the job's fault, and does not count.",
            )
        ],
    }


def gang_job_spec(ctx: RenderContext, occupant: ContainerSpec) -> Mapping[str, YamlValue]:
    """A Job of all nodes that fails as soon as one of them does."""
    disrupted: YamlValue = {"type": "DisruptionTarget", "status": "True"}
    return {
        "parallelism": ctx.job.nodes.max,
        "completions": ctx.job.nodes.max,
        "completionMode": "Indexed",
        "backoffLimit": Commented(0, "A pod that is replaced alone meets ranks that wait for its former self."),
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
        "template": pod_template(ctx, occupant, restart="Never"),
    }
