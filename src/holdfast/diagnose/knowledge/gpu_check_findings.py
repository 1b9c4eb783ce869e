"""Explains the findings of the checks of a node's GPUs: the cause, how to confirm it, and what to do."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "gpu-driver-missing",
        "The job needs GPUs, and the node or container has no NVIDIA driver: neither nvidia-smi nor device files.",
        "`ls /dev/nvidia*` where the agent runs, then on the machine around it.",
        "Request GPUs for the container, or install the driver; or run the job on nodes with GPUs.",
    ),
    (
        "gpu-driver-fails",
        "nvidia-smi runs, and lists no GPU: the module is not loaded, its version differs from the libraries', or a "
        "GPU is lost.",
        "`nvidia-smi` prints the same line; `dmesg | grep NVRM` has the driver's reason.",
        "What the finding says for that line; a restart of the node loads module and libraries of one version.",
    ),
    (
        "gpu-driver-hangs",
        "nvidia-smi has not answered within 6 s. The driver or a GPU hangs (GSP errors, Xid 119), or persistence mode "
        "is off and every call initialises all GPUs.",
        "`time nvidia-smi` twice on the node.",
        "If it ends after some seconds: `nvidia-smi -pm 1`. If it does not: restart the node.",
    ),
    (
        "gpu-not-answering",
        "The driver lists a GPU that it has lost, or that needs a reset before it answers.",
        "`nvidia-smi -q -i N` prints `GPU is lost` or `GPU requires reset`; `dmesg | grep Xid`, often 79.",
        "Restart the node; if the GPU is lost again, have it replaced.",
    ),
    (
        "gpu-values-unreadable",
        "The driver gets errors instead of values from a GPU, such as of a fan, while the GPU works otherwise.",
        "`nvidia-smi -q -i N | grep -E 'ERR!|Unknown Error'`.",
        "Restart the node; if it returns, have the GPU checked.",
    ),
    (
        "gpu-recovery-required",
        "After an error that it could not correct, the driver requests a reset of the GPU or a restart of the node.",
        "`nvidia-smi -q -i N | grep 'Recovery Action'`; `dmesg | grep Xid`.",
        "`nvidia-smi --gpu-reset -i N` once no process uses the GPU, or restart the node.",
    ),
    (
        "gpu-inforom-corrupted",
        "A GPU's infoROM, which holds its configuration and its record of memory errors, cannot be read.",
        "`nvidia-smi` ends with `WARNING: infoROM is corrupted at gpu ...`.",
        "Restart the node; if it remains, have the GPU replaced.",
    ),
    (
        "gpus-missing",
        "The node has fewer GPUs than the job needs: one is lost, the container got fewer, or CUDA_VISIBLE_DEVICES "
        "hides some.",
        "`nvidia-smi -L` where the agent runs and on the machine; `lspci -d 10de:`; `dmesg | grep Xid`.",
        "Restart a node that lost a GPU; request as many as the job's `gpus_per_node`; unset CUDA_VISIBLE_DEVICES.",
    ),
    (
        "gpu-not-listed",
        "A device file of a GPU exists that nvidia-smi does not list. The job has enough without it.",
        "`nvidia-smi -L`; `dmesg | grep Xid` names a GPU that has fallen off the bus.",
        "Restart the node if the GPU is lost. If it is only kept from the container, nothing needs to be done.",
    ),
    (
        "gpu-ecc-uncorrectable",
        "Memory of a GPU has had errors that ECC could not correct since the driver was loaded.",
        "`nvidia-smi -q -d ECC -i N`; `dmesg | grep Xid`: 48, 63, 94 or 95.",
        "Reset the GPU, which activates repairs and clears the count. If errors return, have it replaced.",
    ),
    (
        "gpu-memory-repair-failed",
        "A row of a GPU's memory is broken and could not be replaced by a spare one.",
        "`nvidia-smi -q -d ROW_REMAPPER -i N` has `Remapping Failure Occurred: Yes`; `dmesg` has Xid 64.",
        "Have the GPU replaced.",
    ),
    (
        "gpu-memory-repair-pending",
        "A repair of a GPU's memory is prepared and takes effect at its next reset; until then the driver avoids the "
        "broken part.",
        "`nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT -i N`; `dmesg` has Xid 63.",
        "Reset the GPU or restart the node when it is free.",
    ),
    (
        "gpu-sram-errors",
        "The GPU's caches or registers have had more uncorrectable errors in its life than NVIDIA allows.",
        "`nvidia-smi -q -d ECC -i N | grep Threshold`.",
        "Run NVIDIA's field diagnostic, and have the GPU replaced if that fails.",
    ),
    (
        "gpu-ecc-off",
        "ECC is off on one GPU and on for others of its model: errors of its memory go unnoticed.",
        "`nvidia-smi --query-gpu=index,ecc.mode.current --format=csv`.",
        "`nvidia-smi -e 1 -i N`, then a reset of the GPU.",
    ),
    (
        "gpu-slowed-by-hardware",
        "Heat or a power supply makes the hardware halve a GPU's clocks or more; every rank waits for that GPU.",
        "`nvidia-smi -q -d PERFORMANCE -i N`: HW Thermal Slowdown or HW Power Brake Slowdown is active.",
        "Check cooling, fans and power supplies; run without the node until then.",
    ),
    (
        "gpu-slowdown",
        "A GPU's clocks are reduced before the job starts, because of its temperature or for a moment.",
        "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i N` some seconds apart.",
        "Nothing if it passes; otherwise check the cooling.",
    ),
    (
        "gpu-persistence-off",
        "Persistence mode is off: the driver initialises a GPU whenever the first process opens it, which takes "
        "seconds.",
        "`nvidia-smi --query-gpu=index,persistence_mode --format=csv`.",
        "Run nvidia-persistenced, or `nvidia-smi -pm 1` after each restart of the node.",
    ),
    (
        "gpu-limited-below-siblings",
        "Someone has lowered the clocks or the power limit of some GPUs of a node, and not of others of the model.",
        "`nvidia-smi -q -d CLOCK,POWER`.",
        "`nvidia-smi -rac`, `nvidia-smi -rgc`, and `nvidia-smi -pl` with the default power limit.",
    ),
    (
        "gpu-nvlink-inactive",
        "A GPU has fewer active NVLinks than others of its model: a link, a bridge or a switch failed.",
        "`nvidia-smi nvlink -s`; `dmesg | grep -iE 'nvlink|sxid'`; `nvidia-smi topo -m`.",
        "Reset all GPUs or restart the node; if the links stay inactive, the GPU, bridge or board needs service. Cards "
        "of which only some are joined by bridges are as they should be.",
    ),
    (
        "gpu-fabric-not-ready",
        "GPUs on NVSwitch work only once Fabric Manager has registered them; until then CUDA fails with error 802.",
        "`nvidia-smi -q | grep -A 2 Fabric` must print Completed and Success.",
        "Install nvidia-fabricmanager in exactly the driver's version, start it, reset the GPUs. In a virtual machine "
        "the host's Fabric Manager must activate the partition.",
    ),
    (
        "gpu-fabric-unhealthy",
        "The NVSwitch fabric works with less bandwidth, is recovering, or has lost routes.",
        "`nvidia-smi -q | grep -A 12 Fabric`; /var/log/fabricmanager.log; SXid lines of `dmesg`.",
        "Reset the GPUs or restart the node; on a rack, have its NVLink switches checked.",
    ),
    (
        "gpu-pcie-narrow",
        "A GPU's PCIe link has trained with fewer lanes than those of the same model: a bad contact, riser or retimer.",
        "`nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv`; `lspci -vv`.",
        "Reseat the GPU or its riser; restart the node.",
    ),
)
