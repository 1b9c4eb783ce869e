"""Metrics of a DCGM exporter, from a server that answers like one."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from holdfast.agent.device_evidence import fault_of_line
from holdfast.events import DeviceFault
from holdfast.watch.dcgm_exporter import open_exporter, parse_metrics
from holdfast.watch.gpu_readings import GpuReading, GpuState, gpu_symptoms
from holdfast.watch.monitor import SourceMissing

# The form of README.md of NVIDIA/dcgm-exporter; the fields are those of its etc/default-counters.csv.
LABELS = 'gpu="0",UUID="GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52",pci_bus_id="00000000:1B:00.0",Hostname="n1"'
METRICS = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1980
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 41
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 68.432000
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 93
DCGM_FI_DEV_MEMORY_TEMP{{{LABELS}}} 9223372036854775794
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{LABELS}}} 3
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 9223372036854775794
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS}}} 0
DCGM_FI_DEV_XID_ERRORS{{{LABELS}}} 0
"""
STATE = GpuState(utilisation=93, power_w=68.432, temperature_c=41, pcie_replays=3)


@contextmanager
def serving(text: str) -> Generator[int]:
    class Exporter(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (text if self.path == "/metrics" else "").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Exporter) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_metrics_are_states_of_gpus_without_blank_values() -> None:
    with serving(METRICS) as port:
        reading = open_exporter("127.0.0.1", port).read(3.0)
    assert reading == GpuReading(at_s=3.0, gpus={"GPU 0000:1b:00": STATE})


def test_exporter_without_bus_ids_numbers_its_gpus() -> None:
    assert [*parse_metrics('DCGM_FI_DEV_GPU_TEMP{gpu="3", UUID="GPU-6"} 41\n')] == ["GPU 3"]


def test_xid_of_hardware_is_a_fault_and_another_is_none() -> None:
    def found(xid: int) -> list[DeviceFault | None]:
        before, now = (
            GpuReading(
                at_s=at_s,
                gpus=parse_metrics(METRICS.replace(f"XID_ERRORS{{{LABELS}}} 0", f"XID_ERRORS{{{LABELS}}} {each}")),
            )
            for at_s, each in ((0.0, 0), (15.0, xid))
        )
        return [each.fault for each in gpu_symptoms(before, now, fault_of_line)]

    assert (found(79), found(31), found(0)) == ([DeviceFault.GPU], [], [])


def test_port_without_an_exporter_is_no_source() -> None:
    with serving("# nothing\n") as port, pytest.raises(SourceMissing, match="no metrics of GPUs"):
        open_exporter("127.0.0.1", port)
    with pytest.raises(SourceMissing, match="nothing answers"):
        open_exporter("127.0.0.1", port)
