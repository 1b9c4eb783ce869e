"""The address at which a host of a run is reached, as the process there knows it."""

from __future__ import annotations

import os

LOOPBACK = "127.0.0.1"
ADDRESS = "HOLDFAST_HOST_ADDRESS"
"""The variable with this host's address, if no ssh connection shows it."""


def own_address() -> str:
    """This host's end of its connection to the controller."""
    return os.environ.get(ADDRESS) or (os.environ.get("SSH_CONNECTION", "").split() + [LOOPBACK] * 3)[2]
