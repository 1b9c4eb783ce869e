"""Rules for GPUs, their links and their driver: Xid, lost devices, Fabric Manager, IMEX, CUDA errors.

A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import NO_FAULT_PATTERN, Role, Rule

DRAIN = (
    "take the node out (kubectl cordon NODE; scontrol update nodename=NODE state=drain reason=xid), reset or reboot it"
)

_XID = r"\b[Xx][Ii][Dd]s?\b[^0-9(]{0,24}(?:\((?:PCI:)?[0-9a-fA-F:., ]{1,24}\)[ :]{0,3})?"
"""The prefix of the number; it excludes the digits of the GPU's address."""
_BEFORE_SXID = r"\bSX[Ii][Dd]\b[^0-9(]{0,24}(?:\(PCI:[^)]{0,24}\)[ :]{0,3})?"
_SXID = _BEFORE_SXID + r"(?P<sxid>\d{5})\b"

RULES: tuple[Rule, ...] = (
    Rule(
        code="xid-hardware",
        matches={
            _XID
            + r"(?P<xid>8|46|48|54|56|57|58|62|64|69|74|78|79|94|95|109|110|119|120|121|122|123|136|137|140|143|144|145|146|147|148"
            r"|149|150|151|154|155|156|157|158|160|161|167|168|169)\b": "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
        },
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.CERTAIN,
        message="the driver reported a failing GPU or link (Xid {xid})",
        remedy=("holdfast explain XID-{xid}", DRAIN),
        needs=("xid",),
        source="NVIDIA driver, https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Rule(
        code="xid-program",
        matches={
            _XID
            + r"(?P<xid>11|13|25|31|32|37|38|39|4[014]|80)\b": "NVRM: Xid (PCI:0000:07:00): 31, pid=7192, Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2e_00000000.",
        },
        classes=(FailureClass.GPU_XID, FailureClass.PROGRAM_ERROR),
        confidence=Confidence.LIKELY,
        message="the GPU stopped a program for an illegal operation (Xid {xid}): mostly the program's fault, sometimes "
        "the GPU's",
        remedy=(
            "holdfast explain XID-{xid}",
            "run under compute-sanitizer; if it stays with one GPU, take that GPU out of use",
        ),
        needs=("cuda-sync",),
        source="NVIDIA driver, https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Rule(
        code="xid-recorded",
        matches={
            _XID
            + r"(?P<xid>63|92|171|172)\b": "NVRM: Xid (PCI:0000:07:00): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
        },
        classes=(FailureClass.GPU_XID,),
        message="the driver recorded GPU memory errors that it could correct (Xid {xid})",
        remedy=("holdfast explain XID-{xid}",),
        needs=("xid", "all-ranks"),
        source="NVIDIA driver, https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Rule(
        code="xid-consequence",
        matches={
            _XID + r"(?P<xid>43|45)\b": "NVRM: Xid (PCI:0000:4f:00): 45, pid=8812, name=python, Ch 00000008",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.GPU_XID,),
        message="the driver cleaned up after a program that had ended (Xid {xid})",
        needs=("xid",),
        source="NVIDIA driver",
    ),
    Rule(
        code="sxid-fatal",
        matches={
            _SXID + r", Fatal": "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        },
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.CERTAIN,
        message="an NVSwitch reported a fatal error (SXid {sxid})",
        remedy=("holdfast explain SXID-{sxid}", DRAIN),
        source="NVIDIA NVSwitch driver",
        fallback=True,
    ),
    Rule(
        code="sxid-consequence",
        matches={
            _BEFORE_SXID
            + r"(?P<sxid>12028|19084)\b": "nvidia-nvswitch1: SXid (PCI:0000:c2:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.GPU_XID,),
        message="an NVSwitch received an error, or nothing more, from the GPU at one of its links (SXid {sxid})",
        needs=("xid",),
        source="NVIDIA NVSwitch driver",
    ),
    Rule(
        code="sxid",
        matches={
            _SXID: "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20009, Non-fatal, Link 04 RX Short Error Rate",
        },
        classes=(FailureClass.GPU_XID,),
        message="an NVSwitch reported an error from which it recovered (SXid {sxid})",
        remedy=("holdfast explain SXID-{sxid}",),
        needs=("xid", "fabric-manager"),
        source="NVIDIA NVSwitch driver",
        fallback=True,
    ),
    Rule(
        code="gpu-lost",
        matches={
            r"fallen off the bus": "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
            r"GPU(?: at \S+)? is lost": "Unable to determine the device handle for GPU 0000:1B:00.0: GPU is lost.  Reboot the system to recover this GPU",
            r"GPU crash dump has been created": "[Fri Apr  5 21:29:39 2024] NVRM: A GPU crash dump has been created. If possible, please run",
            r"GPU is on Board": "NVRM: GPU is on Board .",
            r"Unable to determine the device handle for GPU": "Unable to determine the device handle for GPU0000:3D:00.0: Unknown Error",
            r"Unable to determine the device handle for gpu": "Unable to determine the device handle for gpu 0000:1b:00.0: Unknown Error",
            r"nvmlDeviceGet\w+\([^)\n]{0,80}\) failed: GPU is lost": "n1:8:9 [0] misc/nvmlwrap.cc:190 NCCL WARN nvmlDeviceGetHandleByIndex(0) failed: GPU is lost",
            r"RmInitAdapter failed": "NVRM: GPU 0000:4f:00.0: RmInitAdapter failed! (0x62:0xffff:2351)",
            r"rm_init_adapter failed": "[   21.092238] NVRM: GPU 0000:01:00.0: rm_init_adapter failed, device minor number 0",
            r"amdgpu.{0,60}(?:reset failed|GPU reset begin|hardware queue from MES)": "[ 812.100000] amdgpu 0000:43:00.0: amdgpu: GPU mode1 reset failed",
            r"VRAM is lost due to GPU reset": "amdgpu 0000:1b:00.0: amdgpu: VRAM is lost due to GPU reset!",
            r"HW Exception by GPU node": "HW Exception by GPU node-2 (Agent handle: 0x55) reason :GPU Hang",
        },
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.CERTAIN,
        message="the driver has lost a GPU: it is off the bus, or does not start",
        remedy=(DRAIN,),
        needs=("xid",),
        source="NVIDIA driver, nvidia-smi, amdgpu",
    ),
    Rule(
        code="gpu-reset-required",
        matches={
            r"GPU requires reset": "GPU 5 is in an error state: GPU requires reset",
            r"GPU recovery action changed from .{0,40} to 0x[1-9]": "NVRM: GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            r"krcWatchdog": "NVRM: krcWatchdog_IMPL: RC watchdog: GPU is probably locked!",
        },
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.CERTAIN,
        message="a GPU does not work until it is reset, or its node rebooted",
        remedy=(DRAIN,),
        needs=("xid",),
        source="NVIDIA driver, nvidia-smi",
    ),
    Rule(
        code="gpu-unhealthy",
        matches={
            r"(?:device|GPU|gpu)\S*.{0,40}(?:marked|is|are|as) (?:unhealthy|not healthy)": "'nvidia.com/gpu' device marked unhealthy: GPU-8c1e2b52-0000-0000-0000-000000000000",
            r"(?:dcgm|DCGM|nvvs).{0,40}(?:[Hh]ealth|[Dd]iag).{0,80}(?:[Ff]ail|FAIL|[Ee]rror).{0,60}(?:GPU|NVLink|PCIe)": "dcgm-health: Error: NVLink errors found on GPU 3",
            r"[Uu]nhealthy (?:GPU|gpu)": "node-problem-detector: unhealthy GPU 3 on n1",
            r"NVLink: Unable to train link": "NVRM: nvidia-nvlink: NVLink: Unable to train links on GPU 0",
            r"DCGM_FR_(?:\w{0,20}PAGE_RETIREMENTS|RETIRED_PAGES|VOLATILE_DBE|UNCORRECTABLE|\w{0,9}ROW_REMAP|FAULTY_MEMORY|NVLINK_DOWN|NVSWITCH_FATAL|XID_ERROR|FALLEN_OFF_BUS)": "health check: DCGM_FR_ROW_REMAP_FAILURE on GPU 3",
        },
        exclude=NO_FAULT_PATTERN
        + r"|(?i:[Ff]ailed to (?:start|connect|watch|init|run|get|load))|if (?:the |a )?(?:GPU|device) is",
        classes=(FailureClass.GPU_XID, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="a GPU failed a health check",
        remedy=(DRAIN,),
        needs=("xid",),
        source="nvidia-device-plugin, DCGM",
    ),
    Rule(
        code="pcie-error",
        matches={
            r"pciehp: Slot\(\S{1,20}\): Link Down": "pcieport 0000:17:01.0: pciehp: Slot(17): Link Down",
            r"DPC: containment event": "pcieport 0000:17:01.0: DPC: containment event, status:0x1f01 source:0x0000",
            r"PCIe Bus Error: severity=Uncorrect": "nvidia 0000:17:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
            r"AER: Uncorrect(?:ed|able) \(Fatal\)": "pcieport 0000:16:01.0: AER: Uncorrectable (Fatal) error message received from 0000:17:00.0",
        },
        classes=(FailureClass.GPU_XID, FailureClass.NETWORK_LOSS, FailureClass.STORAGE),
        message="a PCIe device of the node failed; the line gives its address",
        remedy=("lspci -s ADDRESS names the device: a GPU, a NIC or a disk",),
        needs=("xid", "link-counters"),
        source="the kernel, AER",
    ),
    Rule(
        code="gsp-timeout",
        matches={
            r"[Tt]imeout (?:after \d+s of )?waiting for RPC (?:response )?from (?:GPU\d* )?GSP": "NVRM: _kgspRpcRecvPoll: Timeout after 6s of waiting for RPC response from GPU3 GSP! Expected function 76",
        },
        classes=(FailureClass.GPU_XID, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="the system processor of a GPU no longer answers the driver",
        remedy=(
            DRAIN,
            "a later driver fixes several such faults; NVreg_EnableGpuFirmware=0 disables that processor where the "
            "GPU allows it",
        ),
        needs=("xid", "versions"),
        source="NVIDIA driver, Xid 119 and 120",
    ),
    Rule(
        code="gpu-error-contained",
        matches={
            r"Invalid access of peer GPU memory over nvlink": "torch.AcceleratorError: CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            r"CUDA_ERROR_CONTAINED": "E0000 CUDA_ERROR_CONTAINED in cuMemFreeAsync",
            r"cudaErrorContained": "Search for `cudaErrorContained' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.",
        },
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.LIKELY,
        message="a GPU reported a contained fault: of NVLink, or of another GPU's memory",
        remedy=(DRAIN,),
        needs=("xid",),
        source="CUDA 12.8 and later",
    ),
    Rule(
        code="gpu-ecc",
        matches={
            r"uncorrectable (?:ECC|NVLink) error": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            r"CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE)": "Accelerator Fatal Error: call to cuCtxCreate returned error 214 (CUDA_ERROR_ECC_UNCORRECTABLE): uncorrectable ECC error encountered",
            r"hardware stack error": "RuntimeError: CUDA error: hardware stack error",
            r"[Dd]ouble[- ][Bb]it ECC": "        Double Bit ECC              : 2",
            r"DBE.{0,40}detected": "kernel: NVRM: Xid (PCI:0000:65:00): 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error (DBE) has been detected on GPU",
            r"Contained memory error": "NVRM: Xid (PCI:0000:1b:00): 94, pid=811, Contained memory error",
            r"[Uu]ncontained (?:ECC|memory) error": "RuntimeError: CUDA error: uncontained memory error",
            r"NVLink.{0,60}(?:fatal|CRC|replay|recovery) error": "[Fri Jun  6 10:00:00 2025] NVRM: Xid (PCI:0000:cd:00): 74, pid=3212, NVLink: fatal error detected on link 5",
            r"NVSwitch.{0,60}[^-][Ff]atal": "[Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 33",
            r"[Pp]ending (?:page blacklist|remapp)\w*\s*: Yes": "        Pending page blacklist      : Yes",
            r"row remap(?:ping|per) fail": "NVRM: Xid (PCI:0000:1b:00): 64, row remapper failure",
            r"NVLink.{0,40}(?:fatal|link is down)": "[Fri Jun  6 10:00:00 2025] NVRM: Xid (PCI:0000:cd:00): 74, pid=3212, NVLink: fatal error detected on link 5",
        },
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.GPU_XID,),
        confidence=Confidence.CERTAIN,
        message="a GPU's memory or NVLink failed beyond correction",
        remedy=(DRAIN,),
        needs=("xid",),
        source="CUDA",
    ),
    Rule(
        code="cuda-launch-failure",
        matches={
            r"unspecified launch failure": "RuntimeError: CUDA error: unspecified launch failure",
            r"illegal memory access was encountered": "RuntimeError: CUDA error: an illegal memory access was encountered",
            r"misaligned address": "RuntimeError: CUDA error: misaligned address",
            r"an illegal instruction was encountered": "torch.AcceleratorError: CUDA error: an illegal instruction was encountered",
            r"the launch timed out and was terminated": "RuntimeError: CUDA error: the launch timed out and was terminated",
            r"invalid program counter": "RuntimeError: CUDA error: invalid program counter",
            r"CUDA_ERROR_LAUNCH_FAILED": "INTERNAL: Failed to complete all kernels launched on stream 0x61d9d17f4410: CUDA error: Could not synchronize CUDA stream: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
            r"CUDA_ERROR_ILLEGAL_ADDRESS": "CUDA_ERROR_ILLEGAL_ADDRESS",
        },
        classes=(FailureClass.PROGRAM_ERROR, FailureClass.GPU_XID, FailureClass.OTHER),
        also_possible=(FailureClass.NAN_DATA, FailureClass.OOM_GPU, FailureClass.VERSION_MISMATCH, FailureClass.DRIVER),
        message="a CUDA kernel failed; the line does not show which, nor whether program or GPU is at fault",
        remedy=(
            "CUDA_LAUNCH_BLOCKING=1 shows which kernel; if it stays with one GPU whatever the program, replace it",
        ),
        needs=("cuda-sync", "xid"),
        source="CUDA",
    ),
    Rule(
        code="cuda-error",
        matches={
            r"CUDA error: ": "RuntimeError: CUDA error: unknown error",
            r"THCudaCheck FAIL": "THCudaCheck FAIL file=/pytorch/torch/csrc/cuda/Module.cpp line=33 error=10 : invalid device ordinal",
            r"cuda runtime error \(\d+\)": "RuntimeError: cuda runtime error (10) : invalid device ordinal at /pytorch/torch/csrc/cuda/Module.cpp:33",
            r"CUBLAS_STATUS_(?:EXECUTION_FAILED|NOT_INITIALIZED|INTERNAL_ERROR)": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
            r"CUDNN_STATUS_\w+": "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
            r"\bC(?:uda|UDA) failure (?:\d{1,3} |\S{1,60} )?'": "n1:8:9 [1] enqueue.cc:98 NCCL WARN Cuda failure 'initialization error'",
        },
        classes=(
            FailureClass.DRIVER,
            FailureClass.GPU_XID,
            FailureClass.OOM_GPU,
            FailureClass.PROGRAM_ERROR,
            FailureClass.NAN_DATA,
            FailureClass.VERSION_MISMATCH,
        ),
        also_possible=(
            FailureClass.RANK_COUNT,
            FailureClass.ACS_IOMMU,
        ),
        message="a CUDA call failed",
        remedy=("CUDA_LAUNCH_BLOCKING=1 shows which; `dmesg -T | grep Xid` on that node",),
        needs=("cuda-sync", "xid", "versions"),
        source="CUDA",
        fallback=True,
    ),
    Rule(
        code="fabric-manager",
        matches={
            r"system not yet initialized": "n1: Test CUDA failure common.cu:1012 'system not yet initialized'",
            r"CUDA_ERROR_SYSTEM_NOT_READY": "CUDA_ERROR_SYSTEM_NOT_READY",
            r"cudaErrorSystemNotReady": "torch.AcceleratorError: CUDA error: cudaErrorSystemNotReady",
            r"[Ff]abric ?[Mm]anager.{0,60}(?:not running|fail|Failed|don't (?:match|have)|mismatch)": "fabric manager NVIDIA GPU driver interface version 535.104.05 don't match with driver version 535.129.03",
            r"failed to configure all the available GPUs or NVSwitches": "nv-fabricmanager: failed to configure all the available GPUs or NVSwitches",
            r"query NVSwitch device information.{0,60}failed": "11月 15 14:15:47 leon-NF5468M6 nv-fabricmanager[4177]: request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]",
            r"nvidia-fabricmanager.{0,40}(?:[Ff]ailed|inactive|dead)": "nvidia-fabricmanager.service: Failed with result 'exit-code'.",
        },
        classes=(FailureClass.DRIVER,),
        confidence=Confidence.CERTAIN,
        message="the GPUs wait for Fabric Manager, which is not running or does not match the driver",
        remedy=(
            "systemctl enable --now nvidia-fabricmanager, of exactly the driver's version; then reset the GPUs or "
            "reboot",
        ),
        needs=("fabric-manager",),
        source="CUDA error 802",
    ),
    Rule(
        code="nvls-bind",
        matches={
            r"Failed to bind NVLink SHARP": "n1:8:9 [0] transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'",
            r"nvls\.cc:\d+ .*NCCL WARN (?:Cuda|CUDA) failure": "n1:8:9 [1] transport/nvls.cc:169 NCCL WARN Cuda failure 802 'system not yet initialized'",
            r"cuMulticast\w+.*[Ff]ail": "n1:8:9 [1] NCCL WARN cuMulticastCreate failed: Cuda failure 1 'invalid argument'",
            r"NVLS.{0,60}CUDA error \d+": "n1:8:9 [0] transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'",
        },
        classes=(FailureClass.DRIVER,),
        confidence=Confidence.LIKELY,
        message="NVLink SHARP (NVLS) memory could not be bound: Fabric Manager or IMEX is not ready",
        remedy=(
            "systemctl restart nvidia-fabricmanager (nvidia-imex on NVLink domains), then reset the GPUs or reboot",
            "NCCL_NVLS_ENABLE=0 runs without it",
        ),
        needs=("fabric-manager",),
        source="NCCL src/transport/nvls.cc; 2.17 and later",
    ),
    Rule(
        code="imex",
        matches={
            r"IMEX.{0,80}(?:not |fail|unavailable|missing|check)": "n1:8:9 [0] NCCL WARN MNNVL: IMEX channel is not available, please check the IMEX service is running",
            r"MNNVL .{0,60}is available but not (?:supported|working)": "n1:8:9 [0] mnnvl.cc:123 NCCL WARN MNNVL (cliqueSize 3) is available but not supported on this system. Check the IMEX configuration.",
            r"nvidia-imex.{0,60}(?:not running|[Ff]ail|INVALID)": "n1:8:9 [0] NCCL WARN Cuda failure 800 'operation not permitted' cuMemCreate fabric handle, nvidia-imex not running",
            r"Connection establishment to node \d+ .{0,60}failed": "[ERROR] Connection establishment to node 3 with ip address 10.0.0.3 failed",
            r"nvidia-caps-imex-channels": "failed to open /dev/nvidia-caps-imex-channels/channel0",
            r"cuMemImportFromShareableHandle.*[Ff]ail": "n1:8:9 [0] NCCL WARN Cuda failure: cuMemImportFromShareableHandle Failed",
            r"fabric handle.{0,40}(?:fail|not supported)": "cuMemExportToShareableHandle: fabric handle is not supported",
            r"cuMemCreate.{0,20}[Ff]ail.{0,20}not permitted": "cuMemCreate Failed: operation not permitted",
            r"not permitted.{0,30}cuMemCreate": "[CUDA_ERROR_NOT_PERMITTED] operation not permitted in expression cuMemCreate(&handle, size, &prop, 0)",
        },
        classes=(FailureClass.DRIVER,),
        confidence=Confidence.LIKELY,
        message="memory cannot be shared over the NVLink domain: IMEX is not ready",
        remedy=(
            "systemctl status nvidia-imex on every node of the domain; give the pod a ComputeDomain (channel device)",
            "NCCL_MNNVL_ENABLE=0 runs without it",
        ),
        needs=("fabric-manager",),
        source="NCCL src/mnnvl.cc; 2.21 and later",
    ),
    Rule(
        code="driver-version",
        matches={
            r"Driver/library version mismatch": "Failed to initialize NVML: Driver/library version mismatch",
            r"API mismatch: the client has the version": "NVRM: API mismatch: the client has the version 535.54.03, but",
        },
        classes=(FailureClass.DRIVER,),
        confidence=Confidence.LIKELY,
        message="the GPU driver's library and its kernel module have different versions",
        remedy=("after a driver update: reboot, or unload and load the nvidia modules; restart the container",),
        needs=("versions",),
        source="CUDA, NVML",
    ),
    Rule(
        code="driver-too-old",
        matches={
            r"CUDA driver version is insufficient": "n1:8:9 [0] NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
            r"CUDA Driver version found is \d+\. Minimum": "n1:8:9 [0] misc/cudawrap.cc:90 NCCL WARN CUDA Driver version found is 11030. Minimum requirement is 11050",
            r"API call is not supported in the installed CUDA driver": "RuntimeError: CUDA error: API call is not supported in the installed CUDA driver",
            r"requires CUDA driver \d+\.\d+ or later": "n1:8:9 [0] enqueue.cc:123 NCCL WARN One-sided RMA requires CUDA driver 12.5 or later (found 3.3).",
            r"CUDA driver is a stub library": "misc/strongstream.cc:60 NCCL WARN Cuda failure 'CUDA driver is a stub library'",
            r"container was built for NVIDIA Driver Release": "ERROR: This container was built for NVIDIA Driver Release 550.54 or later, but version 470.57 was detected",
            r"unsatisfied condition: (?:cuda|driver|brand)": "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update your driver",
            r"NVIDIA driver on your system is too old": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
            r"unsupported display driver / cuda driver": "n1:8:9 [0] init.cc:1 NCCL WARN Cuda failure 803 'system has unsupported display driver / cuda driver combination'",
            r"forward compatibility was attempted on non supported HW": "Error 804: forward compatibility was attempted on non supported HW",
            r"provided PTX was compiled with an unsupported toolchain": "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        },
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="the node's GPU driver is too old for the CUDA in the image",
        remedy=("update the driver, or use an image with an older CUDA",),
        needs=("versions",),
        source="CUDA",
    ),
    Rule(
        code="no-gpu",
        matches={
            r"No CUDA GPUs are available": "RuntimeError: No CUDA GPUs are available",
            r"^No devices were found": "No devices were found",
            r"nvidia-smi: No devices": "nvidia-smi: No devices were found",
            r"couldn't communicate with the NVIDIA driver": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            r"no CUDA-capable device is detected": "RuntimeError: CUDA error: no CUDA-capable device is detected",
            r"Failed to initialize NVML: (?:Unknown Error|Insufficient Permissions)": "Failed to initialize NVML: Unknown Error",
            r"ProcessGroupNCCL is only supported with GPUs, no GPUs found": "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        },
        classes=(FailureClass.DRIVER, FailureClass.NOT_STARTED),
        confidence=Confidence.LIKELY,
        message="the process sees no GPU",
        remedy=(
            "Kubernetes: resources.limits nvidia.com/gpu, runtimeClassName nvidia; docker --gpus all; nvidia-smi on the host",
            "on a machine without one: let the program use what exists (torch.accelerator.current_accelerator())",
            "`Failed to initialize NVML` after a while: systemd removed the device cgroup (systemctl "
            "daemon-reload); use cgroupfs or CDI",
        ),
        needs=("versions",),
        source="torch, CUDA, NVML",
    ),
    Rule(
        code="no-nvidia-driver",
        matches={
            r"Found no NVIDIA driver": "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        },
        classes=(FailureClass.NOT_STARTED, FailureClass.PROGRAM_ERROR, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="the program requires an NVIDIA GPU, and its machine has none, or its container was given none",
        remedy=(
            "on a machine without GPUs: let the program use what exists (torch.accelerator.current_accelerator()), "
            "or request nodes with GPUs",
            "on a machine with GPUs: Kubernetes: resources.limits nvidia.com/gpu, runtimeClassName nvidia; docker "
            "--gpus all; nvidia-smi on the host",
        ),
        needs=("gpus-seen",),
        source="torch",
    ),
)
