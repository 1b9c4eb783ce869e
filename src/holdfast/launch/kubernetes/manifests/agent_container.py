"""Renders the container that runs a node's agent, with its command line and mounts."""

from __future__ import annotations

from holdfast.launch.kubernetes.manifests.controller_objects import CONTROLLER_PORT, KEYS_DIR
from holdfast.launch.kubernetes.manifests.pod_template import SCRATCH, ContainerSpec
from holdfast.launch.kubernetes.manifests.render_context import RenderContext
from holdfast.launch.kubernetes.manifests.yaml_writer import Commented, YamlValue
from holdfast.protocol import routes


def agent_container(ctx: RenderContext, name: str, *, index: str, index_from: YamlValue = None) -> ContainerSpec:
    """The agent as the one container of a node's pod.

    `index` is the node's number, as the kubelet expands it, such as `$(JOB_COMPLETION_INDEX)`. `index_from` is the
    source of the variable HOLDFAST_NODE_INDEX, if `index` uses that.
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
                "The pod gets its node's generation from the controller, as a recreated pod cannot know it, and "
                "starts the agent. The agent starts ranks on the controller's orders, and they end with it. There is "
                "no liveness probe: the controller watches the agent's heartbeat, and a kubelet that kills a busy "
                "agent kills its ranks.",
            ),
            "env": env,
        },
        mounts=[
            {
                "name": "keys",
                "mountPath": f"{KEYS_DIR}/token",
                "subPathExpr": Commented(f"node{index}", "A node sees only its own token."),
                "readOnly": True,
            },
            {"name": "keys", "mountPath": f"{KEYS_DIR}/ca.pem", "subPath": "ca.pem", "readOnly": True},
        ],
        volumes=[{"name": "keys", "secret": {"secretName": names.keys, "defaultMode": Commented(0o440, "0440")}}],
    )
