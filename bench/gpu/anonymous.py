"""Replaces what names this machine in a record: host name, addresses and directories."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from typing import Any

from bench.gpu.section import ROOT

_ADDRESS = re.compile(r"(?<![\d.])(?!127\.)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_ADDRESS6 = re.compile(r"\b(?=[0-9a-fA-F]*:)(?:[0-9a-fA-F]{1,4}::?){2,7}[0-9a-fA-F]{1,4}(?=[%<\]])")


def hide(value: Any) -> Any:
    """The same without this machine's host name, addresses and directories."""
    if isinstance(value, str):
        for own, shown in _names():
            value = value.replace(own, shown)
        return _ADDRESS6.sub("2001:db8::1", _ADDRESS.sub("192.0.2.1", value))
    if isinstance(value, dict):
        return {hide(key): hide(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hide(each) for each in value]
    return value


def _names() -> Iterator[tuple[str, str]]:
    host = socket.gethostname()
    yield str(ROOT), "/holdfast"
    yield sys.prefix, "/env"
    yield sys.base_prefix, "/python"
    yield host, "node0"
    yield host.partition(".")[0], "node0"
