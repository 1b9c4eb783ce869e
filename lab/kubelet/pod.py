"""Pod lifecycle: volumes, init containers, containers and their restarts, and the end; reports each step."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import HoldfastError
from lab.kubelet import probes, volumes
from lab.kubelet.api import REQUEST_ERRORS, RETRY_S, KubeletApi, KubeObject, is_transient
from lab.kubelet.container import Container, PodContext
from lab.kubelet.container_env import MissingReference
from lab.kubelet.hosts import PodDnsEntry
from lab.kubelet.pod_sandbox import PodSandbox, PodSandboxes
from lab.kubelet.status import moment, pod_status, waiting
from lab.kubelet.volumes import PodVolumes

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 10.0
"""A tenth and a thirtieth of the Kubernetes defaults, to keep tests short."""
_STATUS_TIMEOUT_S = 5.0
_RETRYABLE = (MissingReference, *REQUEST_ERRORS)
"""Temporary reasons for a container not to start: something it needs is missing, or the API server is unreachable."""


@dataclass(frozen=True)
class Eviction:
    """Why the kubelet ends a pod by itself."""

    reason: str
    message: str
    grace_s: float
    """Longest time from SIGTERM to SIGKILL."""


class _PodStopping(Exception):
    """The pod is stopping; abandon the next step."""


class LabPod:
    """A pod that is bound to one of the kubelet's nodes."""

    def __init__(
        self,
        pod: KubeObject,
        *,
        api: KubeletApi,
        sandboxes: PodSandboxes,
        folder: Path,
        host: str,
        bad_images: Sequence[str],
        on_change: Callable[[], None],
    ) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.hostname: str = (pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]
        self.folder = folder / self.uid
        self.sandbox: PodSandbox | None = None
        inits = pod["spec"].get("initContainers", ())
        self.inits = [Container(spec, pod, self.folder) for spec in inits]
        self.mains = [Container(spec, pod, self.folder) for spec in pod["spec"]["containers"]]
        self._api = api
        self._sandboxes = sandboxes
        self._host = host
        self._bad_images = bad_images
        self._on_change = on_change
        self.path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self._started_at = moment()
        self._phase = "Pending"
        self._initialized = not inits
        self.ended = asyncio.Event()
        """Set once all its processes are gone and its final status is reported."""
        self.reported = True
        """Whether there is a kubelet that reports its status."""
        self.powered_off = False
        self._reason = ""
        self._eviction: Eviction | None = None
        self._ending = asyncio.Event()
        self._stop = asyncio.Event()
        self._status_lock = asyncio.Lock()
        self._status_retry: asyncio.Task[None] | None = None
        """Retries a status that the API server has not accepted yet."""
        self._sidecars: set[asyncio.Task[int]] = set()

    @property
    def containers(self) -> list[Container]:
        return [*self.inits, *self.mains]

    @property
    def dns_entry(self) -> PodDnsEntry | None:
        """How other pods resolve it; None while it has no address."""
        if self.sandbox is None:
            return None
        return PodDnsEntry(
            namespace=self.pod["metadata"]["namespace"],
            hostname=self.hostname,
            subdomain=self.pod["spec"].get("subdomain", ""),
            labels=self.pod["metadata"].get("labels", {}),
            address=self.sandbox.address,
            ready=all(container.state.ready for container in self.mains),
        )

    def update(self, pod: KubeObject) -> None:
        """Take over a new version of the object; a deletion timestamp stops the pod."""
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self._stop.set()

    async def run(self) -> None:
        """Run from start to final status; leave no process."""
        main = asyncio.create_task(self._run_containers())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({main, stop}, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                if not self._stop.is_set():
                    self._reason = "DeadlineExceeded"
                await self._terminate(main)
            with contextlib.suppress(_PodStopping, asyncio.CancelledError):
                await main
        except Exception:  # whatever went wrong, the pod has failed and can be deleted
            logging.exception("pod %s", self.path)
            self._reason = "Error"
        finally:
            stop.cancel()
            main.cancel()
        await self._report_final_phase()
        await self._clean_up()
        if self._status_retry:
            await self._status_retry
        self.ended.set()

    @property
    def to_be_deleted(self) -> bool:
        """Whether to delete its object once it has ended."""
        return "deletionTimestamp" in self.pod["metadata"] and not self.powered_off

    def evict(self, why: Eviction) -> None:
        """Stop it; its object stays, as failed."""
        self._eviction, self._reason = why, why.reason
        self._stop.set()

    async def power_off(self) -> None:
        """Power off its node: kill all its processes immediately, without a message."""
        self.powered_off = True
        self._ending.set()
        if self.sandbox is not None:
            try:
                await self._sandboxes.power_off(self.sandbox)
            except HoldfastError:
                logging.exception("the network of %s", self.path)
        self._stop.set()  # last: it sends SIGTERM, to which processes that are still connected react

    # -- lifecycle -----------------------------------------------------------------------------------------------

    async def _run_containers(self) -> None:
        self.sandbox = await self._sandboxes.add(self.uid, self.hostname)
        self._on_change()
        await self.report_status()
        context = await self._make_context()
        for container in self.inits:
            if container.spec.get("restartPolicy") == "Always":
                await self._start_sidecar(container, context)
            elif await self._run_until_done(container, context, restarts=self._policy != "Never") != 0:
                return
            if self._ending.is_set():
                return
        self._initialized = True
        kept = (self._run_until_done(one, context, restarts=True) for one in self.mains)
        await asyncio.gather(*kept, return_exceptions=True)
        await self._stop_sidecars()

    async def _make_context(self) -> PodContext:
        assert self.sandbox is not None
        self._volumes = PodVolumes(self._api, self.pod, self.folder / "volumes", self._addresses)
        while True:
            try:
                found = await self._volumes.prepare()
                break
            except _RETRYABLE as why:
                await self._wait_for(self.containers, "ContainerCreating", str(why))
        return PodContext(
            api=self._api,
            pod=self.pod,
            folder=self.folder,
            sandbox=self.sandbox,
            volumes=found,
            addresses=self._addresses,
            hostname=self.hostname,
        )

    async def _run_until_done(self, container: Container, context: PodContext, *, restarts: bool) -> int:
        """Run a container until it must not be restarted; return its last exit code."""
        back_off_s = 0.0
        while True:
            await self._start(container, context)
            code = await self._wait_for_exit(container, context)
            policy = container.spec.get("restartPolicy", self._policy)
            once = policy == "Never" or (code == 0 and (policy == "OnFailure" or container in self.inits))
            if self._ending.is_set() or not restarts or (once and not self._is_sidecar(container)):
                await self.report_status()
                return code
            container.state.last = container.state.now
            if back_off_s:
                message = f"back-off {back_off_s:g}s restarting failed container={container.name}"
                container.state.now = waiting("CrashLoopBackOff", message)
            await self.report_status()
            await self._pause(back_off_s)
            back_off_s = min(max(back_off_s * 2, _FIRST_BACKOFF_S), _MAX_BACKOFF_S)
            container.state.restarts += 1

    async def _start(self, container: Container, context: PodContext) -> None:
        image = container.spec["image"]
        refused = any(fnmatch.fnmatch(image, pattern) for pattern in self._bad_images)
        reason = "ErrImagePull"
        while refused:
            await self._wait_for([container], reason, f'failed to pull image "{image}": not found')
            reason = "ImagePullBackOff"
        while True:
            try:
                return await container.start(context)
            except _RETRYABLE as why:
                await self._wait_for([container], "CreateContainerConfigError", str(why))

    async def _wait_for_exit(self, container: Container, context: PodContext) -> int:
        ended = asyncio.create_task(container.wait())
        self._phase = "Running" if self._initialized else self._phase
        hook = container.spec.get("lifecycle", {}).get("postStart", {}).get("exec")
        if hook:
            await probes.run_inside(container, hook["command"])
        address = context.sandbox.address
        probed = asyncio.create_task(probes.watch(container, address, self.report_status))
        try:
            await asyncio.wait({ended, probed}, return_when=asyncio.FIRST_COMPLETED)
            if probed.done() and not ended.done():
                probed.result()
                await self._stop_one(container, self._grace_s)
            return await ended
        finally:
            probed.cancel()

    async def _start_sidecar(self, container: Container, context: PodContext) -> None:
        """Start a sidecar; return when it has started."""
        task = asyncio.create_task(self._run_until_done(container, context, restarts=True))
        self._sidecars.add(task)
        up = asyncio.create_task(container.started.wait())
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()

    async def _stop_sidecars(self) -> None:
        self._ending.set()
        await asyncio.gather(*(self._stop_one(one, self._grace_s) for one in self.inits if self._is_sidecar(one)))
        await asyncio.gather(*self._sidecars, return_exceptions=True)

    # -- end -----------------------------------------------------------------------------------------------------

    async def _terminate(self, main: asyncio.Task[None]) -> None:
        self._ending.set()
        await asyncio.gather(*(self._stop_one(one, self._grace_s) for one in self.containers))
        await asyncio.wait({main}, timeout=_STATUS_TIMEOUT_S)
        main.cancel()

    async def _stop_one(self, container: Container, grace_s: float) -> None:
        """Run the preStop hook, then send SIGTERM, and SIGKILL after the grace."""
        if container.pid is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        if hook := container.spec.get("lifecycle", {}).get("preStop", {}).get("exec"):
            with_grace = probes.run_inside(container, hook["command"])
            await asyncio.wait({asyncio.ensure_future(with_grace)}, timeout=grace_s)
        container.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(container.exited.wait(), deadline - loop.time())
        container.signal(signal.SIGKILL)

    async def _report_final_phase(self) -> None:
        codes = [container.state.exit_code for container in (self.mains if self._initialized else self.inits)]
        self._phase = "Succeeded" if all(code == 0 for code in codes) and not self._reason else "Failed"
        for container in self.containers:
            container.state.ready = False
        await self.report_status()

    async def _clean_up(self) -> None:
        if self.sandbox is not None:
            sandbox, self.sandbox = self.sandbox, None
            try:
                await self._sandboxes.remove_one(sandbox)
            # resources that the kernel still holds must not prevent the pod's deletion
            except (HoldfastError, OSError):
                logging.exception("the network of %s", self.path)
            self._on_change()
        if hasattr(self, "_volumes"):
            self._volumes.release()

    def remove_files(self) -> None:
        """Remove its files, logs among them."""
        volumes.remove_volumes(self.folder)

    # -- status --------------------------------------------------------------------------------------------------

    async def _wait_for(self, containers: list[Container], reason: str, message: str) -> None:
        for container in containers:
            container.state.now = waiting(reason, message)
        await self.report_status()
        await self._pause(RETRY_S)

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the pod is stopping."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
            raise _PodStopping

    async def report_status(self) -> None:
        """Report the status; if the API server does not accept it, retry in the background with the latest status."""
        self._on_change()
        if not await self._send_status() and self._status_retry is None:
            self._status_retry = asyncio.create_task(self._retry_status())

    async def _retry_status(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            if await self._send_status():
                self._status_retry = None
                return

    async def _send_status(self) -> bool:
        """Send the status; return whether the API server accepted it, or never will."""
        async with self._status_lock:
            if self.powered_off:
                return True
            if not self.reported:
                return False
            status = pod_status(
                self.pod,
                {container.name: container.state for container in self.containers},
                phase=self._phase,
                initialized=self._initialized,
                started_at=self._started_at,
                addresses=self._addresses,
                reason=self._reason,
                message=self._eviction.message if self._eviction else "",
            )
            try:
                await self._api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status})
            except REQUEST_ERRORS as error:
                logging.info("status of %s: %r", self.path, error)
                return not is_transient(error)
        return True

    @property
    def _addresses(self) -> dict[str, str]:
        own = {"podIP": self.sandbox.address} if self.sandbox else {}
        return own | {"hostIP": self._host}

    @property
    def _policy(self) -> str:
        return self.pod["spec"].get("restartPolicy", "Always")

    @property
    def _grace_s(self) -> float:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        grace_s = metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))
        return min(grace_s, self._eviction.grace_s) if self._eviction else grace_s

    @property
    def _deadline_s(self) -> float | None:
        return self.pod["spec"].get("activeDeadlineSeconds")

    def _is_sidecar(self, container: Container) -> bool:
        return container in self.inits and container.spec.get("restartPolicy") == "Always"
