"""The probes of a container: what they check, how often, and what follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx

from lab.kubelet.api import KubeObject
from lab.kubelet.container import Container

Changed = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ProbeTiming:
    """Timing and thresholds of a probe."""

    delay_s: float
    period_s: float
    timeout_s: float
    successes: int
    failures: int


async def watch(container: Container, address: str, changed: Changed) -> bool:
    """Probe while the container runs; return False when it must be killed."""
    spec = container.spec
    container.state.started = "startupProbe" not in spec
    if not container.state.started:
        await changed()
        async for good in _results(spec["startupProbe"], container, address):
            if not good:
                return False
            break
        container.state.started = True
    container.started.set()
    container.state.ready = "readinessProbe" not in spec
    await changed()
    alive = asyncio.create_task(_alive(container, address))
    ready = asyncio.create_task(_ready(container, address, changed))
    try:
        return await alive
    finally:
        alive.cancel()
        ready.cancel()


async def _alive(container: Container, address: str) -> bool:
    if probe := container.spec.get("livenessProbe"):
        async for good in _results(probe, container, address):
            if not good:
                return False
    await asyncio.Event().wait()
    return True


async def _ready(container: Container, address: str, changed: Changed) -> None:
    if probe := container.spec.get("readinessProbe"):
        async for good in _results(probe, container, address):
            if good != container.state.ready:
                container.state.ready = good
                await changed()


async def _results(probe: KubeObject, container: Container, address: str) -> AsyncIterator[bool]:
    """Yield whether the probe succeeds, each time enough consecutive results agree."""
    pace = ProbeTiming(
        delay_s=probe.get("initialDelaySeconds", 0),
        period_s=probe.get("periodSeconds", 10),
        timeout_s=probe.get("timeoutSeconds", 1),
        successes=probe.get("successThreshold", 1),
        failures=probe.get("failureThreshold", 3),
    )
    await asyncio.sleep(pace.delay_s)
    good = bad = 0
    while True:
        try:
            answer = await asyncio.wait_for(_probe(probe, container, address), pace.timeout_s)
        except TimeoutError:
            answer = False
        good, bad = (good + 1, 0) if answer else (0, bad + 1)
        if good >= pace.successes:
            yield True
        elif bad >= pace.failures:
            yield False
        await asyncio.sleep(pace.period_s)


async def _probe(probe: KubeObject, container: Container, address: str) -> bool:
    match probe:
        case {"exec": {"command": command}}:
            return await run_inside(container, command) == 0
        case {"httpGet": probe_spec}:
            return await _http(probe_spec, _port(probe_spec["port"], container), address)
        case {"tcpSocket": probe_spec}:
            return await _tcp(probe_spec.get("host", address), _port(probe_spec["port"], container))
        case _:
            return True


async def run_inside(container: Container, command: list[str]) -> int:
    """Run a command in a container; return its exit code."""
    process = await asyncio.create_subprocess_exec(
        *container.exec_argv(*command),
        env=container.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()


async def _http(probe_spec: KubeObject, port: int, address: str) -> bool:
    host = probe_spec.get("host", address)
    url = f"{probe_spec.get('scheme', 'HTTP').lower()}://{host}:{port}{probe_spec.get('path', '/')}"
    headers = {header["name"]: header["value"] for header in probe_spec.get("httpHeaders", ())}
    try:
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            return (await client.get(url, headers=headers)).status_code < 400
    except httpx.HTTPError:
        return False


async def _tcp(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


def _port(port: int | str, container: Container) -> int:
    if isinstance(port, int):
        return port
    return next(one["containerPort"] for one in container.spec.get("ports", ()) if one.get("name") == port)
