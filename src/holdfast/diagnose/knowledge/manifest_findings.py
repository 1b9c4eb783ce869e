"""Explains the findings in Kubernetes manifests that others wrote."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "not-a-job-file",
        "An option that changes fields of a job file was given for a Kubernetes manifest.",
        "The file has `apiVersion` and `kind`.",
        "`holdfast init --from MANIFEST` converts it to a job file.",
    ),
    (
        "manifest-not-checked",
        "An object of the manifest is of a kind that holdfast does not check, or shows no sign of training.",
        "`kind` and `apiVersion` in the line of the finding.",
        "Nothing, if it is no training job. holdfast checks PyTorchJob, MPIJob, TrainJob and its runtimes, JobSet, "
        "Volcano's Job, Job and StatefulSet.",
    ),
    (
        "manifest-shm-default",
        "A container has 64 MiB of /dev/shm unless a volume is mounted there. NCCL needs it between GPUs of a pod, "
        "and data workers pass batches through it.",
        "`df -h /dev/shm` in the container.",
        "Mount an emptyDir with `medium: Memory` at /dev/shm. Its files count as memory of the pod.",
    ),
    (
        "manifest-shm-on-disk",
        "An emptyDir without `medium: Memory` is a folder on the machine's disk, also at /dev/shm.",
        "`df -T /dev/shm` in the container shows a type other than tmpfs.",
        "Write `medium: Memory`.",
    ),
    (
        "manifest-socket-interface",
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names an interface that the pod lacks. A pod has lo, eth0, "
        "and what Multus or GKE attaches; names such as ib0 and ens5 are its machine's.",
        "`ip link` in the pod; NCCL's `Bootstrap : no socket interface found`.",
        "Write eth0, or leave it out: NCCL then skips lo itself.",
    ),
    (
        "manifest-no-checkpoint",
        "No volume that outlives the pods is mounted, and no command or variable names a store. A hostPath is on one "
        "machine, and a replaced pod may start on another.",
        "`volumes` and `volumeMounts` in the manifest.",
        "Mount a ReadWriteMany claim, or save to a store such as s3://.",
    ),
    (
        "manifest-tcp-fallback",
        "NCCL uses TCP if it cannot use the RDMA device, and logs that in one line. Training then takes several times "
        "longer.",
        "NCCL_DEBUG=INFO, and `NET/Socket` in its lines; `holdfast diagnose` reads them.",
        "Set NCCL_NET to the only network that NCCL may use: IB, AWS Libfabric or gIB.",
    ),
    (
        "manifest-tcp-only",
        "Several pods with GPUs request no RDMA device, so their collectives use TCP.",
        "`kubectl describe node` lists the devices that machines offer, such as rdma/ib or vpc.amazonaws.com/efa.",
        "Request the device; where there is none, NCCL_NET=Socket shows that TCP is meant.",
    ),
    (
        "manifest-no-topology",
        "Without a constraint the scheduler may put pods into different racks, blocks or zones.",
        "`kubectl get nodes --show-labels` shows the labels that tell racks or blocks apart.",
        "With Kueue, the annotation kueue.x-k8s.io/podset-required-topology; with Volcano, `networkTopology`; else a "
        "pod affinity with that label as its topologyKey.",
    ),
    (
        "manifest-restart-budget",
        "The object is never restarted after a failure, or without a limit.",
        "`backoffLimit` or `maxRestarts` in the manifest.",
        "Write a limit, such as 10.",
    ),
    (
        "manifest-mpi-environment",
        "Open MPI starts ranks by ssh, and sshd gives them a new environment: variables of the launcher's and of the "
        "worker's container are missing there.",
        "`mpirun ... env` prints what the ranks have.",
        "Write `mpirun -x NAME` for each variable. The prefixes OMPI_ and PMIX_ are for mpirun itself.",
    ),
    (
        "manifest-rdma-rights",
        "RDMA locks memory, which needs IPC_LOCK or a container runtime without a limit. Devices below /dev/infiniband "
        "that no device plugin gave to a container can be opened only if it is privileged.",
        "`ulimit -l` in the container; `ibv_devinfo` lists the devices that it can open.",
        "Add the capability IPC_LOCK, and request the device plugin's resource instead of mounting the folder.",
    ),
    (
        "manifest-rdma-disabled",
        "A variable turns off the fabric for which the pods request devices.",
        "The line of the finding.",
        "Remove the variable, or do not request the devices, so that others can use them.",
    ),
    (
        "manifest-no-gang",
        "Pods are placed one by one, or the gang is smaller than the job. Pods that are placed hold their GPUs while "
        "they wait for the rest.",
        "`kubectl get pods`: some run and others are pending.",
        "Use a Kueue queue, or a gang scheduler with all pods as its minimum.",
    ),
    (
        "manifest-lone-restart",
        "A JobSet restarts all of its Jobs when one fails. Before that, a Job replaces failed pods backoffLimit "
        "times, and the kubelet restarts containers with `restartPolicy: OnFailure`; their ranks cannot rejoin.",
        "`backoffLimit` and `restartPolicy` of the Job template.",
        "Write `backoffLimit: 0` and `restartPolicy: Never`, and `failurePolicy: {maxRestarts: 10}` in the JobSet.",
    ),
    (
        "manifest-never-ends",
        "A StatefulSet is for services: it restarts a container that has ended, also after success.",
        "`kubectl get pods` shows restarts after the last step.",
        "Use an indexed Job or a JobSet, or convert it with `holdfast init --from`.",
    ),
    (
        "manifest-ordered-start",
        "With `podManagementPolicy: OrderedReady`, the default, a pod is created when the one before it is ready.",
        "Pod 0 runs, and pod 1 does not exist.",
        "Write `podManagementPolicy: Parallel`.",
    ),
    (
        "manifest-rank-count",
        "The launcher's number of nodes or ranks differs from the manifest's: it waits for pods that never come, or "
        "starts more ranks than there are GPUs or slots.",
        "The numbers in the finding.",
        "Make them equal. Under training-operator and Trainer torchrun needs neither option: both set PET_* variables.",
    ),
    (
        "manifest-env-not-text",
        "A variable's name or value is a number or a boolean. To kubectl the words y, n, yes, no, on and off are "
        "booleans too.",
        "`kubectl apply --dry-run=server` answers `cannot unmarshal number into Go struct field EnvVar`.",
        "Put it in quotes.",
    ),
    (
        "manifest-request-without-limit",
        "Devices and huge pages cannot be shared beyond their number, so their request must equal their limit.",
        "`kubectl apply --dry-run=server` answers `limit must be set for non overcommitable resources`.",
        "Write the amount under `limits` only; the request defaults to it.",
    ),
    (
        "manifest-container-name",
        "Training-operator looks for the container named pytorch, and sets its variables.",
        "`kubectl apply --dry-run=server`, or the operator's log.",
        "Name the container with the ranks pytorch.",
    ),
    (
        "manifest-reserved-variable",
        "The manifest sets a variable of the rendezvous, which the operator sets for each pod.",
        "`kubectl get pod POD -o yaml` shows both values; the last one counts.",
        "Remove it from the manifest.",
    ),
    (
        "manifest-host-network-dns",
        "A pod on the host network uses its machine's resolver, which knows no Services and pods.",
        "`getent hosts $MASTER_ADDR` in the pod.",
        "Write `dnsPolicy: ClusterFirstWithHostNet`.",
    ),
)
