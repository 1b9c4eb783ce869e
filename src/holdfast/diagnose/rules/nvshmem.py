"""Rules for NVSHMEM and libraries built on it (DeepEP): GPUs that start RDMA themselves."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="nvshmem-peermem",
        matches={
            r"neither nv_peer_mem": "/src/modules/transport/ibgda/ibgda.cpp:nvshmemt_init:3626: neither nv_peer_mem, or nvidia_peermem detected. Skipping transport.",
        },
        classes=(FailureClass.DRIVER, FailureClass.GDR_MISSING),
        confidence=Confidence.LIKELY,
        message="NVSHMEM finds neither nv_peer_mem nor nvidia_peermem, so the NIC cannot reach GPU memory",
        remedy=("modprobe nvidia_peermem on every node, after OFED; lsmod | grep peermem",),
        needs=("peermem",),
        source="NVSHMEM src/modules/transport",
    ),
    Rule(
        code="nvshmem-no-transport",
        matches={
            r"init failed for transport: ": "/src/host/transport/transport.cpp:nvshmemi_transport_init:275: init failed for transport: IBGDA",
            r"Unable to initialize any transports": "/src/host/transport/transport.cpp:nvshmemi_transport_init:287: Unable to initialize any transports. returning error.",
            r"is not enumerated as an mlx5 device": "WARN: device bnxt_re0 is not enumerated as an mlx5 device. Skipping...",
            r"nvshmem detect topo failed": "/src/host/init/init.cu:995: non-zero status: 7 nvshmem detect topo failed",
        },
        classes=(
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.DRIVER,
            FailureClass.NETWORK_LOSS,
            FailureClass.VERSION_MISMATCH,
        ),
        message="NVSHMEM found no path to the other GPUs: IBGDA needs mlx5 devices, peer memory, and a driver that lets "
        "GPUs ring the NIC's doorbell",
        remedy=(
            "/dev/infiniband in the container; lsmod | grep peermem; the driver's options NVreg_EnableStreamMemOPs=1 and PeerMappingOverride=1",
            "NVSHMEM_DEBUG=INFO shows which device it skipped; NVSHMEM_HCA_LIST names those to use",
        ),
        needs=("rdma-on-node", "peermem", "versions"),
        source="NVSHMEM src/host/transport",
    ),
    Rule(
        code="nvshmem-init-failed",
        matches={
            r"nvshmem initialization failed": "/src/host/init/init.cu:nvshmemi_check_state_and_init:1080: nvshmem initialization failed, exiting",
            r"NVSHMEM API called before": "NVSHMEM API called before NVSHMEM initialization has completed",
            r"building transport map failed": "/src/host/init/init.cu:998: non-zero status: 7 building transport map failed",
            r"error in nvshmemi_init": "src/init/init.cpp:792: non-zero status: 7: Success, exiting... aborting due to error in nvshmemi_init_thread",
        },
        role=Role.SYMPTOM,
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.DRIVER,
            FailureClass.VERSION_MISMATCH,
        ),
        message="NVSHMEM did not start; an earlier line of a rank shows the failing step",
        needs=("rdma-on-node", "peermem", "all-ranks"),
        source="NVSHMEM src/host/init",
    ),
    Rule(
        code="deepep-timeout",
        matches={
            r"DeepEP (?:error: |\w+ ){0,4}timeout": "DeepEP timeout check failed: rank = 3, thread = 0, value = 1024",
        },
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.HANG_UNKNOWN,
            FailureClass.STRAGGLER,
            FailureClass.COLLECTIVE_MISMATCH,
        ),
        message="a DeepEP kernel waited for tokens of another rank that did not arrive",
        remedy=(
            "the same calls and sizes on all ranks; test_internode.py of DeepEP alone on the same nodes shows whether it is the network",
        ),
        needs=("all-ranks", "gid", "stacks"),
        source="DeepEP csrc/kernels",
    ),
)
