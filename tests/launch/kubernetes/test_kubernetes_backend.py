"""The backend against a real API server, scheduler and JobSet; KWOK pretends the machines, so nothing runs in pods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import yaml
from msgspec.structs import asdict

from holdfast.events import NodeCreated
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Finding, Owner
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import Certainty, MachineEvidence
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.kubernetes.client.cluster import ClusterClient
from holdfast.launch.kubernetes.incluster.kubernetes_backend import KubernetesBackend
from holdfast.launch.kubernetes.machine_list import _read as machines_of  # pyright: ignore[reportPrivateUsage] - its client is of the kubeconfig
from holdfast.launch.kubernetes.machine_list import _release as release  # pyright: ignore[reportPrivateUsage] - the same
from holdfast.launch.kubernetes.quarantine_object import QuarantineObject, with_machines_excluded
from holdfast.launch.target_machines import MachineState
from holdfast.run_dir import RunDir
from lab import Lab

pytestmark = pytest.mark.slow

MACHINE = """
apiVersion: v1
kind: Node
metadata: {name: pretended, labels: {type: kwok}}
status: {allocatable: {cpu: "8", memory: 8Gi, pods: "20"}, capacity: {cpu: "8", memory: 8Gi, pods: "20"}}
"""

GANG = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: run, namespace: NAMESPACE}
spec:
  failurePolicy: {maxRestarts: 0}
  replicatedJobs:
  - name: node
    replicas: 2
    template:
      spec:
        parallelism: 1
        completions: 1
        completionMode: Indexed
        backoffLimit: 2147483647
        podReplacementPolicy: TerminatingOrFailed
        template:
          metadata: {labels: {holdfast/run: run, holdfast/part: node}}
          spec:
            nodeSelector: {type: SELECTED}
            restartPolicy: Never
            containers: [{name: node, image: none}]
"""

GPU_FAILED = MachineEvidence(
    certainty=Certainty.CERTAIN, finding=Finding(code="gpu-failed", what="its GPU failed", owner=Owner.CLUSTER)
)
ACCEPTED = RunSpec(job=Job(command=("true",)), base="/", created_at=1.0, fabric="tcp")


def at(node: int, generation: int) -> NodeId:
    return NodeId(node=node, generation=generation)


class Site:
    """A gang on a lab, and the backend that sees it."""

    def __init__(self, lab: Lab, namespace: str, folder: Path) -> None:
        self.lab, self.namespace = lab, namespace
        self.run = RunDir(folder / "run")
        self.run.path.mkdir(exist_ok=True)
        self.backend = KubernetesBackend(folder=self.run, accepted=ACCEPTED, cluster=ClusterClient(namespace=namespace))
        self._log = EventWriter(self.run.events)
        self._seen: AsyncIterator[NodeObservation] = self.backend.observe()

    def make(self, machine: str = "kwok") -> None:
        self.lab.kubectl("apply", "-f", "-", input=MACHINE)
        self.lab.kubectl(
            "create", "-f", "-", input=GANG.replace("NAMESPACE", self.namespace).replace("SELECTED", machine)
        )

    async def kubectl(self, *words: str) -> str:
        return await asyncio.to_thread(self.lab.kubectl, "-n", self.namespace, *words)

    async def pod(self, node: int) -> list[str]:
        """Name and address of a node's pod."""
        said = await self.kubectl(
            "get",
            "pod",
            "-l",
            f"jobset.sigs.k8s.io/job-index={node}",
            "-o",
            "jsonpath={.items[0].metadata.name} {.items[0].status.podIP}",
        )
        return said.split()

    async def machine_of_later_run(self, avoided: tuple[str, ...]) -> str:
        """Where the scheduler places a pod of another run that avoids these machines."""
        gang = yaml.safe_load(GANG.replace("NAMESPACE", self.namespace).replace("SELECTED", "kwok"))
        gang["metadata"]["name"] = "later"
        gang["spec"]["replicatedJobs"][0]["replicas"] = 1
        later = json.dumps(with_machines_excluded(gang, avoided))
        await asyncio.to_thread(self.lab.kubectl, "create", "-f", "-", input=later)
        pods = ("pod", "-l", "jobset.sigs.k8s.io/jobset-name=later")
        await self.kubectl("wait", *pods, "--for=create", "--timeout=60s")
        await self.kubectl("wait", *pods, "--for=condition=PodScheduled", "--timeout=60s")
        machine = await self.kubectl("get", *pods, "-o", "jsonpath={.items[0].spec.nodeName}")
        await self.kubectl("delete", "jobset", "later", "--wait=false")
        return machine

    async def suspend(self, suspended: bool) -> None:
        patch = json.dumps({"spec": {"suspend": suspended}})
        await self.kubectl("patch", "jobset", "run", "--type=merge", "-p", patch)

    async def next(self) -> NodeObservation:
        return await anext(self._seen)

    async def created(self) -> NodeObservation:
        while (seen := await self.next()).state is not BackendNodeState.CREATED:
            pass
        return seen

    async def sees(self, *expected: tuple[NodeId, BackendNodeState]) -> None:
        """Wait for these, in any order, passing over what is said of nodes that are still awaited."""
        missing = set(expected)
        while missing:
            seen = await anext(self._seen)
            if seen.state is BackendNodeState.CREATED:
                self._log.append([NodeCreated(at=0.0, **asdict(seen.node_id), backend_id=seen.backend_id)])
            if seen.state is not BackendNodeState.UNAVAILABLE:
                missing.remove((seen.node_id, seen.state))


def played(lab: Lab, namespace: str, folder: Path, scene: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(280):
            await scene(Site(lab, namespace, folder))

    try:
        asyncio.run(whole())
    finally:
        # Pods of other tests would be put on it, and never run.
        lab.kubectl("delete", "node", "pretended", "pretended-spare", "--ignore-not-found")


Play = Callable[[Callable[[Site], Awaitable[None]]], None]


@pytest.fixture
def play(lab: Lab, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))
    return lambda scene: played(lab, namespace, tmp_path, scene)


def test_pods_are_nodes_and_are_replaced_one_by_one(play: Play, lab: Lab, namespace: str, tmp_path: Path) -> None:
    async def scene(here: Site) -> None:
        here.make()
        await here.backend.submit((at(0, 0), at(1, 0)))
        await here.sees((at(0, 0), BackendNodeState.CREATED), (at(1, 0), BackendNodeState.CREATED))
        (first, first_address), (second, _) = await here.pod(0), await here.pod(1)
        assert here.backend.generation(0, first_address) == 0
        # One that somebody removes is made anew by the cluster, and is the next generation once that is asked for.
        await here.kubectl("delete", "pod", second, "--grace-period=0", "--force")
        await here.sees((at(1, 0), BackendNodeState.TERMINATED))
        await here.backend.replace_node(at(1, 1), "its pod is gone")
        await here.sees((at(1, 1), BackendNodeState.CREATED))
        # One that is given up although it lives.
        await here.backend.replace_node(at(0, 1), "it is too slow")
        await here.sees((at(0, 1), BackendNodeState.CREATED))
        assert (await here.pod(0))[0] != first
        # A second order to delete its former Job leaves the new one alone.
        job = "/apis/batch/v1/namespaces/{namespace}/jobs/run-node-0"
        cluster = ClusterClient(namespace=namespace)
        new = (await cluster.get(job))["metadata"]["uid"]
        await cluster.delete(job, uid="of-the-former")
        assert (await cluster.get(job))["metadata"]["uid"] == new
        # The controller that comes after this one knows who is who.
        other = Site(lab, namespace, tmp_path)
        looking = asyncio.ensure_future(anext(other.backend.observe()))
        address = (await here.pod(0))[1]
        while other.backend.generation(0, address) != 1:  # noqa: ASYNC110 - it looks by itself, and tells nobody
            await asyncio.sleep(0.05)
        assert not looking.done()
        looking.cancel()
        for node in (0, 1):
            await here.kubectl("annotate", "pod", (await here.pod(node))[0], "lab.holdfast/exit=0")
        await here.backend.cancel()
        await here.kubectl("wait", "jobset/run", "--for=condition=Completed", "--timeout=60s")

    play(scene)


def test_replacement_avoids_the_machine_of_a_failed_device(play: Play, lab: Lab) -> None:
    async def scene(here: Site) -> None:
        here.make()
        await here.backend.submit((at(0, 0), at(1, 0)))
        machines = {(await here.created()).machine for _ in range(2)}
        assert machines == {"pretended"}
        assert await here.backend.avoid_machine(at(0, 0), "pretended", None) == ()
        await here.backend.replace_node(at(0, 1), "its GPU failed")
        while (seen := await here.next()).state is not BackendNodeState.UNAVAILABLE or "avoids" not in seen.reason:
            pass
        assert seen.reason == "its pod was placed on pretended, which this run avoids"
        lab.kubectl("apply", "-f", "-", input=MACHINE.replace("pretended", "pretended-spare"))
        assert (await here.created()).machine == "pretended-spare"
        quarantined, cordoned = await here.backend.avoid_machine(at(1, 0), "pretended", GPU_FAILED)
        assert (quarantined.code, cordoned.code) == ("machine-quarantined", "machine-cordoned")
        cluster = ClusterClient(namespace=here.namespace)
        listed = {each.name: each for each in (await machines_of(cluster, {"type": "kwok"})).machines}
        assert listed["pretended"].state is MachineState.QUARANTINED
        assert listed["pretended-spare"].runs == ("run",)
        unschedulable, _, why = (await here.kubectl("get", "node", "pretended", "-o", CORDON)).partition(" ")
        assert (unschedulable, why.partition(",")[0]) == ("true", "pretended: gpu-failed")
        await here.kubectl("wait", "node/pretended", f"--for=jsonpath={TAINT}=NoSchedule", "--timeout=60s")
        assert f"holdfast/quarantine: {why}\n" in await here.kubectl("describe", "node", "pretended")
        await here.kubectl("uncordon", "pretended")
        assert await here.machine_of_later_run(await quarantined_machines(cluster)) == "pretended-spare"
        assert await release(cluster, "gpus", "pretended") == ()
        assert await here.kubectl("get", "node", "pretended", "-o", CORDON) == " "
        assert await quarantined_machines(cluster) == ()
        # The run in progress uses it too, once no other machine is left for a pod.
        lab.kubectl("delete", "node", "pretended-spare")
        await here.backend.replace_node(at(0, 2), "its machine is gone")
        while (seen := await here.next()).node_id != at(0, 2) or seen.state is not BackendNodeState.CREATED:
            pass
        assert seen.machine == "pretended"

    play(scene)


TAINT = '{.spec.taints[?(@.key=="node.kubernetes.io/unschedulable")].effect}'
CORDON = r"jsonpath={.spec.unschedulable} {.metadata.annotations.holdfast/quarantine}"


async def quarantined_machines(cluster: ClusterClient) -> tuple[str, ...]:
    return tuple(row.machine for row in (await QuarantineObject(cluster).read())[0].active(time.time()))


def test_pod_that_finds_no_machine_says_why(play: Play) -> None:
    async def scene(here: Site) -> None:
        here.make(machine="none-such")
        await here.backend.submit((at(0, 0), at(1, 0)))
        async for seen in here.backend.observe():
            assert seen.state is BackendNodeState.UNAVAILABLE
            if "didn't match Pod's node affinity/selector" in seen.reason:
                return

    play(scene)


def test_gang_that_is_suspended_is_evicted_and_waits_until_it_is_admitted(play: Play) -> None:
    async def scene(here: Site) -> None:
        here.make()
        await here.backend.submit((at(0, 0), at(1, 0)))
        await here.sees((at(0, 0), BackendNodeState.CREATED), (at(1, 0), BackendNodeState.CREATED))
        await here.suspend(True)
        gone = (
            (at(node, 0), sight) for node in (0, 1) for sight in (BackendNodeState.EVICTED, BackendNodeState.TERMINATED)
        )
        await here.sees(*gone)
        for node in (0, 1):
            await here.backend.replace_node(at(node, 1), "its pod is gone")
        waiting = {(seen.node_id, seen.state, seen.reason) for seen in [await here.next() for _ in range(2)]}
        assert waiting == {(at(node, 1), BackendNodeState.UNAVAILABLE, "JobSet run is suspended") for node in (0, 1)}
        await here.suspend(False)
        await here.sees((at(0, 1), BackendNodeState.CREATED), (at(1, 1), BackendNodeState.CREATED))

    play(scene)


def test_what_happened_while_the_api_server_was_away_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path / "lab")  # of its own: what else runs there does not bear this
    lab.up(dies_with_parent=True)
    monkeypatch.setenv("KUBECONFIG", str(lab.kubeconfig))

    async def scene(here: Site) -> None:
        here.make()
        await here.backend.submit((at(0, 0), at(1, 0)))
        await here.sees((at(0, 0), BackendNodeState.CREATED), (at(1, 0), BackendNodeState.CREATED))
        lab.kill("kube-apiserver")
        removing = asyncio.ensure_future(here.backend.replace_node(at(0, 1), "while nobody answers"))
        _, waiting = await asyncio.wait((removing,), timeout=2)
        assert waiting
        lab.start("kube-apiserver")
        await removing
        await here.sees((at(0, 1), BackendNodeState.CREATED))

    try:
        played(lab, "default", tmp_path, scene)
    finally:
        lab.down()
