"""`python -m holdfast.launch.hosts.hosts_controller TARGET BASE PORT --wait ...`: a controller that waits for its run.

It begins to connect the hosts of a target file, and then is that controller (controller_main.py). PORT is where it
will listen. What comes before the connections is kept light: the imports that follow take as long as they do.
"""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from holdfast.host.files import read_small
from holdfast.launch.hosts import prestarted_links
from holdfast.launch.waiting_controller import CONTROLLER


@dataclass(frozen=True, kw_only=True)
class _Ssh:
    """What the file says of ssh, not validated: a connection is used only if the run's own command is the same."""

    python: str = "python3"
    folder: str | None = None
    config: str | None = None
    shared_connection: bool = False


def main() -> None:
    """Connect the hosts while the controller is being imported, and continue as it."""
    target, base, port, *waiting = sys.argv[1:]
    atexit.register(prestarted_links.end)
    try:
        hosts, ssh = _read(Path(target))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        hosts, ssh = (), _Ssh()  # the command reports what is wrong with the file
    prestarted_links.open_links(hosts, ssh, Path(base), int(port))
    sys.argv[1:] = waiting
    import_module(CONTROLLER).main()  # as slow as ssh


def _read(target: Path) -> tuple[tuple[str, ...], _Ssh]:
    found: Any = yaml.load(read_small(target), yaml.CSafeLoader)
    ssh = found.get("ssh", {})
    known = {name: ssh[name] for name in _Ssh.__dataclass_fields__ if name in ssh}
    return tuple(host for host in found["hosts"] if isinstance(host, str)), _Ssh(**known)


if __name__ == "__main__":
    main()
