"""`python -m holdfast.launch.hosts.waiting_hosts_controller TARGET BASE PORT --wait ...`: connects hosts early.

It begins to connect the hosts of a target file, and then is the controller that waits for its run
(controller_main.py). PORT is where it will listen. What comes before the connections is kept light: the imports that
follow take as long as they do.
"""

from __future__ import annotations

import atexit
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from holdfast.host.files import read_small
from holdfast.job.target_files import HOST_NAME
from holdfast.launch.hosts import prestarted_links
from holdfast.launch.waiting_controller import CONTROLLER


class _Ssh(Struct, frozen=True, kw_only=True):
    """What the file says of ssh; a connection is used only if the validated target gives the same command."""

    python: str = "python3"
    folder: str | None = None
    config: str | None = None
    shared_connection: bool = False


def main() -> None:
    """Connect the hosts while the controller is being imported, and continue as it."""
    target, base, port, *waiting = sys.argv[1:]
    atexit.register(prestarted_links.end)
    try:
        prestarted_links.open_links(*_read(Path(target)), Path(base), int(port))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, yaml.YAMLError):
        pass  # the command reports what is wrong with the file
    sys.argv[1:] = waiting
    import_module(CONTROLLER).main()  # as slow as ssh


def _read(target: Path) -> tuple[tuple[str, ...], _Ssh]:
    """The hosts, and how to reach them; raises what a file that is not valid causes."""
    found: Any = yaml.load(read_small(target), yaml.CSafeLoader)
    if not isinstance(found["hosts"], list):
        raise TypeError("hosts")
    hosts: tuple[Any, ...] = tuple(found["hosts"])
    ssh: dict[str, Any] = found.get("ssh", {})
    used = _Ssh(**{name: value for name, value in ssh.items() if name in _Ssh.__struct_fields__})
    if not all(re.fullmatch(HOST_NAME, host) for host in hosts):
        raise ValueError("hosts")
    if used.folder is not None and not used.folder.startswith("/"):
        raise ValueError("ssh.folder")
    return hosts, used


if __name__ == "__main__":
    main()
