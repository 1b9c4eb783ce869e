"""Records of the kernel's log that report hardware, as drivers write them."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.agent.device_evidence import fault_of_line
from holdfast.events import DeviceFault
from holdfast.host.kernel_log import MAX_RECORDS, KernelLogTail
from holdfast.watch.kernel_faults import gpu_name, kernel_symptoms

# The line of the GPU is that of tests/diagnose; the others are those of drivers/edac, mm/memory-failure.c,
# arch/x86/kernel/cpu/mce and drivers/nvme/host/pci.c.
REPORTED = {
    "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.": (
        "gpu-failed",
        "GPU 0000:1b:00",
        DeviceFault.GPU,
    ),
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0": ("host-memory-failed", "", None),
    "Memory failure: 0x1f3a2b: Sending SIGBUS to python:1234 due to hardware memory corruption": (
        "host-memory-failed",
        "",
        None,
    ),
    "mce: [Hardware Error]: CPU 12: Machine Check: 0 Bank 7: be00000000800400": ("host-machine-check", "", None),
    "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff": ("host-disk-failed", "", None),
}
PASSED_OVER = (
    "NVRM: Xid (PCI:0000:07:00): 31, pid=7, name=python, Ch 00000010, intr 10000000. MMU Fault",
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "nvme nvme0: 16/0/0 default/read/poll queues",
    "Out of memory: Killed process 4242 (python)",
)


def test_records_of_failed_hardware_are_symptoms_with_their_line() -> None:
    found = {
        each.evidence()[0]: (each.code, each.device, each.fault) for each in kernel_symptoms(REPORTED, fault_of_line)
    }
    assert found == REPORTED
    assert [*kernel_symptoms(PASSED_OVER, fault_of_line)] == []


def test_gpu_has_one_name_in_the_kernels_log_and_in_nvml() -> None:
    assert gpu_name("0000:1b:00") == gpu_name("00000000:1B:00.0") == "GPU 0000:1b:00"
    assert gpu_name("0001:1b:00") == "GPU 0001:1b:00"


def test_log_is_read_from_its_end_on_in_parts(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,1,3999999,-;earlier\n")
    tail = KernelLogTail(log)
    assert (tail.read(), tail.descriptor()) == ((), None)
    with log.open("a") as file:
        file.write("4,2,4000000,-;one\n SUBSYSTEM=pci\n")
    assert tail.read() == ("one",)
    tail.close()


def test_flood_of_records_is_read_in_parts_too(tmp_path: Path) -> None:
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    tail = KernelLogTail(fifo)
    assert tail.descriptor() is not None
    with fifo.open("wb", buffering=0) as kernel:
        kernel.write(b"4,2,4000000,-;one\n")
        assert tail.read() == ("one",)
    tail.close()
    assert MAX_RECORDS < 1000
