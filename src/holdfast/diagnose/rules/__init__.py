"""The rules as rows: a file for each kind of fault. `RULES` has all of them by code."""

from __future__ import annotations

from holdfast.diagnose.rules import (
    exceptions,
    gpu_driver,
    hang_records,
    ip_network,
    job_start,
    memory_limits,
    nccl_generic,
    nccl_setup,
    nccl_warn,
    nvshmem,
    rdma,
    run_events,
    system_logs,
    torchrun,
    traceback_location,
    user_program,
)

_TABLES = (
    memory_limits,
    gpu_driver,
    rdma,
    nvshmem,
    ip_network,
    torchrun,
    system_logs,
    exceptions,
    user_program,
    job_start,
    run_events,
    nccl_setup,
    hang_records,
    nccl_warn,
    nccl_generic,
    traceback_location,
)
"""Of the fallback rules, the first in this order counts."""

RULES = {rule.code: rule for table in _TABLES for rule in table.RULES}
