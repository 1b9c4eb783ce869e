"""The rules as rows: a file for each kind of fault. `RULES` has all of them by code."""

from __future__ import annotations

from holdfast.diagnose.rules import (
    exceptions,
    gpu_direct,
    gpu_driver,
    hang_records,
    infrastructure,
    ip_network,
    job_start,
    memory_limits,
    nccl,
    nccl_setup,
    nvshmem,
    run_events,
    system_logs,
    torchrun,
    traceback_location,
    user_program,
)

_TABLES = (
    memory_limits,
    gpu_driver,
    gpu_direct,
    nccl,
    nvshmem,
    ip_network,
    torchrun,
    system_logs,
    exceptions,
    infrastructure,
    user_program,
    job_start,
    run_events,
    nccl_setup,
    hang_records,
    traceback_location,
)
"""Of the fallback rules, the first in this order counts."""

RULES = {rule.code: rule for table in _TABLES for rule in table.RULES}
