"""What lines mean, as rows: a file for each kind of trouble. `RULES` is all of them by code."""

from __future__ import annotations

from holdfast.diagnose.rules import (
    fabric,
    gpu,
    machine,
    memory,
    network,
    program,
    rdma,
    records,
    run,
    standing,
    starting,
    torchrun,
    warned,
)

_TABLES = (memory, gpu, rdma, network, torchrun, machine, program, starting, run, fabric, records, warned, standing)

RULES = {rule.code: rule for table in _TABLES for rule in table.RULES}
