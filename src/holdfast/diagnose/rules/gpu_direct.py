"""Rules for direct traffic between GPUs, and between GPUs and NICs: peer memory, DMA-BUF, P2P, IOMMU, ACS."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="dmabuf-refused",
        matches={
            r"ibv_reg_dmabuf_mr failed with error (?:\d+ )?(?:Operation|Protocol) not supported": "n1:8:9 [0] misc/ibvwrap.cc:250 NCCL WARN Call to ibv_reg_dmabuf_mr failed with error Operation not supported",
        },
        classes=(FailureClass.DRIVER, FailureClass.VERSION_MISMATCH, FailureClass.GDR_MISSING),
        message="the NIC's driver refuses GPU memory through DMA-BUF, which this NCCL tries first",
        remedy=(
            "NCCL_DMABUF_ENABLE=0 with nvidia_peermem loaded, or a newer OFED (5.4, rdma-core 34) and the open GPU kernel modules",
        ),
        needs=("peermem", "versions"),
        source="NCCL src/misc/ibvwrap.cc",
    ),
    Rule(
        code="gpu-memory-region",
        matches={
            r"Couldn't (?:register|allocate) (?:GPU )?MR\b": "rank 0: Couldn't register GPU MR",
            r"[Ff]ailed to create (?:mr|MR)\b": "failed to create mr",
        },
        classes=(FailureClass.GDR_MISSING, FailureClass.DRIVER, FailureClass.MEMLOCK),
        message="memory, mostly of a GPU, could not be registered with the NIC",
        remedy=(
            "modprobe nvidia_peermem, or --use_cuda_dmabuf; it must work without --use_cuda: else ulimit -l unlimited",
        ),
        needs=("peermem", "memlock"),
        source="perftest, gpu_direct_rdma_access",
    ),
    Rule(
        code="peermem",
        matches={
            r"could not insert '?nv(?:idia)?_peer_?mem": "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument",
            r"nv(?:idia)?_peer_?mem.{0,40}(?:Unknown symbol|disagrees|Invalid argument|not loaded|fail)": "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument",
            r"ibv_reg_(?:dmabuf_)?mr(?:_iova2?)? failed with error (?:\d+ )?(?:Bad address|Invalid argument)": "n1:8:9 [0] NCCL WARN Call to ibv_reg_mr failed with error Bad address",
            r"ibv_reg_mr(?:_iova2?)? failed with error (?:\d+ )?Operation not supported": "n1:8:9 [0] misc/ibvwrap.cc:120 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Operation not supported",
            r"ib_register_peer_memory_client": "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -2)",
        },
        classes=(FailureClass.DRIVER, FailureClass.GDR_MISSING),
        confidence=Confidence.LIKELY,
        message="GPU memory cannot be registered with the NIC: nvidia_peermem or DMA-BUF is broken",
        remedy=(
            "modprobe nvidia_peermem (reinstall the driver after OFED, or build it with MLNX_OFED)",
            "NCCL_NET_GDR_LEVEL=LOC runs without it",
        ),
        needs=("peermem",),
        source="NVIDIA driver, NCCL src/misc/ibvwrap.cc",
    ),
    Rule(
        code="p2p-disabled",
        matches={
            r"P2P is disabled between (?:NVLINK )?connected GPUs": "n1:8:9 [0] graph/paths.cc:402 NCCL WARN P2P is disabled between NVLINK connected GPUs 1 and 0. This should not be the case given their connectivity",
            r"Could not enable P2P between dev": "n1:8:9 [0] transport/p2p.cc:100 NCCL INFO Could not enable P2P between dev 0(=1000) and dev 1(=2000)",
            r"peer access is not supported between these two devices": "RuntimeError: CUDA error: peer access is not supported between these two devices",
            r"CANNOT Access Peer Device": "Device=0 CANNOT Access Peer Device=1",
        },
        classes=(FailureClass.ACS_IOMMU, FailureClass.GPU_XID),
        confidence=Confidence.LIKELY,
        message="GPUs that are connected cannot reach each other's memory",
        remedy=(
            "turn ACS off on the PCIe bridges, the IOMMU off or to passthrough (iommu=pt)",
            "nvidia-smi topo -p2p r; NCCL_P2P_DISABLE=1 runs without it",
        ),
        needs=("acs", "topology"),
        source="NCCL src/graph/paths.cc; 2.12 and later",
    ),
    Rule(
        code="iommu",
        matches={
            r"DMAR: .*fault": "DMAR: [DMA Read] Request device [17:00.0] fault addr 387fc000 [fault reason 06] PTE Read access is not set",
            r"IO_PAGE_FAULT": "AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0 domain=0x0042 address=0x3fff flags=0x0020]",
            r"IOMMU is enabled": "n1:8:9 [0] NCCL INFO IOMMU is enabled, peer-to-peer may hang",
            r"IOMMU mode: (?:translat|enabled)": "DMAR: IOMMU mode: translated",
            r"ACS (?:is )?enabled": "n1:8:9 [0] NCCL WARN ACS is enabled on the PCIe bridges between GPU and NIC",
            r"ACSCtl:\s+SrcValid\+": "ACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-",
            r"Missing .iommu=pt. from kernel": 'n1:8:9 [0] rccl/src/init.cc:121 NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
            r"iommu: Default domain type: Translated": "iommu: Default domain type: Translated",
            r"DMAR: IOMMU enabled": "DMAR: IOMMU enabled",
            r"AMD-Vi: .{0,40}(?:enabled|Enabled)": "AMD-Vi: Interrupt remapping enabled",
            r"[Aa]ccess [Cc]ontrol [Ss]ervices": "\tCapabilities: [2a0 v1] Access Control Services",
            r"\b(?:intel|amd)_iommu=on\b": "Kernel command line: BOOT_IMAGE=/vmlinuz root=/dev/sda1 intel_iommu=on",
            r"(?:VT-d|IOMMU|iommu).{0,60}(?:peer|P2P|p2p|GPUDirect|DMA.{0,10}fail)": "n1:8:9 [0] NCCL INFO IOMMU is enabled, peer-to-peer may hang",
            r"PCI-P2P.{0,40}(?:ACS|redirect)": "PCI-P2P transactions are redirected by ACS",
        },
        classes=(FailureClass.ACS_IOMMU,),
        confidence=Confidence.LIKELY,
        message="an IOMMU or ACS blocks direct traffic between devices",
        remedy=(
            "turn ACS off on the PCIe bridges (setpci), iommu=pt or off in BIOS (VT-d, AMD-Vi); in a VM ATS must be on",
        ),
        needs=("acs",),
        source="the kernel, lspci, NCCL",
    ),
    Rule(
        code="wrong-results",
        matches={
            r"Verification error @ element": "Verification error @ element 0: val = nan, ref = 0.000000",
            r"Out of bounds values : [1-9]\d* FAILED": "# Out of bounds values : 24 FAILED",
            r"Test FAILED.{0,40}wrong values": "n1: Test FAILED: 128 wrong values in all_reduce",
            r"(?:P2P|peer).{0,60}(?:data corruption|verification failed|validation failed)": "P2P copy between GPU0 and GPU1: data verification failed",
        },
        classes=(FailureClass.ACS_IOMMU, FailureClass.GPU_XID, FailureClass.DRIVER),
        message="nccl-tests got wrong values: something between the devices redirects or corrupts their writes",
        needs=("acs", "xid"),
        source="nccl-tests common.cu",
    ),
)
