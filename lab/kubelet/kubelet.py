"""The kubelet: watches the API server, runs the pods of its nodes, and maintains their host names."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from holdfast.launch.local.netns import enter_rootless
from lab.kubelet import hosts, pod_sandbox, proxy, pvc
from lab.kubelet.api import KubeletApi, KubeObject, retry_until_done
from lab.kubelet.configuration import KubeletConfig, load
from lab.kubelet.nodes import POWER, SimulatedNodes
from lab.kubelet.pod import LabPod
from lab.kubelet.pod_sandbox import PodSandboxes
from lab.kubelet.server import serve

_HTTPS = 443
_ENDED = ("Succeeded", "Failed")


class Kubelet:
    """The kubelet of all nodes of a lab."""

    def __init__(self, configuration: KubeletConfig) -> None:
        self._configuration = configuration
        self._api = KubeletApi(configuration.api_socket, configuration.pki)
        self._nodes = SimulatedNodes(self._api, configuration.nodes, host=configuration.host, port=configuration.port)
        self._sandboxes = PodSandboxes(configuration.tag, configuration.folder, configuration.interfaces)
        self._pods: dict[str, LabPod] = {}
        self._services: dict[tuple[str, str], KubeObject] = {}
        self._pod_tasks: set[asyncio.Task[None]] = set()
        self._pending_requests: dict[str, asyncio.Task[None]] = {}
        """Requests that are repeated until the API server accepts them."""

    async def run(self) -> None:
        """Run until SIGTERM; remove all pods at the end."""
        folder = self._configuration.folder
        await retry_until_done(lambda: pvc.create_storage_class(self._api), "the storage class")
        to_apiserver = proxy.forward(proxy.to_unix(self._configuration.api_socket))
        await asyncio.start_server(to_apiserver, self._sandboxes.address, _HTTPS)
        tasks = [
            asyncio.create_task(one)
            for one in (
                serve(self._find, self._configuration.own_socket, self._configuration.pki),
                self._nodes.send_heartbeats(),
                self._watch_nodes(),
                self._watch_services(),
                self._watch_pods(),
                pvc.provision(self._api, folder / "claims"),
                pvc.reclaim(self._api),
            )
        ]
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await retry_until_done(self._nodes.register, "the nodes")
        try:
            await asyncio.wait({asyncio.create_task(stop.wait()), *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._sandboxes.remove()

    async def _watch_nodes(self) -> None:
        async for there, node in self._api.watch("/api/v1/nodes"):
            name = node["metadata"]["name"]
            if not there or name not in self._nodes:
                continue
            off = node["metadata"].get("annotations", {}).get(POWER) == "off"
            if off and name not in self._nodes.off:
                self._nodes.off.add(name)
                logging.info("%s is off", name)
                await asyncio.gather(*(pod.power_off() for pod in self._pods.values() if pod.node == name))
            elif not off and name in self._nodes.off:
                await self._switch_on(name)
            elif not off:
                await self._nodes.report_if_not_ready(node)

    async def _switch_on(self, name: str) -> None:
        """Report the pods that ran on a node when it was powered off as gone."""
        await retry_until_done(partial(self._nodes.switch_on, name), f"node {name}")
        for uid in [uid for uid, pod in self._pods.items() if pod.node == name]:
            self._pods.pop(uid).remove_files()
        bound = await retry_until_done(
            partial(self._api.get, f"/api/v1/pods?fieldSelector=spec.nodeName={name}"), f"pods of {name}"
        )
        for one in bound["items"]:
            self._on_pod_change(one)

    async def _watch_services(self) -> None:
        async for there, service in self._api.watch("/api/v1/services"):
            key = (service["metadata"]["namespace"], service["metadata"]["name"])
            if there:
                self._services[key] = service
            else:
                self._services.pop(key, None)
            self._write_hosts()

    async def _watch_pods(self) -> None:
        async for there, pod in self._api.watch("/api/v1/pods"):
            node = pod["spec"].get("nodeName")
            if node not in self._nodes or node in self._nodes.off:
                continue
            if there:
                self._on_pod_change(pod)
            elif gone := self._pods.pop(pod["metadata"]["uid"], None):
                await gone.power_off()
                gone.remove_files()

    def _on_pod_change(self, pod: KubeObject) -> None:
        uid, phase = pod["metadata"]["uid"], pod.get("status", {}).get("phase", "Pending")
        if known := self._pods.get(uid):
            known.update(pod)
            if known.ended and known.to_be_deleted:
                self._delete(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            self._delete(pod)
        elif phase == "Pending":
            self._start_pod(pod)
        elif phase not in _ENDED:
            self._mark_lost(pod)

    def _start_pod(self, pod: KubeObject) -> None:
        made = LabPod(
            pod,
            api=self._api,
            sandboxes=self._sandboxes,
            folder=self._configuration.folder / "pods",
            host=self._configuration.host,
            bad_images=self._configuration.bad_images,
            on_change=self._write_hosts,
        )
        self._pods[made.uid] = made
        task = asyncio.create_task(self._run_pod(made))
        self._pod_tasks.add(task)
        task.add_done_callback(self._pod_tasks.discard)

    async def _run_pod(self, pod: LabPod) -> None:
        try:
            await pod.run()
        except Exception:
            logging.exception("pod %s", pod.path)
        if pod.to_be_deleted:
            self._delete(pod.pod)

    def _delete(self, pod: KubeObject) -> None:
        uid = pod["metadata"]["uid"]
        self._request(partial(self._api.delete, _path(pod), uid), f"the end of {_path(pod)}, {uid}")

    def _mark_lost(self, pod: KubeObject) -> None:
        """Mark a pod as failed that ran when its kubelet or its node went down."""
        uid = pod["metadata"]["uid"]
        status = {"phase": "Failed", "reason": "NodeLost", "message": "its node was off, or its kubelet ended"}
        change = {"metadata": {"uid": uid}, "status": status}
        self._request(partial(self._api.patch, f"{_path(pod)}/status", change), f"the loss of {_path(pod)}, {uid}")

    def _request(self, ask: Callable[[], Awaitable[object]], what: str) -> None:
        """Repeat a request for a pod's object in a separate task, independent of other pods."""

        async def run() -> None:
            try:
                await retry_until_done(ask, what)
            except Exception:
                logging.exception("%s", what)
            finally:
                del self._pending_requests[what]

        if what not in self._pending_requests:
            self._pending_requests[what] = asyncio.create_task(run())

    def _find(self, namespace: str, name: str) -> LabPod | None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        return next((pod for pod in self._pods.values() if pod.path == path), None)

    def _write_hosts(self) -> None:
        """Rewrite every pod's hosts file."""
        found = [(pod, named) for pod in self._pods.values() if (named := pod.dns_entry)]
        seen = [named for _, named in found]
        for pod, named in found:
            if pod.sandbox is not None:
                text = hosts.hosts_file(named, seen, self._services.values(), self._sandboxes.address)
                pod_sandbox.write_hosts(pod.sandbox.hosts, text)


def _path(pod: KubeObject) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def main() -> None:
    """`python -m lab.kubelet.kubelet CONFIGURATION`, started by lab.kubelet."""
    enter_rootless()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    configuration = load(Path(sys.argv[1]))
    asyncio.run(Kubelet(configuration).run())


if __name__ == "__main__":
    main()
