"""Owns the agent's container: what starts a node's agent in its pod, and what it is told."""

from __future__ import annotations

from holdfast.launch.kubernetes.manifests.controller_objects import CONTROLLER_PORT, KEYS_DIR
from holdfast.launch.kubernetes.manifests.pod_template import SCRATCH, ContainerSpec
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.protocol import routes


def agent_container(ctx: RenderContext, name: str, *, index: str, index_from: YamlValue = None) -> ContainerSpec:
    """The agent as the one container of a node's pod.

    `index` is the node's number as the kubelet fills it in, such as `$(JOB_COMPLETION_INDEX)`; `index_from` is where
    the variable HOLDFAST_NODE_INDEX comes from, where that is meant.
    """
    job, names = ctx.job, ctx.names
    options = {
        "--controller": f"wss://{names.controller}:{CONTROLLER_PORT}{routes.AGENT_SOCKET}",
        "--ca": f"{KEYS_DIR}/ca.pem",
        "--bootstrap-token-file": f"{KEYS_DIR}/token",
        "--token-file": f"{SCRATCH}/token",
        "--folder": f"{SCRATCH}/node",
        "--sockets": f"{SCRATCH}/sockets",
        "--code": f"{SCRATCH}/code",
        **({} if ctx.accepted.durable_controller_disk else {"--log-replica": f"{SCRATCH}/copies"}),
        "--address": "$(POD_IP)",
        "--controller-grace-s": f"{job.recovery.controller_grace_s:g}",
        "--node-grace-s": f"{job.recovery.node_grace_s:g}",
        "--stop-grace-s": f"{job.recovery.stop_grace_s:g}",
    }
    words = [*(word for option in options.items() for word in option), "--echo"]
    env: list[YamlValue] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if index_from is not None:
        env.append({"name": "HOLDFAST_NODE_INDEX", "valueFrom": index_from})
    return ContainerSpec(
        container={
            "name": name,
            "image": job.image,
            "command": Commented(
                ["python", "-m", "holdfast.agent.bootstrap", index, *words],
                "It asks the controller which life of its node it is, since a pod that is made anew cannot know, and "
                "becomes its agent. The agent is the node: it starts the ranks as its controller says, and they end "
                "with it. It has no liveness probe: the controller listens for it, and a kubelet that killed a busy "
                "agent would kill its ranks.",
            ),
            "env": env,
        },
        mounts=[
            {
                "name": "keys",
                "mountPath": f"{KEYS_DIR}/token",
                "subPathExpr": Commented(f"node{index}", "Of the tokens of all nodes it sees its own."),
                "readOnly": True,
            },
            {"name": "keys", "mountPath": f"{KEYS_DIR}/ca.pem", "subPath": "ca.pem", "readOnly": True},
        ],
        volumes=[{"name": "keys", "secret": {"secretName": names.keys, "defaultMode": Commented(0o440, "0440")}}],
    )
