"""Reserves the hosts of a run together: a run that waits for some of its hosts keeps none from other runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.launch.hosts.host_messages import ReleaseHost, ReserveHost
from holdfast.launch.hosts.link import Link


class HostReservation:
    """Hosts that a run has asked to keep for it, and their answers."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._kept: dict[str, bool | None] = {}
        """By host with a request, whether it is kept; None until it answers."""

    def request(self, free: Sequence[str], *, least: int, most: int) -> bool:
        """Ask free hosts, up to `most` in all; returns False and asks none if fewer than `least` can be had."""
        self._kept = {host: kept for host, kept in self._kept.items() if self._links[host].ready}
        others = [host for host in free if host not in self._kept]
        asked = sum(kept is not False for kept in self._kept.values())
        if asked + len(others) < least:
            return False
        for host in others[: max(0, most - asked)]:
            self._kept[host] = None
            self._links[host].send(ReserveHost())
        return True

    def kept(self) -> list[str]:
        """The hosts that are kept for the run; none before all have answered."""
        return [host for host, kept in self._kept.items() if kept] if None not in self._kept.values() else []

    def answer(self, host: str, *, kept: bool) -> bool:
        """Take a host's answer; returns False, and undoes it, if the run has given up since."""
        if host in self._kept:
            self._kept[host] = kept
            return True
        if kept:
            self._links[host].send(ReleaseHost())
        return False

    def release(self, used: Collection[str] = ()) -> bool:
        """Let others have the hosts, except those that have a node now; returns whether a host was refused.

        The agent of a node has taken over the lock of its host.
        """
        refused = False in self._kept.values()
        for host, kept in self._kept.items():
            if kept and host not in used:
                self._links[host].send(ReleaseHost())
        self._kept = {}
        return refused
