"""Owns what the findings mean that come of a job and a cluster; one row each: its cause, how to confirm, what to do."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "no-image",
        "The job names no image, and on a cluster every node is made of one.",
        "`image` in the job file.",
        "Add `image: REGISTRY/NAME:TAG`; with an agent it needs holdfast in it.",
    ),
    (
        "path-not-shared",
        "A checkpoint path is one of a machine: in a pod it is lost with the pod, and no other node sees it.",
        "The line.",
        "A relative path, which starts from the profile's volume, or a URL such as s3://bucket/run.",
    ),
    (
        "impossible-quantity",
        "An amount that no node can give: less CPU than can be asked for, or more shared memory than memory.",
        "The line.",
        "Mend it.",
    ),
    (
        "fabric-unreachable",
        "The fabric's name says which network it is, and not how a pod gets to it.",
        "`holdfast fabric NAME`: `pod` is none.",
        "rdma-shared, sriov or oke-roce, whichever the cluster has; or tcp.",
    ),
    (
        "fabric-device-unnamed",
        "A cluster names its devices and attachments as it likes, and the profile does not say how.",
        "`kubectl get node NODE -o jsonpath={.status.allocatable}`, `kubectl get net-attach-def -A`.",
        "Write `fabric_device: {resource: ..., network: ...}` in the profile.",
    ),
    (
        "memory-lock",
        "RDMA pins memory. The capability IPC_LOCK, which lifts the bound on it, does nothing for users but root.",
        "`ulimit -l` in the container says unlimited where it is all right.",
        "LimitMEMLOCK=infinity for the container runtime, or `user: 0` in the profile.",
    ),
    (
        "host-network",
        "On the host network pods have their machine's address, and a NetworkPolicy does not apply to them.",
        "`holdfast render`: `hostNetwork: true`.",
        "Keep everybody else off those machines' network.",
    ),
    (
        "needs-no-agent",
        "The kind of object has no place for holdfast's agents.",
        "`workload` in the profile.",
        "`workload: jobset`, where `launch: mpi` needs no ssh, or `agent: false`.",
    ),
    (
        "needs-agent",
        "The ranks of this job are started by holdfast's agent, and the profile says `agent: false`.",
        "`launch` in the job, `agent` in the profile.",
        "Remove `agent: false`, or start the ranks with torchrun and `launch: per-node`.",
    ),
    (
        "gang-of-one-size",
        "A queue admits a gang of one size, so a range of nodes asks for the most of it.",
        "`nodes` in the job.",
        "Write the number of nodes to start with.",
    ),
    (
        "demo-template",
        "The profile's template is `demo`: what is rendered lacks something that a production run needs.",
        "The evidence names each.",
        "Mend these, and write `template: production`, which refuses to render without them.",
    ),
    (
        "fabric-not-verified",
        "`template: production` asks for a fabric that was seen to carry collectives on this cluster.",
        "A run with NCCL_DEBUG=INFO, and `holdfast diagnose` on its logs.",
        "Write when and how it was seen as `fabric_verified` in the profile.",
    ),
    (
        "checkpoint-not-shared",
        "`template: production` asks for checkpoints that outlive a pod.",
        "`volume` in the profile, `checkpoint.path` in the job.",
        "A volume's claim, or a URL.",
    ),
    (
        "no-gang",
        "Without a queue nodes are placed one by one, and two jobs may each hold half of what they need, for ever.",
        "`queue` in the job or in the profile.",
        "Name a LocalQueue of Kueue's.",
    ),
    (
        "no-restart-budget",
        "`template: production` asks for a restart budget that somebody chose.",
        "`recovery.max_restarts` in the job.",
        "Write it.",
    ),
)
