"""Enters a user namespace, in which an unprivileged process may create networks."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from holdfast.launch.local.netns import ip_command, namespace
from holdfast.launch.local.netns.netns_support import unavailable


def enter_rootless(join_pid: int | None = None) -> bool:
    """Move this process into a namespace where it may create networks; False if it already may, and nothing was done.

    Call it before the process has a second thread. Afterwards it is root in its own namespaces only, and its only
    network is loopback: it still reaches Unix sockets by path, but no TCP port outside.

    `join_pid` is a process in a node of a network whose owner died: this process becomes the next owner, and
    `NetnsNetwork.open` finds the network.
    """
    if namespace.privileged():
        return False
    try:
        if join_pid is None:
            _create_namespaces()
        else:
            _join_namespaces(join_pid)
    except OSError as error:
        raise failure(
            "netns-unavailable",
            "this process cannot enter a user namespace",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            evidence=(str(error), f"threads: {', '.join(os.listdir('/proc/self/task'))}"),
            remedy=unavailable() or "Call it while the process has one thread only.",
            owner=Owner.CLUSTER,
        ) from error
    ip_command.ip("link set dev lo up")
    return True


def _create_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    namespace.unshare(namespace.NEW_USER | namespace.NEW_MOUNT | namespace.NEW_NET)
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {uid} 1")
    (own / "gid_map").write_text(f"0 {gid} 1")


def _join_namespaces(process: int) -> None:
    folder = Path.cwd()
    theirs = Path(f"/proc/{process}/ns")
    mounts = theirs / "mnt"
    namespace.join(theirs / "user", namespace.NEW_USER)
    namespace.join(mounts, namespace.NEW_MOUNT)
    namespace.unshare(namespace.NEW_MOUNT | namespace.NEW_NET)
    namespace.unmount(Path("/etc/hosts"))
    os.chdir(folder)
