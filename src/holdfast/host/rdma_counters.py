"""Reads the counters of a node's RDMA ports from sysfs, and pauses of their interfaces from `ethtool -S`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

DEVICES = "sys/class/infiniband"
WORD_BYTES = 4
"""port_xmit_data and port_rcv_data count words: InfiniBand specification, PortCountersExtended."""
SENT, RECEIVED = "port_xmit_data", "port_rcv_data"
EFA_SENT, EFA_RECEIVED = "tx_bytes", "rx_bytes"
COUNTERS = (
    SENT,
    RECEIVED,
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "port_xmit_wait",
)
HW_COUNTERS = (
    EFA_SENT,
    EFA_RECEIVED,
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    "roce_slow_restart",
    "retrans_pkts",
    "unresponsive_remote_events",
)
"""mlx5's, and EFA's: https://docs.kernel.org/networking/device_drivers/ethernet/mellanox/mlx5/counters.html."""
ETHTOOL_TIMEOUT_S = 2.0
MAX_DIGITS = 64

_PAUSE = re.compile(r"^\s*([rt]x_prio\d_pause): (\d+)$", re.MULTILINE)  # `     rx_prio3_pause: 12085`


class CounterReading(Struct, frozen=True, kw_only=True):
    """The counters of all ports at one time."""

    at_s: float
    """Monotonic seconds."""
    ports: Mapping[str, Mapping[str, int]]
    """By `device:port`, as in NCCL's log: name of a counter to its value, as far as the driver has it."""
    down: frozenset[str] = frozenset()
    """Ports that are not active any more, or gone."""


class RdmaCounterFiles:
    """The open counter files of the ports that were active; a reading of eight ports takes about a millisecond."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files: dict[str, dict[str, int]] = {}
        self._states: dict[str, Path] = {}
        self.kinds: dict[str, str] = {}
        """What ports with the same work have in common: rate and link layer."""
        self.interfaces: dict[str, str] = {}
        """Network interface of a port over Ethernet."""
        for port in sorted((root / DEVICES).glob("*/ports/*")):
            if "ACTIVE" in _text(port / "state"):
                self._add(port)

    def _add(self, port: Path) -> None:
        device = port.parents[1]
        files = {name: port / folder / name for folder, names in _FOLDERS.items() for name in names}
        opened: dict[str, int] = {}
        for name, path in files.items():
            try:
                opened[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
        if not opened:
            return
        place = f"{device.name}:{port.name}"
        self._files[place], self._states[place] = opened, port / "state"
        self.kinds[place] = f"{_text(port / 'rate')} {_text(port / 'link_layer')}"
        if _text(port / "link_layer") == "Ethernet" and (device / "device/net").is_dir():
            self.interfaces[place] = next((each.name for each in sorted((device / "device/net").iterdir())), "")

    def read(self, at_s: float) -> CounterReading:
        """All counters now; one that cannot be read is left out."""
        return CounterReading(
            at_s=at_s,
            ports={port: _values(files) for port, files in self._files.items()},
            down=frozenset(port for port, path in self._states.items() if "ACTIVE" not in _text(path)),
        )

    def descriptor(self) -> None:
        """Counters have to be polled."""

    def close(self) -> None:
        """Close the files."""
        for files in self._files.values():
            for descriptor in files.values():
                os.close(descriptor)
        self._files.clear()


_FOLDERS = {"counters": COUNTERS, "hw_counters": HW_COUNTERS}


def _values(files: Mapping[str, int]) -> dict[str, int]:
    values: dict[str, int] = {}
    for name, descriptor in files.items():
        try:
            text = os.pread(descriptor, MAX_DIGITS, 0).strip()
        except OSError:  # the device has gone
            continue
        if text.isdigit():  # else `N/A (no PMA)`
            values[name] = int(text)
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def pauses(interface: str) -> dict[str, int]:
    """How often priority flow control has paused an interface; empty if ethtool is missing or its driver has none."""
    try:
        done = subprocess.run(
            ("ethtool", "-S", interface), capture_output=True, text=True, timeout=ETHTOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_pauses(done.stdout)


def parse_pauses(statistics: str) -> dict[str, int]:
    """The counters of pauses in the output of `ethtool -S`."""
    return {name: int(value) for name, value in _PAUSE.findall(statistics)}
