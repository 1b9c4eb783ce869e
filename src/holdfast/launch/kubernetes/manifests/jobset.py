"""Renders a run as a JobSet: with agents one Job per node, without agents one Job for all nodes."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container, jobset_rank_env
from holdfast.launch.kubernetes.manifests.pod_template import ContainerSpec, pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import (
    MULTIKUEUE,
    NODE,
    NODES_ANNOTATION,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    TREE_ANNOTATION,
    USER_ANNOTATION,
)
from holdfast.launch.kubernetes.workload_catalog import CATALOG

NODE_INDEX = "$(HOLDFAST_NODE_INDEX)"

RESTARTS_COUNTED_BY_CONTROLLER = "The controller counts recovery.max_restarts; a second count would conflict."
NO_RESTARTS: YamlValue = {
    "maxRestarts": Commented(0, "A JobSet would restart all nodes; holdfast restarts ranks and counts the restarts.")
}
UNLIMITED_RETRIES = 2**31 - 1
REPLACE_AT_ONCE = Commented(
    "TerminatingOrFailed",
    "The pod of a dead machine never finishes terminating, but must be replaced. A pod failure policy would forbid "
    "this.",
)
RENDEZVOUS_NETWORK: YamlValue = {
    "enableDNSHostnames": True,
    "publishNotReadyAddresses": Commented(True, "The rendezvous happens before the pods are ready."),
}


def jobset(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The JobSet of a run."""
    return owner(
        ctx,
        {
            "suspend": suspended(ctx),
            "managedBy": Commented(MULTIKUEUE, "Kueue sends it to a worker cluster, and copies its status back.")
            if ctx.target.multikueue
            else None,
            "network": RENDEZVOUS_NETWORK,
            "ttlSecondsAfterFinished": time_to_live(ctx),
            **(_with_agent(ctx) if ctx.target.agent else _without_agent(ctx)),
        },
    )


def owner(ctx: RenderContext, spec: YamlValue) -> Mapping[str, YamlValue]:
    """The run's owner object, which owns the others and which a queue admits."""
    kind = CATALOG[ctx.workload]
    labels = {QUEUE_LABEL: ctx.queue, PRIORITY_LABEL: ctx.job.priority} if ctx.queue else {}
    nodes = str(ctx.job.nodes.max)
    annotations: dict[str, YamlValue] = (
        {
            NODES_ANNOTATION: nodes,
            TREE_ANNOTATION: Commented(
                "true", "The tool that applies the run's objects deletes them; holdfast does not."
            ),
        }
        if ctx.accepted.from_tree
        else {
            USER_ANNOTATION: ctx.user,
            NODES_ANNOTATION: Commented(nodes, "`holdfast ps --on` shows both on any machine."),
        }
    )
    return ctx.manifest(kind.api_version, kind.kind, ctx.names.name, labels=labels, annotations=annotations, spec=spec)


def time_to_live(ctx: RenderContext) -> YamlValue:
    """How long a finished run's objects stay; those of a tree stay until it is deleted, or they would be made again."""
    if ctx.accepted.from_tree:
        return None
    return Commented(ctx.target.ttl_s, "Kept for inspection, then deleted with all that it owns.")


def suspended(ctx: RenderContext) -> YamlValue:
    """A queued run starts suspended, until Kueue admits the whole gang.

    In a tree Kueue's webhook sets it: a tree that is applied again must not suspend the run again.
    """
    if ctx.accepted.from_tree:
        return None
    return Commented(True, "Kueue unsuspends it once the whole gang fits.") if ctx.queue else None


def _with_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """One Job per node with unlimited retries; the controller decides what restarts, and how often."""
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
        "One Job per node: the pods of one Job share the back-off before a failed pod is replaced, which doubles with "
        "every failure.",
    )
    return {
        "failurePolicy": NO_RESTARTS,
        "replicatedJobs": [_replicated_job(ctx, nodes, job)],
    }


def _without_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """One Job for all nodes, which JobSet recreates when a pod fails."""
    occupant = command_container(ctx, NODE, rank_env=jobset_rank_env(ctx, torchrun=True))
    return {
        "failurePolicy": restart_policy(ctx),
        "replicatedJobs": [_replicated_job(ctx, 1, gang_job_spec(ctx, occupant))],
    }


def _replicated_job(ctx: RenderContext, count: YamlValue, spec: YamlValue) -> YamlValue:
    metadata: YamlValue = {} if ctx.accepted.from_tree else None  # as operators write it back
    template: YamlValue = {"metadata": metadata, "spec": spec}
    return {"name": NODE, "groupName": default_group(ctx), "replicas": count, "template": template}


def default_group(ctx: RenderContext) -> YamlValue:
    """JobSet's default, in a tree: a tool that compares it with the cluster must see no difference in the list."""
    return "default" if ctx.accepted.from_tree else None


def restart_policy(ctx: RenderContext) -> YamlValue:
    """The restart policy of a JobSet without a controller: as a whole, up to the job's limit."""
    return {
        "maxRestarts": ctx.job.recovery.max_restarts,
        "restartStrategy": Commented("BlockingRecreate", "Ranks of two attempts must not meet."),
        "rules": [
            Commented(
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
                "A drain or a preemption is not the job's fault and does not count.",
            )
        ],
    }


def gang_job_spec(ctx: RenderContext, occupant: ContainerSpec) -> Mapping[str, YamlValue]:
    """A Job for all nodes that fails as soon as one node fails."""
    disrupted: YamlValue = {"type": "DisruptionTarget", "status": "True"}
    return {
        "parallelism": ctx.job.nodes.max,
        "completions": ctx.job.nodes.max,
        "completionMode": "Indexed",
        "backoffLimit": Commented(0, "A replaced pod cannot join: the other ranks wait for the old one."),
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [disrupted]}]},
        "template": pod_template(ctx, occupant, restart="Never"),
    }
