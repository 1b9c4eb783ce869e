"""What lines mean, as rows: a file for each kind of trouble. `RULES` is all of them by code."""

from __future__ import annotations

from holdfast.diagnose.rules import (
    exceptions,
    fabric,
    gpu,
    machine,
    memory,
    network,
    nvshmem,
    program,
    quoted,
    rdma,
    records,
    run,
    standing,
    starting,
    torchrun,
    warned,
)

_TABLES = (
    memory,
    gpu,
    rdma,
    nvshmem,
    network,
    torchrun,
    machine,
    exceptions,
    program,
    starting,
    run,
    fabric,
    records,
    warned,
    quoted,
    standing,
)
"""Of rows that count only where no other does, the first in this order does."""

RULES = {rule.code: rule for table in _TABLES for rule in table.RULES}
