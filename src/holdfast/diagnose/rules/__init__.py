"""What lines mean, as rows: a file for each kind of trouble. `RULES` is all of them by code."""

from __future__ import annotations

from holdfast.diagnose.rules import memory, records

RULES = {rule.code: rule for table in (memory.RULES, records.RULES) for rule in table}
