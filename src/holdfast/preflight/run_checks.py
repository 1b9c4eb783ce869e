"""Runs the checks of a node, each apart, so that one that hangs or fails hides no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial

from holdfast.findings import CheckOutcome, CheckResult, Finding, Owner, Severity
from holdfast.host.daemon_threads import in_daemon_thread
from holdfast.preflight.checks import (
    cpu,
    environment,
    gpu,
    gpu_driver,
    gpu_links,
    limits,
    network,
    pcie,
    ports,
    rdma,
    rdma_links,
    rdma_software,
    roce,
    software,
    storage,
)
from holdfast.preflight.gpu_facts import gpu_facts
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import needs_rdma
from holdfast.protocol.node_requirements import NodeRequirements

Check = Callable[[NodeView], Iterator[Finding]]
"""Yields what is wrong; raises NotLookedAt if it cannot look."""

HOST_CHECKS: tuple[Check, ...] = (
    limits.shared_memory,
    network.interface_exists,
    network.host_name,
    network.interface_speed,
    ports.rendezvous_ports,
    ports.sidecar,
    storage.disk_space,
    storage.disk_write,
    software.python,
    cpu.cpu_count,
    cpu.clock_sync,
    environment.fighting_variables,
)
GPU_CHECKS: tuple[Check, ...] = (
    gpu_driver.gpu_driver,
    gpu_driver.gpu_count,
    gpu.gpu_idle,
    gpu.gpu_ecc,
    gpu.gpu_throttle,
    gpu.gpu_persistence,
    gpu.gpu_clocks,
    gpu_links.gpu_nvlink,
    gpu_links.gpu_fabric_manager,
    gpu_links.gpu_pcie,
    software.accelerator_build,
    cpu.numa,
)
RDMA_CHECKS: tuple[Check, ...] = (
    limits.locked_memory,
    rdma.rdma_devices,
    rdma.rdma_ports,
    rdma.rdma_rate,
    rdma_links.rdma_links,
    roce.rdma_gid,
    roce.rdma_mtu,
    rdma_software.rdma_library,
)
GPU_RDMA_CHECKS: tuple[Check, ...] = (rdma_software.rdma_peer_memory, pcie.pcie_acs, pcie.iommu)


def quick_checks(wanted: NodeRequirements) -> tuple[Check, ...]:
    """The checks before a start on whose subject the job depends; together they take a second or two."""
    gpus, rdma_network = wanted.gpus > 0, needs_rdma(wanted)
    return (
        *HOST_CHECKS,
        *(GPU_CHECKS if gpus else ()),
        *(RDMA_CHECKS if rdma_network else ()),
        *(GPU_RDMA_CHECKS if gpus and rdma_network else ()),
    )


Facts = Callable[[NodeView], Mapping[str, str]]
"""What has to be the same on all nodes: a label for users, and its value; without what cannot be read."""

FACTS: tuple[Facts, ...] = (
    software.software_facts,
    gpu_facts,
    rdma.rdma_facts,
    network.network_facts,
    cpu.cpu_facts,
)


def run_checks(view: NodeView, checks: Sequence[Check], deadline_s: float) -> tuple[CheckResult, ...]:
    """Run the checks side by side; one that has not ended within `deadline_s` has failed, since its source hangs."""
    running = [(check, in_daemon_thread(partial(_run, check, view))) for check in checks]
    wait([future for _, future in running], deadline_s)
    return tuple(_result(check, future, deadline_s) for check, future in running)


def node_facts(view: NodeView, deadline_s: float) -> dict[str, str]:
    """What has to be the same on all nodes, as far as it can be read in time."""
    running = [in_daemon_thread(partial(facts, view)) for facts in FACTS]
    wait(running, deadline_s)
    read = (future.result() for future in running if future.done() and future.exception() is None)
    return {label: value for facts in read for label, value in facts.items()}


def name_of(check: Check) -> str:
    """The name of a check for users."""
    return check.__name__.replace("_", "-")


def _run(check: Check, view: NodeView) -> CheckResult:
    try:
        findings = tuple(check(view))
    except NotLookedAt as error:
        return CheckResult(check=name_of(check), outcome=CheckOutcome.NOT_LOOKED_AT, reason=str(error))
    except TimeoutError as error:
        findings = (_hangs(name_of(check), str(error)),)
    except Exception as error:  # a check of ours that fails must not fail the node
        return CheckResult(check=name_of(check), outcome=CheckOutcome.NOT_LOOKED_AT, reason=repr(error))
    failed = any(finding.severity is Severity.ERROR for finding in findings)
    outcome = CheckOutcome.FAILED if failed else CheckOutcome.PASSED
    return CheckResult(check=name_of(check), outcome=outcome, findings=findings)


def _result(check: Check, future: Future[CheckResult], deadline_s: float) -> CheckResult:
    if future.done():
        return future.result()
    hangs = _hangs(name_of(check), f"it has not ended within {deadline_s:g} s")
    return CheckResult(check=name_of(check), outcome=CheckOutcome.FAILED, findings=(hangs,))


def _hangs(check: str, evidence: str) -> Finding:
    return Finding(
        code="node-check-hangs",
        what=f"the check {check} does not end: a driver, a device or a file system of this node does not answer",
        where=check,
        evidence=(evidence,),
        remedy="Run the command by hand on this node. If it hangs there too, restart the node; see `dmesg`.",
        owner=Owner.CLUSTER,
    )
