"""Looks at the hosts of a target over ssh: what each one is, and whether they reach one another."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.job.targets import TargetSpec
from holdfast.launch.hosts.host_link import HostSettings, HostUnusable, connected

PROBE_TIMEOUT_S = 30.0
MAX_PAIRS = 1024
"""Pairs of hosts that are tried; of more hosts, each tries only some that follow it in the list."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself."""

    host: str = ""
    hostname: str
    address: str
    port: int
    """Where it listens while it is looked at."""
    gpus: int
    cpus: int
    memory_bytes: int
    holder: str
    """Which run uses it; empty if none does."""
    programs: tuple[str, ...]
    """Programs that were looked for and are there."""
    monarch: str
    """Version of Monarch in the job's environment; empty if it is not there."""
    paths: tuple[str, ...] = ()
    """Files and folders that were looked for and are there."""


class HostSurvey(Struct, frozen=True, kw_only=True):
    """What was found of all hosts."""

    facts: tuple[HostFacts, ...]
    unusable: tuple[tuple[str, str, str], ...]
    """Host, reason and remedy of each that cannot take part."""
    unreachable: tuple[tuple[str, str, str], ...]
    """From which host, to which, and the error, for each pair without a connection."""


def survey(spec: TargetSpec, base: Path, programs: Sequence[str], paths: Sequence[str] = ()) -> HostSurvey:
    """Connect to all hosts side by side, look for programs and paths, and have them connect to one another."""
    return asyncio.run(_survey(spec, base, tuple(programs), tuple(paths)))


async def _survey(spec: TargetSpec, base: Path, programs: tuple[str, ...], paths: tuple[str, ...]) -> HostSurvey:
    async with contextlib.AsyncExitStack() as links:
        probes = [_Probe(host, spec, base, links) for host in spec.hosts]
        failures = await asyncio.gather(*(probe.open(programs, paths) for probe in probes))
        there = [probe for probe, failed in zip(probes, failures, strict=True) if failed is None]
        unusable = tuple(
            (probe.host, *failed) for probe, failed in zip(probes, failures, strict=True) if failed is not None
        )
        pairs = _pairs(there)
        errors = await asyncio.gather(*(source.try_connect(goals) for source, goals in pairs.items()))
        unreachable = tuple(
            (source.host, goal.host, error)
            for (source, goals), found in zip(pairs.items(), errors, strict=True)
            for goal, error in zip(goals, found, strict=True)
            if error
        )
        return HostSurvey(facts=tuple(probe.facts for probe in there), unusable=unusable, unreachable=unreachable)


class _Probe:
    """A connection to host_probe.py on one host."""

    def __init__(self, host: str, spec: TargetSpec, base: Path, links: contextlib.AsyncExitStack) -> None:
        self.host, self._spec, self._base, self._links = host, spec, base, links
        self.facts: HostFacts

    async def open(self, programs: tuple[str, ...], paths: tuple[str, ...]) -> tuple[str, str] | None:
        """Connect; returns why that is impossible and what to do."""
        settings = HostSettings(ssh=self._spec.ssh, base=self._base, port=0)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                self._output, self._input = await self._links.enter_async_context(
                    connected(self.host, settings, 0, "holdfast.launch.hosts.host_probe")
                )
                address = self._spec.ssh.addresses.get(self.host, "")
                found = await self._ask(address=address, programs=programs, paths=paths)
        except HostUnusable as error:
            return error.what, error.remedy
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            return f"it does not answer: {error!r}", f"Connect by hand to see more: `ssh {self.host}`."
        if "error" in found:
            return str(found["error"]), "Correct its address in the target's `ssh.addresses`."
        self.facts = msgspec.structs.replace(msgspec.convert(found, HostFacts), host=self.host)
        return None

    async def try_connect(self, goals: Sequence[_Probe]) -> list[str]:
        """The error of each connection from this host, or nothing."""
        return (await self._ask(connect=[(goal.facts.address, goal.facts.port) for goal in goals]))["errors"]

    async def _ask(self, **request: object) -> dict[str, Any]:
        self._input.write(json.dumps(request).encode() + b"\n")
        line = await self._output.readline()
        return json.loads(line) if line else {"error": "the connection ended"}


def _pairs(probes: Sequence[_Probe]) -> dict[_Probe, list[_Probe]]:
    """The hosts that each host connects to."""
    each = max(1, min(len(probes) - 1, MAX_PAIRS // max(1, len(probes))))
    around = list(itertools.islice(itertools.cycle(probes), 2 * len(probes)))
    return {probe: around[at + 1 : at + 1 + each] for at, probe in enumerate(probes)} if len(probes) > 1 else {}
