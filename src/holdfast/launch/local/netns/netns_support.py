"""Probes whether this machine supports network namespaces, by creating temporary ones."""

from __future__ import annotations

import sys
from pathlib import Path

from holdfast.launch.local.netns import ip_command, namespace

_PACKAGES = {"ip": "iproute2", "nsenter": "util-linux", "unshare": "util-linux", "mount": "util-linux"}

# A sysctl that forbids user namespaces, the value that does, and who sets it.
_BARRIERS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "Ubuntu from 23.10 on"),
    ("kernel/unprivileged_userns_clone", "0", "Debian's and Arch's hardened kernels"),
    ("user/max_user_namespaces", "0", "RHEL's hardening guides"),
)


def unavailable() -> str | None:
    """Why network namespaces do not work here, with the remedy, or None if they do; takes about 10 ms."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    for program, package in _PACKAGES.items():
        if not ip_command.find(program):
            return f"the program `{program}` is missing; install the package {package}"
    entered = ip_command.try_run((*_throwaway(), "mount", "-t", "tmpfs", "none", "/tmp"))
    if entered.returncode != 0:
        return f"namespaces are not allowed here ({_last(entered.stderr)}); {_remedy()}"
    made = ip_command.try_run(
        (*_throwaway(), ip_command.find("ip") or "ip", "-batch", "-"),
        ("link add name bridge type bridge", "link add name one type veth peer name other"),
    )
    if made.returncode != 0:
        error = " ".join(made.stderr.split())
        return f"the kernel makes no bridge or veth ({error}); load them as root: modprobe -a bridge veth"
    return None


def rates_unavailable() -> str | None:
    """Why bandwidth limits do not work here, with the remedy, or None if they do."""
    if reason := unavailable():
        return reason
    program = ip_command.find("tc")
    if not program:
        return "the program `tc` is missing; install the package iproute2 (on Fedora iproute-tc)"
    shaped = ip_command.try_run(
        (*_throwaway(), program, "-batch", "-"), ("qdisc add dev lo root tbf rate 1mbit burst 64kb latency 50ms",)
    )
    if shaped.returncode != 0:
        error = " ".join(shaped.stderr.split())
        return f"the kernel has no token bucket filter ({error}); load it as root: modprobe sch_tbf"
    return None


def _throwaway() -> tuple[str, ...]:
    """The prefix that runs a command in new namespaces, which end with it."""
    user = () if namespace.privileged() else ("--user", "--map-root-user")
    return ("unshare", *user, "--net", "--mount", "--uts", "--")


def _remedy() -> str:
    for name, forbidding, origin in _BARRIERS:
        setting = Path("/proc/sys") / name
        if setting.exists() and setting.read_text().strip() == forbidding:
            dotted = name.replace("/", ".")
            return f"{dotted} is {forbidding} (as on {origin}): change it with sysctl as root, or run as root"
    return "run as root, and in a container with --privileged, or --cap-add SYS_ADMIN --cap-add NET_ADMIN"


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no error message"
