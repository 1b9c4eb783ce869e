"""The kernel's log is read since a time, and where it cannot be read there is nothing in it."""

from __future__ import annotations

from pathlib import Path

from holdfast.host.kernel_log import kernel_records

XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


def test_records_since_a_time_are_read_without_their_properties(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        f"6,1,3999999,-;earlier\n4,2,4000000,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:1b:00.0\n6,3,5,c;x\n?\n"
    )
    assert kernel_records(4_000_000, log) == [XID]
    assert kernel_records(0, log) == ["earlier", XID, "x"]


def test_log_that_cannot_be_read_has_no_records(tmp_path: Path) -> None:
    assert kernel_records(0, tmp_path / "none") == []
    assert kernel_records(0, tmp_path) == []


def test_this_machines_own_log_is_read_without_failing() -> None:
    assert isinstance(kernel_records(0), list)
