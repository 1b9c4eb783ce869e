"""Renders a run as a TrainJob of Kubeflow Trainer, with a TrainingRuntime that has everything except the node count."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.manifests.agent_container import agent_container
from holdfast.launch.kubernetes.manifests.command_container import command_container, jobset_rank_env
from holdfast.launch.kubernetes.manifests.jobset import (
    NO_RESTARTS,
    NODE_INDEX,
    RENDEZVOUS_NETWORK,
    REPLACE_AT_ONCE,
    RESTARTS_COUNTED_BY_CONTROLLER,
    UNLIMITED_RETRIES,
    default_group,
    gang_job_spec,
    owner,
    restart_policy,
    suspended,
)
from holdfast.launch.kubernetes.manifests.pod_template import pod_template
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.launch.kubernetes.object_names import NODE
from holdfast.launch.kubernetes.workload_catalog import CATALOG

_TRAINJOB = CATALOG[Workload.TRAINJOB]


def training_runtime(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The template of the TrainJob's JobSet; it must exist before the TrainJob."""
    nodes = ctx.job.nodes.max
    supervised = ctx.target.agent
    policy, job = (NO_RESTARTS, _with_agent(ctx)) if supervised else (restart_policy(ctx), _without_agent(ctx))
    return ctx.manifest(
        _TRAINJOB.api_version,
        "TrainingRuntime",
        ctx.names.name,
        spec={
            "mlPolicy": {
                "numNodes": nodes,
                "torch": None if supervised else Commented({}, "Makes Trainer set PET_* for torchrun."),
            },
            "template": {
                "spec": Commented(
                    {
                        "network": RENDEZVOUS_NETWORK,
                        "failurePolicy": policy,
                        "replicatedJobs": [
                            {
                                "name": Commented(NODE, "Trainer identifies its nodes by this name and label."),
                                "groupName": default_group(ctx),
                                "replicas": 1 if ctx.accepted.from_tree else None,  # the default, as above
                                "template": {
                                    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                    "spec": job,
                                },
                            }
                        ],
                    },
                    "No time to live: Trainer would recreate a deleted JobSet.",
                )
            },
        },
    )


def trainjob(ctx: RenderContext) -> Mapping[str, YamlValue]:
    """The TrainJob of a run."""
    names, job = ctx.names, ctx.job
    trainer: YamlValue = {"numNodes": job.nodes.max, "numProcPerNode": job.local_world_size}
    return owner(
        ctx,
        {
            "suspend": suspended(ctx),
            "runtimeRef": {"apiGroup": _TRAINJOB.group, "kind": "TrainingRuntime", "name": names.name},
            "trainer": None if ctx.target.agent else trainer,
        },
    )


def _with_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    index: YamlValue = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}}
    return {
        "completionMode": "Indexed",
        "backoffLimitPerIndex": Commented(UNLIMITED_RETRIES, RESTARTS_COUNTED_BY_CONTROLLER),
        "podReplacementPolicy": REPLACE_AT_ONCE,
        "template": pod_template(ctx, agent_container(ctx, NODE, index=NODE_INDEX, index_from=index), restart="Never"),
    }


def _without_agent(ctx: RenderContext) -> Mapping[str, YamlValue]:
    return gang_job_spec(ctx, command_container(ctx, NODE, rank_env=jobset_rank_env(ctx, torchrun=False)))
