"""Places nodes on a target's own machines: one node each, and none on a machine that is avoided."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Iterable

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import atomic_write, read_line
from holdfast.job.backend import NodeId
from holdfast.job.quarantine import Candidate, Certainty, MachineEvidence
from holdfast.launch.quarantine_file import QuarantineFile, remember
from holdfast.run_dir import RunDir

MACHINE_NAME = "machine"
"""The name of a node's machine, in the node's folder."""


class MachinePool:
    """The machines of one run; `have_names` is whether others see them by name."""

    def __init__(self, folder: RunDir, names: tuple[str, ...], *, have_names: bool, quarantine: QuarantineFile) -> None:
        self._folder, self._have_names = folder, have_names
        self._quarantine = quarantine
        self.names = names
        """In the order in which they are chosen."""
        self._cordoned: dict[NodeId, str] = {}
        """By the lost node whose loss took the machine out of use."""
        self._avoided: set[str] = set()
        self._quarantined = self._read_quarantined(quarantine) if have_names else frozenset[str]()

    def _read_quarantined(self, quarantine: QuarantineFile) -> frozenset[str]:
        """Machines that other runs have quarantined: this run's own are avoided if another is free."""
        rows = quarantine.read()[0].active(time.time())
        return frozenset(row.machine for row in rows if row.run != self._folder.run_id)

    def choose(self, node_id: NodeId, live: Iterable[NodeId], unusable: Container[str] = ()) -> str | None:
        """A free machine for a node, rather another than its slot's last; None if there is none."""
        free = [name for name in self.free(live) if name not in unusable]
        before = self.machine(NodeId(node=node_id.node, generation=node_id.generation - 1))
        return min(free, key=lambda name: (name == before, self.names.index(name)), default=None)

    @property
    def out_of_use(self) -> frozenset[str]:
        """Machines that this run has avoided, and those that other runs had quarantined, while a quarantine lasts."""
        bad = self._quarantined | self._avoided
        return bad - self._quarantine.read()[0].over(time.time()) if bad and self._have_names else bad

    def place(self, node_id: NodeId, machine: str) -> None:
        """Record where a node is."""
        node_folder = self._folder.node_dir(node_id.node, node_id.generation)
        node_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(node_folder / MACHINE_NAME, machine.encode())

    def name_of(self, node_id: NodeId) -> str:
        """The name of a node's machine; empty if machines have none here."""
        return self.machine(node_id) if self._have_names else ""

    def avoid(self, machine: str, others: Iterable[NodeId]) -> bool:
        """Place no further node on a machine, if one is free besides those of the other nodes; returns whether."""
        if not machine or not [name for name in self.free(others) if name != machine]:
            return False
        self._avoided.add(machine)
        return True

    async def avoid_failed(
        self, node: int, machine: str, others: Iterable[NodeId], evidence: MachineEvidence | None, *, remedy: str
    ) -> tuple[Finding, ...]:
        """Avoid the machine of a node that failed, and store the evidence for later runs.

        Returns what the user must know; `remedy` is what to do if no other machine is free.
        """
        avoided = self.avoid(machine, others)
        if evidence is None:
            return ()
        findings = await asyncio.to_thread(self._remember, machine, evidence) if machine else ()
        if avoided or evidence.certainty is Certainty.CHECK:
            return findings
        same = Finding(
            code="machine-not-avoided",
            severity=Severity.WARNING,
            what=f"the replacement of node{node} may run on the same machine: no other is free",
            where=f"node{node}",
            remedy=remedy,
            owner=Owner.CLUSTER,
        )
        return (same, *findings)

    def _remember(self, machine: str, evidence: MachineEvidence) -> tuple[Finding, ...]:
        candidate = Candidate(machine=machine, run=self._folder.run_id, evidence=evidence)
        return remember(self._quarantine, candidate, machines=len(self.names), target=self._quarantine.target)

    def cordon(self, node_id: NodeId) -> None:
        self._cordoned[node_id] = self.machine(node_id)

    def uncordon(self, node_id: NodeId) -> None:
        self._cordoned.pop(node_id, None)

    def unavailable_reason(self) -> str:
        """Why no machine is free."""
        out = f", {len(self._cordoned)} of them out of use until `holdfast drill restore`" if self._cordoned else ""
        bad = self.out_of_use
        held = f", {len(bad)} of them quarantined (`holdfast nodes`)" if bad else ""
        return f"there are {len(self.names)} machines for nodes here{out}{held}"

    def free(self, live: Iterable[NodeId]) -> list[str]:
        """Machines without a node of these, in the order in which they are chosen."""
        taken = {*self._cordoned.values(), *self.out_of_use, *map(self.machine, live)}
        return [name for name in self.names if name not in taken]

    def machine(self, node_id: NodeId) -> str:
        """The machine of a node, whether it has a name for others or not; empty if none was chosen."""
        try:
            return read_line(self._folder.node_dir(node_id.node, node_id.generation) / MACHINE_NAME)
        except OSError:
            return ""
