"""Manifests without a mistake, one per kind, and how tests change them."""

from __future__ import annotations

import copy
from typing import Any

import yaml

PODS = """
metadata:
  labels: {app: llama}
  annotations: {kueue.x-k8s.io/podset-required-topology: example.com/block}
spec:
  restartPolicy: Never
  containers:
  - name: pytorch
    image: example.com/llama:1.4
    command: [torchrun, --nnodes=2, --nproc_per_node=8, train.py]
    env:
    - {name: NCCL_NET, value: IB}
    resources:
      limits: {nvidia.com/gpu: 8, rdma/ib: 1, memory: 900Gi}
    securityContext: {capabilities: {add: [IPC_LOCK]}}
    volumeMounts:
    - {name: shm, mountPath: /dev/shm}
    - {name: data, mountPath: /data}
  volumes:
  - {name: shm, emptyDir: {medium: Memory}}
  - {name: data, persistentVolumeClaim: {claimName: data}}
"""

WORKLOADS = {
    "PyTorchJob": """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec:
  runPolicy: {backoffLimit: 10}
  pytorchReplicaSpecs:
    Worker: {replicas: 2, restartPolicy: OnFailure, template: PODS}
""",
    "MPIJob": """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec:
  slotsPerWorker: 8
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      template:
        spec:
          containers:
          - name: launcher
            image: example.com/llama:1.4
            command: [mpirun, -np, "16", -x, NCCL_NET, python, train.py]
            env:
            - {name: NCCL_NET, value: IB}
    Worker: {replicas: 2, template: PODS}
""",
    "JobSet": """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec:
  failurePolicy: {maxRestarts: 10}
  replicatedJobs:
  - name: node
    replicas: 1
    template:
      spec: {parallelism: 2, completions: 2, backoffLimit: 0, template: PODS}
""",
    "Volcano": """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: llama}
spec:
  minAvailable: 2
  schedulerName: volcano
  networkTopology: {mode: hard, highestTierAllowed: 1}
  policies:
  - {event: PodFailed, action: RestartJob}
  tasks:
  - {name: worker, replicas: 2, template: PODS}
""",
    "Job": """
apiVersion: batch/v1
kind: Job
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec: {completionMode: Indexed, completions: 2, parallelism: 2, template: PODS}
""",
    "StatefulSet": """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec:
  replicas: 2
  serviceName: llama
  podManagementPolicy: Parallel
  selector: {matchLabels: {app: llama}}
  template: PODS
""",
    "TrainJob": """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llama, labels: {kueue.x-k8s.io/queue-name: train}}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    numNodes: 2
    image: example.com/llama:1.4
    command: [torchrun, train.py]
    env:
    - {name: NCCL_NET, value: IB}
    resourcesPerNode:
      limits: {nvidia.com/gpu: 8, rdma/ib: 1}
""",
    "TrainingRuntime": """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: torch}
spec:
  mlPolicy: {numNodes: 2, torch: {}}
  template:
    spec:
      failurePolicy: {maxRestarts: 10}
      replicatedJobs:
      - name: node
        template:
          spec: {backoffLimit: 0, template: PODS}
""",
}

GONE = object()
"""Removes the field."""


def manifest(kind: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The manifest of a kind with some fields changed; paths have dots, `POD` is the first template with GPUs."""
    data = yaml.safe_load(WORKLOADS[kind])
    pods: list[dict[str, Any]] = []
    fill(data, pods)
    if kind == "MPIJob":  # its workers run sshd
        container = pods[0]["spec"]["containers"][0]
        container["command"] = ["/usr/sbin/sshd", "-De"]
        container["env"] = []
    for path, value in (changes or {}).items():
        *parents, last = path.replace("POD.", "").split(".")
        here: Any = pods[0]["spec"] if path.startswith("POD.") else data
        for key in parents:
            here = here[int(key)] if isinstance(here, list) else here.setdefault(key, {})
        if isinstance(here, list):
            here[int(last)] = value
        elif value is GONE:
            del here[last]
        else:
            here[last.replace("~", ".")] = value
    return data


def fill(node: Any, pods: list[dict[str, Any]]) -> None:
    """Put a pod template in place of each `PODS`."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if value == "PODS":
            node[key] = copy.deepcopy(yaml.safe_load(PODS))
            pods.append(node[key])
        elif isinstance(value, dict | list):
            fill(value, pods)
