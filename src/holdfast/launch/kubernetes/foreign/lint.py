"""Lints manifests that others wrote: one table of rules over the common form of their workloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from holdfast.findings import Finding, Severity
from holdfast.job.yaml_source import printable
from holdfast.launch.kubernetes.foreign import fabric_rules, operator_rules, pod_rules
from holdfast.launch.kubernetes.foreign.foreign_kinds import KINDS, is_companion, kind_of, read_workload
from holdfast.launch.kubernetes.foreign.json_patch import Patch, PatchOperation, apply
from holdfast.launch.kubernetes.foreign.manifest_source import ManifestObject, parse_manifest
from holdfast.launch.kubernetes.foreign.mistake import Mistake
from holdfast.launch.kubernetes.foreign.training_workload import TrainingWorkload

Rule = Callable[[TrainingWorkload], Iterator[Mistake]]

RULES: tuple[Rule, ...] = (
    pod_rules.default_shm,
    pod_rules.shm_on_disk,
    fabric_rules.socket_interface,
    pod_rules.no_checkpoint,
    fabric_rules.tcp_fallback,
    operator_rules.no_topology,
    operator_rules.restart_budget,
    fabric_rules.mpi_environment,
    fabric_rules.rdma_rights,
    fabric_rules.rdma_disabled,
    operator_rules.no_gang,
    operator_rules.lone_restart,
    operator_rules.never_ends,
    operator_rules.ordered_start,
    operator_rules.rank_count,
    pod_rules.env_not_text,
    pod_rules.request_without_limit,
    pod_rules.container_name,
    pod_rules.reserved_variable,
    pod_rules.host_network_dns,
)
"""All rules, one function each."""

MAX_FIXES = 200
"""Patches of one object; more mistakes than that are not a manifest's."""


class ManifestFinding(Finding, frozen=True, kw_only=True, omit_defaults=True):
    """A finding in a manifest, with the patch that fixes it."""

    object: str = ""
    """Kind and name of the object."""
    patch: tuple[PatchOperation, ...] = ()
    """JSON patch of that object which removes the finding; it is valid on its own."""


class LintedManifest(Struct, frozen=True, kw_only=True):
    """The result of linting a file."""

    findings: tuple[Finding, ...]
    workloads: tuple[TrainingWorkload, ...]

    @property
    def is_valid(self) -> bool:
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


def lint_manifest(text: str, file: str) -> LintedManifest:
    """All findings in a manifest file, by line."""
    source = parse_manifest(text, file)
    workloads = [workload for target in source.objects if (workload := read_workload(target)) and workload.is_training]
    findings = [*source.findings, *(finding for each in workloads for finding in lint_workload(each))]
    if not source.findings:
        findings += _unread(source.objects, workloads, file)
    return LintedManifest(findings=tuple(sorted(findings, key=_order)), workloads=tuple(workloads))


def lint_workload(workload: TrainingWorkload) -> list[ManifestFinding]:
    """The findings of one workload, in the order of the rules."""
    return [_finding(workload, mistake) for rule in RULES for mistake in rule(workload)]


def combined_patch(workload: TrainingWorkload) -> Patch:
    """One patch that removes all findings that have a patch: each is made for the object as patched before."""
    combined = Patch()
    for _ in range(MAX_FIXES):
        mistake = next((each for rule in RULES for each in rule(workload) if each.patch.steps), None)
        patched = read_workload(apply(mistake.patch, workload.target)) if mistake else None
        if mistake is None or patched is None:
            break
        combined, workload = combined + mistake.patch, patched
    return combined


def _finding(workload: TrainingWorkload, mistake: Mistake) -> ManifestFinding:
    place = workload.target.location(mistake.path)
    evidence = mistake.evidence if mistake.evidence is not None else (printable(place.line),)
    return ManifestFinding(
        code=mistake.code,
        what=mistake.what,
        severity=mistake.severity,
        where=place.where,
        evidence=evidence,
        remedy=mistake.remedy,
        owner=mistake.owner,
        object=printable(workload.title),
        patch=mistake.patch.operations,
    )


def _unread(objects: list[ManifestObject], workloads: list[TrainingWorkload], file: str) -> Iterator[Finding]:
    """What was not linted; an error if the file has no object of a known kind."""
    checked = [workload.target for workload in workloads]
    known = f"It checks {', '.join(sorted({kind for _, kind in KINDS}))}."
    severity = Severity.INFO if any(map(kind_of, objects)) else Severity.ERROR
    for target in objects:
        if any(target is each for each in checked) or is_companion(target):
            continue
        name = printable(f"{target.kind or 'object without a kind'} {target.name}".strip())
        where = target.location(("kind",)).where
        if kind_of(target) is None:
            what = f"`{name}` of {printable(target.api_version) or 'no API'} is not a kind that holdfast checks"
            yield Finding(code="manifest-not-checked", what=what, severity=severity, where=where, remedy=known)
        elif read_workload(target) is None:
            what = f"`{name}` has no pod template with containers where holdfast looks for it"
            remedy = f"Check it against the API {printable(target.api_version)}."
            yield Finding(code="manifest-not-checked", what=what, severity=Severity.INFO, where=where, remedy=remedy)
        else:
            what = f"`{name}` requests no GPUs and starts no launcher such as torchrun, so it was not checked"
            yield Finding(code="manifest-not-checked", what=what, severity=Severity.INFO, where=where)
    if all(map(is_companion, objects)):
        what = "the file has no object that creates the pods of a training job"
        yield Finding(code="manifest-not-checked", what=what, where=printable(file), remedy=known)


def _order(finding: Finding) -> tuple[int, str]:
    line = finding.where.rpartition(":")[2]
    return (int(line) if line.isdecimal() and len(line) < 10 else 0, finding.code)


def patch_lines(operations: tuple[PatchOperation, ...]) -> list[str]:
    """The patch in YAML, one operation per line, as `kubectl patch --type=json --patch-file` reads it."""
    return [f"- {msgspec.json.encode(operation).decode()}" for operation in operations]
