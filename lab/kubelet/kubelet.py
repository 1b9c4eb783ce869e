"""The kubelet: watches the API server, runs the pods of its nodes, and maintains their host names."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path

from holdfast.launch.local.netns import enter_rootless
from lab.kubelet import hosts, pod_sandbox, proxy, pvc
from lab.kubelet.api import KubeletApi, KubeObject, retry_until_done
from lab.kubelet.configuration import KubeletConfig, load
from lab.kubelet.nodes import STATE, NodeState, SimulatedNodes
from lab.kubelet.pod import Eviction, LabPod
from lab.kubelet.pod_sandbox import PodSandboxes
from lab.kubelet.server import serve

_HTTPS = 443
_ENDED = ("Succeeded", "Failed")
_EVICTIONS = {
    NodeState.DISK_FULL: Eviction("Evicted", "The node was low on resource: ephemeral-storage. ", grace_s=1.0),
    NodeState.SHUT_DOWN: Eviction(
        "Terminated", "Pod was terminated in response to imminent node shutdown.", grace_s=30.0
    ),
}
"""What happens to a node's pods when it enters a state; reasons, messages and the first grace are the kubelet's."""
_REJECTIONS = {
    NodeState.DISK_FULL: ("Evicted", "Pod was rejected: The node had condition: [DiskPressure]. "),
    NodeState.SHUT_DOWN: ("NodeShutdown", "Pod was rejected: Pod was rejected as the node is shutting down."),
}
"""Why a node in a state accepts no pod."""


class Kubelet:
    """The kubelet of all nodes of a lab."""

    def __init__(self, configuration: KubeletConfig) -> None:
        self._configuration = configuration
        self._api = KubeletApi(configuration.api_socket, configuration.pki)
        self._nodes = SimulatedNodes(self._api, configuration.nodes, host=configuration.host, port=configuration.port)
        self._sandboxes = PodSandboxes(configuration.tag, configuration.folder, configuration.interfaces)
        self._pods: dict[str, LabPod] = {}
        self._services: dict[tuple[str, str], KubeObject] = {}
        self._tasks: set[asyncio.Task[None]] = set()
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
            state = NodeState(node["metadata"].get("annotations", {}).get(STATE, NodeState.ON))
            if state is not self._nodes.state(name):
                await self._enter(name, state)
            elif state is NodeState.ON:
                await self._nodes.report_if_not_ready(node)

    async def _enter(self, name: str, state: NodeState) -> None:
        """Put a node into a state, with what that does to its pods."""
        logging.info("%s is %s", name, state)
        await self._nodes.enter(name, state)
        pods = [pod for pod in self._pods.values() if pod.node == name]
        for pod in pods:
            pod.reported = state is not NodeState.KUBELET_DOWN
            if eviction := _EVICTIONS.get(state):
                pod.evict(eviction)
        if state is NodeState.OFF:
            await asyncio.gather(*(pod.power_off() for pod in pods))
        elif state is NodeState.SHUT_DOWN:
            self._do(self._silence_after(name, pods))
        elif state is NodeState.ON:
            await self._resume(name, pods)

    async def _silence_after(self, name: str, pods: list[LabPod]) -> None:
        """Silence a node that shuts down, once its pods have ended."""
        await asyncio.gather(*(pod.ended.wait() for pod in pods))
        if self._nodes.state(name) is NodeState.SHUT_DOWN:
            self._nodes.silent.add(name)

    async def _resume(self, name: str, pods: list[LabPod]) -> None:
        """Catch up on a node's pods: those that its power failure ended are lost, those deleted meanwhile stop."""
        bound = await retry_until_done(
            partial(self._api.get, f"/api/v1/pods?fieldSelector=spec.nodeName={name}"), f"pods of {name}"
        )
        kept = {one["metadata"]["uid"] for one in bound["items"]}
        for pod in pods:
            if pod.powered_off or pod.uid not in kept:
                await self._remove(pod)
            else:
                await pod.report_status()
        for one in bound["items"]:
            self._on_pod_change(one)

    async def _remove(self, pod: LabPod) -> None:
        """Kill a pod whose object is gone, and remove its files."""
        self._pods.pop(pod.uid, None)
        if not pod.powered_off:
            await pod.power_off()
        pod.remove_files()

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
            if node not in self._nodes or node in self._nodes.silent:
                continue
            if there:
                self._on_pod_change(pod)
            elif gone := self._pods.get(pod["metadata"]["uid"]):
                await self._remove(gone)

    def _on_pod_change(self, pod: KubeObject) -> None:
        uid, phase = pod["metadata"]["uid"], pod.get("status", {}).get("phase", "Pending")
        if known := self._pods.get(uid):
            known.update(pod)
            if known.ended.is_set() and known.to_be_deleted:
                self._delete(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            self._delete(pod)
        elif phase == "Pending" and (why := _REJECTIONS.get(self._nodes.state(pod["spec"]["nodeName"]))):
            self._fail(pod, *why)
        elif phase == "Pending":
            self._start_pod(pod)
        elif phase not in _ENDED:
            self._fail(pod, "NodeLost", "its node was off, or its kubelet ended")

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
        self._do(self._run_pod(made))

    def _do(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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

    def _fail(self, pod: KubeObject, reason: str, message: str) -> None:
        """Mark a pod as failed that is not run here, or no longer."""
        uid = pod["metadata"]["uid"]
        status = {"phase": "Failed", "reason": reason, "message": message}
        change = {"metadata": {"uid": uid}, "status": status}
        self._request(partial(self._api.patch, f"{_path(pod)}/status", change), f"the failure of {_path(pod)}, {uid}")

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
        found = (pod for pod in self._pods.values() if pod.path == path and pod.node not in self._nodes.silent)
        return next(found, None)

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
