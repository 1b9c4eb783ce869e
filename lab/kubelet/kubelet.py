"""Owns what runs where: it watches the API server, gives each pod of its nodes a life, and keeps their names."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from holdfast.launch.local.netns import enter_rootless
from lab.kubelet import claims, gate, names, network
from lab.kubelet.api import Api, Object, insist
from lab.kubelet.configuration import Configuration, load
from lab.kubelet.network import Berths
from lab.kubelet.nodes import POWER, Nodes
from lab.kubelet.pod import Pod
from lab.kubelet.server import serve

_HTTPS = 443
_ENDED = ("Succeeded", "Failed")


class Kubelet:
    """The kubelet of all nodes of a lab."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._api = Api(configuration.api_socket, configuration.pki)
        self._nodes = Nodes(self._api, configuration.nodes, host=configuration.host, port=configuration.port)
        self._berths = Berths(configuration.tag, configuration.folder)
        self._pods: dict[str, Pod] = {}
        self._services: dict[tuple[str, str], Object] = {}
        self._lives: set[asyncio.Task[None]] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}
        """What the API server is asked for until it does it."""

    async def run(self) -> None:
        """Until SIGTERM; nothing of it runs afterwards."""
        folder = self._configuration.folder
        await insist(lambda: claims.provide_class(self._api), "the storage class")
        to_apiserver = gate.forward(gate.to_unix(self._configuration.api_socket))
        await asyncio.start_server(to_apiserver, self._berths.address, _HTTPS)
        tasks = [
            asyncio.create_task(one)
            for one in (
                serve(self._find, self._configuration.own_socket, self._configuration.pki),
                self._nodes.beat(),
                self._watch_nodes(),
                self._watch_services(),
                self._watch_pods(),
                claims.provide(self._api, folder / "claims"),
                claims.take_back(self._api),
            )
        ]
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await insist(self._nodes.register, "the nodes")
        try:
            await asyncio.wait({asyncio.create_task(stop.wait()), *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            self._berths.remove()

    async def _watch_nodes(self) -> None:
        async for there, node in self._api.watch("/api/v1/nodes"):
            name = node["metadata"]["name"]
            if not there or name not in self._nodes:
                continue
            off = node["metadata"].get("annotations", {}).get(POWER) == "off"
            if off and name not in self._nodes.off:
                self._nodes.off.add(name)
                logging.info("%s is off", name)
                await asyncio.gather(*(pod.lose() for pod in self._pods.values() if pod.node == name))
            elif not off and name in self._nodes.off:
                await self._switch_on(name)
            elif not off:
                await self._nodes.see(node)

    async def _switch_on(self, name: str) -> None:
        """What ran there when it went off is gone, which is said now."""
        await insist(partial(self._nodes.switch_on, name), f"node {name}")
        for uid in [uid for uid, pod in self._pods.items() if pod.node == name]:
            self._pods.pop(uid).forget()
        bound = await insist(
            partial(self._api.get, f"/api/v1/pods?fieldSelector=spec.nodeName={name}"), f"pods of {name}"
        )
        for one in bound["items"]:
            self._see(one)

    async def _watch_services(self) -> None:
        async for there, service in self._api.watch("/api/v1/services"):
            key = (service["metadata"]["namespace"], service["metadata"]["name"])
            if there:
                self._services[key] = service
            else:
                self._services.pop(key, None)
            self._rename()

    async def _watch_pods(self) -> None:
        async for there, pod in self._api.watch("/api/v1/pods"):
            node = pod["spec"].get("nodeName")
            if node not in self._nodes or node in self._nodes.off:
                continue
            if there:
                self._see(pod)
            elif gone := self._pods.pop(pod["metadata"]["uid"], None):
                await gone.lose()
                gone.forget()

    def _see(self, pod: Object) -> None:
        uid, phase = pod["metadata"]["uid"], pod.get("status", {}).get("phase", "Pending")
        if known := self._pods.get(uid):
            known.see(pod)
            if known.ended and known.to_be_deleted:
                self._delete(pod)
        elif "deletionTimestamp" in pod["metadata"]:
            self._delete(pod)
        elif phase == "Pending":
            self._live(pod)
        elif phase not in _ENDED:
            self._disown(pod)

    def _live(self, pod: Object) -> None:
        made = Pod(
            pod,
            api=self._api,
            berths=self._berths,
            folder=self._configuration.folder / "pods",
            host=self._configuration.host,
            bad_images=self._configuration.bad_images,
            changed=self._rename,
        )
        self._pods[made.uid] = made
        task = asyncio.create_task(self._run(made))
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    async def _run(self, pod: Pod) -> None:
        try:
            await pod.run()
        except Exception:
            logging.exception("pod %s", pod.path)
        if pod.to_be_deleted:
            self._delete(pod.pod)

    def _delete(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        self._ask(partial(self._api.delete, _path(pod), uid), f"the end of {_path(pod)}, {uid}")

    def _disown(self, pod: Object) -> None:
        """A pod that ran when its kubelet or its node ended does so no more."""
        uid = pod["metadata"]["uid"]
        status = {"phase": "Failed", "reason": "NodeLost", "message": "its node was off, or its kubelet ended"}
        change = {"metadata": {"uid": uid}, "status": status}
        self._ask(partial(self._api.patch, f"{_path(pod)}/status", change), f"the loss of {_path(pod)}, {uid}")

    def _ask(self, ask: Callable[[], Awaitable[object]], what: str) -> None:
        """Have something done to a pod's object; no other pod waits for that, and none suffers from it."""

        async def asked() -> None:
            try:
                await insist(ask, what)
            except Exception:
                logging.exception("%s", what)
            finally:
                del self._asking[what]

        if what not in self._asking:
            self._asking[what] = asyncio.create_task(asked())

    def _find(self, namespace: str, name: str) -> Pod | None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        return next((pod for pod in self._pods.values() if pod.path == path), None)

    def _rename(self) -> None:
        """Write every pod's names anew."""
        found = [(pod, named) for pod in self._pods.values() if (named := pod.named)]
        seen = [named for _, named in found]
        for pod, named in found:
            if pod.berth is not None:
                text = names.hosts(named, seen, self._services.values(), self._berths.address)
                network.write(pod.berth.hosts, text)


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def main() -> None:
    """`python -m lab.kubelet.kubelet CONFIGURATION`, started by the gate."""
    enter_rootless()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    configuration = load(Path(sys.argv[1]))
    asyncio.run(Kubelet(configuration).run())


if __name__ == "__main__":
    main()
