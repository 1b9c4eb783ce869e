"""Normalizes an error line, so that two occurrences of one error compare equal."""

from __future__ import annotations

import re
from functools import lru_cache

MAX_CHARACTERS = 200
"""Characters compared of a line: its end may be cut off elsewhere if an address before it is longer."""

# Parts that differ from one attempt to the next, or from one rank to another:
#   [rank3]: ValueError: no batch at 0x7f3a2c10, pid 4121, 2026-11-22 03:57:18
#   FileNotFoundError: [Errno 2] No such file or directory: '/tmp/tmpab_dkqzw/attempt-3/x'
#   ConnectionError: http://[fe80::aa:bb]:8000/shard/de305d54-75b4-431b-adb2-eb6b9e546014
#   ValueError: loss is nan / loss is 1.5e-05
_VOLATILE = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?:[0-9a-f]{0,4}:){2,}[0-9a-f]{0,4}|\btmp\w{8}\b|\b(?:nan|inf)\b|"
    r"\w*\d\w*",
    re.IGNORECASE,
)
_ROW = re.compile(r"[-+]?#(?:[\s,;:./+-]*#)*")
"""Several in a row, such as an address, a time or a list whose length differs."""


@lru_cache(maxsize=1024)
def normalize_error(error: str) -> str:
    """An error line without numbers, addresses, identifiers and temporary names."""
    return _ROW.sub("#", _VOLATILE.sub("#", error))[:MAX_CHARACTERS]
