"""Owns a pod's life: volumes, init containers, containers and their restarts, its end; and says so at each step."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError
from lab.kubelet import probes, volumes
from lab.kubelet.api import AGAIN_S, NO_ANSWER, Api, Object, may_pass
from lab.kubelet.container import Container, Site
from lab.kubelet.environment import Unmet
from lab.kubelet.names import Named
from lab.kubelet.network import Berth, Berths
from lab.kubelet.status import moment, pod_status, waiting
from lab.kubelet.volumes import Volumes

_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 10.0
"""A tenth and a thirtieth of what they are elsewhere: a lab is for those who wait."""
_WORD_WITHIN_S = 5.0
_NOT_YET = (Unmet, *NO_ANSWER)
"""Why a container cannot be started, for now: what it needs is not there, or nobody says whether it is."""


class _Over(Exception):
    """The pod is to end, so whatever was to happen next does not."""


class Pod:
    """A pod that is bound to one of the kubelet's nodes."""

    def __init__(
        self,
        pod: Object,
        *,
        api: Api,
        berths: Berths,
        folder: Path,
        host: str,
        bad_images: Sequence[str],
        changed: Callable[[], None],
    ) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.hostname: str = (pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]
        self.folder = folder / self.uid
        self.berth: Berth | None = None
        inits = pod["spec"].get("initContainers", ())
        self.inits = [Container(spec, pod, self.folder) for spec in inits]
        self.mains = [Container(spec, pod, self.folder) for spec in pod["spec"]["containers"]]
        self._api = api
        self._berths = berths
        self._host = host
        self._bad_images = bad_images
        self._changed = changed
        self.path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self._started_at = moment()
        self._phase = "Pending"
        self._initialized = not inits
        self.ended = False
        """Whether nothing of it runs any more, and its last status has been said."""
        self._reason = ""
        self._ending = asyncio.Event()
        self._stop = asyncio.Event()
        self._silent = False
        self._word = asyncio.Lock()
        self._telling: asyncio.Task[None] | None = None
        """Says a status that the API server has not taken yet."""
        self._aside: set[asyncio.Task[int]] = set()

    @property
    def containers(self) -> list[Container]:
        return [*self.inits, *self.mains]

    @property
    def named(self) -> Named | None:
        """How others find it; None while it has no address."""
        if self.berth is None:
            return None
        return Named(
            namespace=self.pod["metadata"]["namespace"],
            hostname=self.hostname,
            subdomain=self.pod["spec"].get("subdomain", ""),
            labels=self.pod["metadata"].get("labels", {}),
            address=self.berth.address,
            ready=all(container.state.ready for container in self.mains),
        )

    def see(self, pod: Object) -> None:
        """Take in what it has become; from the moment that it is being deleted, it ends."""
        self.pod = pod
        if "deletionTimestamp" in pod["metadata"]:
            self._stop.set()

    async def run(self) -> None:
        """From nothing to its last status; nothing of it runs afterwards."""
        life = asyncio.create_task(self._live())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({life, stop}, timeout=self._deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not life.done():
                self._reason = "" if self._stop.is_set() else "DeadlineExceeded"
                await self._end(life)
            with contextlib.suppress(_Over, asyncio.CancelledError):
                await life
        except Exception:  # whatever this machine could not do, the pod has failed, and can be deleted
            logging.exception("pod %s", self.path)
            self._reason = "Error"
        finally:
            stop.cancel()
            life.cancel()
        await self._conclude()
        await self._clear()
        if self._telling:
            await self._telling
        self.ended = True

    @property
    def to_be_deleted(self) -> bool:
        """Whether its object is to go, once it has ended."""
        return self._stop.is_set() and not self._silent

    async def lose(self) -> None:
        """Its machine is gone: everything of it ends at once, and nobody is told."""
        self._silent = True
        self._ending.set()
        self._stop.set()
        if self.berth is not None:
            try:
                await self._berths.cut(self.berth)
            except HoldfastError:
                logging.exception("the network of %s", self.path)

    # -- life ----------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        self.berth = await self._berths.add(self.uid, self.hostname)
        self._changed()
        await self._tell()
        site = await self._site()
        for container in self.inits:
            if container.spec.get("restartPolicy") == "Always":
                await self._start_aside(container, site)
            elif await self._keep(container, site, restarts=self._policy != "Never") != 0:
                return
            if self._ending.is_set():
                return
        self._initialized = True
        kept = (self._keep(one, site, restarts=True) for one in self.mains)
        await asyncio.gather(*kept, return_exceptions=True)
        await self._end_aside()

    async def _site(self) -> Site:
        assert self.berth is not None
        self._volumes = Volumes(self._api, self.pod, self.folder / "volumes", self._addresses)
        while True:
            try:
                found = await self._volumes.prepare()
                break
            except _NOT_YET as why:
                await self._wait_for(self.containers, "ContainerCreating", str(why))
        return Site(
            api=self._api,
            pod=self.pod,
            folder=self.folder,
            berth=self.berth,
            volumes=found,
            addresses=self._addresses,
            hostname=self.hostname,
        )

    async def _keep(self, container: Container, site: Site, *, restarts: bool) -> int:
        """Run a container until it is not to run again; its last exit code."""
        back_off_s = 0.0
        while True:
            await self._start(container, site)
            code = await self._until_it_ends(container, site)
            policy = container.spec.get("restartPolicy", self._policy)
            once = policy == "Never" or (code == 0 and (policy == "OnFailure" or container in self.inits))
            if self._ending.is_set() or not restarts or (once and not self._is_sidecar(container)):
                await self._tell()
                return code
            container.state.last = container.state.now
            if back_off_s:
                message = f"back-off {back_off_s:g}s restarting failed container={container.name}"
                container.state.now = waiting("CrashLoopBackOff", message)
            await self._tell()
            await self._pause(back_off_s)
            back_off_s = min(max(back_off_s * 2, _FIRST_BACK_OFF_S), _LONGEST_BACK_OFF_S)
            container.state.restarts += 1

    async def _start(self, container: Container, site: Site) -> None:
        image = container.spec["image"]
        refused = any(fnmatch.fnmatch(image, pattern) for pattern in self._bad_images)
        reason = "ErrImagePull"
        while refused:
            await self._wait_for([container], reason, f'failed to pull image "{image}": not found')
            reason = "ImagePullBackOff"
        while True:
            try:
                return await container.start(site)
            except _NOT_YET as why:
                await self._wait_for([container], "CreateContainerConfigError", str(why))

    async def _until_it_ends(self, container: Container, site: Site) -> int:
        ended = asyncio.create_task(container.wait())
        self._phase = "Running" if self._initialized else self._phase
        hook = container.spec.get("lifecycle", {}).get("postStart", {}).get("exec")
        if hook:
            await probes.run_inside(container, hook["command"])
        address = site.berth.address
        probed = asyncio.create_task(probes.watch(container, address, self._tell))
        try:
            await asyncio.wait({ended, probed}, return_when=asyncio.FIRST_COMPLETED)
            if probed.done() and not ended.done():
                probed.result()
                await self._stop_one(container, self._grace_s)
            return await ended
        finally:
            probed.cancel()

    async def _start_aside(self, container: Container, site: Site) -> None:
        """Start a sidecar, and go on when it says that it has started."""
        task = asyncio.create_task(self._keep(container, site, restarts=True))
        self._aside.add(task)
        up = asyncio.create_task(container.up.wait())
        await asyncio.wait({task, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()

    async def _end_aside(self) -> None:
        self._ending.set()
        await asyncio.gather(*(self._stop_one(one, self._grace_s) for one in self.inits if self._is_sidecar(one)))
        await asyncio.gather(*self._aside, return_exceptions=True)

    # -- end -----------------------------------------------------------------------------------------------------

    async def _end(self, life: asyncio.Task[None]) -> None:
        self._ending.set()
        await asyncio.gather(*(self._stop_one(one, self._grace_s) for one in self.containers))
        await asyncio.wait({life}, timeout=_WORD_WITHIN_S)
        life.cancel()

    async def _stop_one(self, container: Container, grace_s: float) -> None:
        """First its hook, then SIGTERM, and SIGKILL when the grace is over."""
        if container.pid is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        if hook := container.spec.get("lifecycle", {}).get("preStop", {}).get("exec"):
            with_grace = probes.run_inside(container, hook["command"])
            await asyncio.wait({asyncio.ensure_future(with_grace)}, timeout=grace_s)
        container.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(container.gone.wait(), deadline - loop.time())
        container.signal(signal.SIGKILL)

    async def _conclude(self) -> None:
        codes = [container.state.exit_code for container in (self.mains if self._initialized else self.inits)]
        self._phase = "Succeeded" if all(code == 0 for code in codes) and not self._reason else "Failed"
        for container in self.containers:
            container.state.ready = False
        await self._tell()

    async def _clear(self) -> None:
        if self.berth is not None:
            berth, self.berth = self.berth, None
            try:
                await self._berths.drop(berth)
            except (HoldfastError, OSError):  # what the kernel still holds keeps nobody from deleting the pod
                logging.exception("the network of %s", self.path)
            self._changed()
        if hasattr(self, "_volumes"):
            self._volumes.release()

    def forget(self) -> None:
        """Remove its files, logs among them."""
        volumes.clear(self.folder)

    # -- word ----------------------------------------------------------------------------------------------------

    async def _wait_for(self, containers: list[Container], reason: str, message: str) -> None:
        for container in containers:
            container.state.now = waiting(reason, message)
        await self._tell()
        await self._pause(AGAIN_S)

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the pod is to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
            raise _Over

    async def _tell(self) -> None:
        """Say how it is; where nobody takes that, it is said again aside, as it then is, until somebody does."""
        self._changed()
        if not await self._told() and self._telling is None:
            self._telling = asyncio.create_task(self._tell_later())

    async def _tell_later(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            if await self._told():
                self._telling = None
                return

    async def _told(self) -> bool:
        """Say how it is; whether that has been taken, or need not be."""
        async with self._word:
            if self._silent:
                return True
            status = pod_status(
                self.pod,
                {container.name: container.state for container in self.containers},
                phase=self._phase,
                initialized=self._initialized,
                started_at=self._started_at,
                addresses=self._addresses,
                reason=self._reason,
            )
            try:
                await self._api.patch(f"{self.path}/status", {"metadata": {"uid": self.uid}, "status": status})
            except NO_ANSWER as error:
                logging.info("status of %s: %r", self.path, error)
                return not may_pass(error)
        return True

    @property
    def _addresses(self) -> dict[str, str]:
        own = {"podIP": self.berth.address} if self.berth else {}
        return own | {"hostIP": self._host}

    @property
    def _policy(self) -> str:
        return self.pod["spec"].get("restartPolicy", "Always")

    @property
    def _grace_s(self) -> float:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        return metadata.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30))

    @property
    def _deadline_s(self) -> float | None:
        return self.pod["spec"].get("activeDeadlineSeconds")

    def _is_sidecar(self, container: Container) -> bool:
        return container in self.inits and container.spec.get("restartPolicy") == "Always"
