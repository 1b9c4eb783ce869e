"""Owns the agent's container: what starts a node's agent in its pod, and what it is told."""

from __future__ import annotations

from holdfast.events import paths
from holdfast.launch.kubernetes.controller import KEYS, PORT
from holdfast.launch.kubernetes.manifest import Because, Node
from holdfast.launch.kubernetes.pod import SCRATCH, Occupant
from holdfast.launch.kubernetes.submission import Submission


def agent(asked: Submission, name: str, *, index: str, index_from: Node = None) -> Occupant:
    """The agent as the one container of a node's pod.

    `index` is the node's number as the kubelet fills it in, such as `$(JOB_COMPLETION_INDEX)`; `index_from` is where
    the variable HOLDFAST_NODE_INDEX comes from, where that is meant.
    """
    job, names = asked.job, asked.names
    options = {
        "--controller": f"wss://{names.controller}:{PORT}{paths.AGENT}",
        "--ca": f"{KEYS}/ca.pem",
        "--newcomer-token-file": f"{KEYS}/token",
        "--token-file": f"{SCRATCH}/token",
        "--folder": f"{SCRATCH}/node",
        "--sockets": f"{SCRATCH}/sockets",
        "--code": f"{SCRATCH}/code",
        **({} if asked.accepted.lasting else {"--copies": f"{SCRATCH}/copies"}),
        "--address": "$(POD_IP)",
        "--controller-grace-s": f"{job.recovery.controller_grace_s:g}",
        "--node-grace-s": f"{job.recovery.node_grace_s:g}",
        "--stop-grace-s": f"{job.recovery.stop_grace_s:g}",
    }
    words = [*(word for option in options.items() for word in option), "--echo"]
    env: list[Node] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    if index_from is not None:
        env.append({"name": "HOLDFAST_NODE_INDEX", "valueFrom": index_from})
    return Occupant(
        container={
            "name": name,
            "image": job.image,
            "command": Because(
                ["python", "-m", "holdfast.agent.enrol", index, *words],
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
                "mountPath": f"{KEYS}/token",
                "subPathExpr": Because(f"node{index}", "Of the tokens of all nodes it sees its own."),
                "readOnly": True,
            },
            {"name": "keys", "mountPath": f"{KEYS}/ca.pem", "subPath": "ca.pem", "readOnly": True},
        ],
        volumes=[{"name": "keys", "secret": {"secretName": names.keys, "defaultMode": Because(0o440, "0440")}}],
    )
