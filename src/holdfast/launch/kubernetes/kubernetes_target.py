"""The Kubernetes target: an operator creates a run's nodes as pods, and the controller is a pod too."""

from __future__ import annotations

import getpass
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError, require_extra
from holdfast.fabric.catalog import resolve
from holdfast.findings import Severity
from holdfast.job.run_spec import CodeArchive, RunSpec
from holdfast.job.spec import CheckLevel, Checks, Job, OnFallback
from holdfast.job.target_files import target_file
from holdfast.job.target_templates import template_use
from holdfast.job.targets import ManifestTemplate, TargetSpec, located_in_target
from holdfast.launch.code.package_code import code_findings, submitted_code
from holdfast.launch.new_run import new_run_dir, write_inputs
from holdfast.launch.secret_values import missing_secrets, read_notify_secrets, read_secrets
from holdfast.launch.start_supervisor import start_supervisor
from holdfast.launch.target import ON_NODES, ControllerHooks, Rendered, Submission, Target, refuse_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.findings import Finding
    from holdfast.job.backend import Backend
    from holdfast.launch.kubernetes.manifests.render_context import RenderContext
    from holdfast.launch.kubernetes.object_names import ObjectNames
    from holdfast.launch.policy_request import PolicyRequest
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.launch.target_runs import TargetRun, TargetRuns
    from holdfast.run_dir import RunDir


class KubernetesTarget:
    """Runs jobs on a cluster. Imports on use, because the parts of a start are timed against one another."""

    can_update_code = False

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """Problems of the job on any cluster, each with its line in the job's or the target's file."""
        secrets = missing_secrets(wanted.job, wanted.base.absolute(), os.environ, wanted.spec.notify)
        code = code_findings(wanted) if wanted.spec.agent else ()
        return (*_manifest_findings(wanted), *map(wanted.loaded.located, (*secrets, *code)))

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """The same and what the cluster lacks, asked as this user."""
        known = self.check(wanted)
        of_target = tuple(_located(each, wanted) for each in _target_findings(wanted))
        if for_any_job:
            known = of_target
        if any(each.code == "no-image" for each in known) or any(each.severity is Severity.ERROR for each in of_target):
            return known
        _require_client()
        from holdfast.launch.kubernetes.client.api_errors import as_holdfast_error
        from holdfast.launch.kubernetes.preflight.check_clusters import check_clusters

        with as_holdfast_error():
            found = check_clusters(_context(wanted, None))
        lacking = (_located_in_target(each, wanted) for each in found)
        return (*known, *_template_findings(wanted), *lacking)

    def render(self, wanted: Submission) -> Rendered:
        """The run's objects."""
        from holdfast.launch.kubernetes.manifests.run_manifests import render

        findings = _manifest_findings(wanted)
        refuse_errors(findings)
        if wanted.tree is not None:
            return _render_tree(wanted, wanted.tree, findings)
        with tempfile.TemporaryDirectory() as scratch:
            rendering = render(_context(wanted, _code(wanted, Path(scratch))))
        return Rendered(text=rendering.text, findings=findings, objects=tuple(rendering.objects))

    def start(self, wanted: Submission) -> RunDir:
        """Create the run's objects; the process that does then mirrors the run."""
        job, base = wanted.job, wanted.base
        _require_client()
        from holdfast.launch.kubernetes.submit.submit_process import connect

        connect(wanted.spec.context, wanted.spec.namespace)  # connect in parallel with the rest
        from holdfast.launch.kubernetes.object_names import ObjectNames, name_stem
        from holdfast.launch.kubernetes.submit.submit_run import submit

        with new_run_dir(name_stem(job)) as folder:
            code = _code(wanted, folder.code)
            context = _context(wanted, code, at=time.time(), names=ObjectNames(folder.run_id), user=_user_name())
            write_inputs(folder, context.accepted)
            secrets = read_secrets(job, base.absolute(), os.environ)
            submit(folder, context, secrets, read_notify_secrets(wanted.spec.notify, base.absolute(), os.environ))
        return folder

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that mirrors the run's folder."""
        return ("holdfast.launch.kubernetes.sync.run_sync",)

    def start_controller(self, run: RunDir, accepted: RunSpec) -> None:
        """Start the process that mirrors the run's folder; the cluster restarts the controller itself."""
        start_supervisor(run, accepted)

    def keeps_alive(self, run: RunDir) -> bool:
        """No: without the process that mirrors it, nothing more is known here."""
        return False

    def force_cancel(self) -> None:
        """Nothing: the sync process deletes a run whose controller does not answer."""

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """What the cluster's objects show."""
        if not run.remote.exists():
            return None
        _require_client()
        from holdfast.launch.kubernetes.client.api_errors import EXIT_CODES
        from holdfast.launch.kubernetes.cluster_ref import read_cluster_ref
        from holdfast.launch.kubernetes.pending_reason.collect_pending import read_pending_reason

        seen = read_pending_reason(read_cluster_ref(run))
        return seen and HoldfastError((seen,), EXIT_CODES.get(seen.code, ExitCode.UNAVAILABLE))

    def scheduler_account(self, run: RunDir) -> None:
        """None: a cluster accounts for no run."""

    def base_here(self, accepted: RunSpec) -> Path:
        """This folder: that of the run is a volume of the cluster."""
        return Path()

    def unreached_checkpoints(self, accepted: RunSpec, target: str) -> str:
        """The target's volume keeps them; without one they were on the disks of the nodes."""
        if accepted.durable_controller_disk:
            return "" if target == accepted.target else f"on the volume of `{accepted.target}`"
        return ON_NODES

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The cluster's nodes, as far as this user may list them."""
        _require_client()
        from holdfast.launch.kubernetes.machine_list import read_machines

        return read_machines(spec)

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """Change the namespace's ConfigMap, and undo the cordon of a run."""
        _require_client()
        from holdfast.launch.kubernetes.machine_list import release_machine

        return release_machine(name, spec, machine)

    def find_runs(self, spec: TargetSpec) -> TargetRuns:
        """The runs of the namespace, by their objects."""
        _require_client()
        from holdfast.launch.kubernetes.run_list import list_runs

        return list_runs(spec)

    def adopt(self, spec: TargetSpec, run: str) -> RunDir:
        """Create the run's folder from its objects."""
        _require_client()
        from holdfast.launch.kubernetes.adopt_run import adopt_run

        return adopt_run(spec, run)

    def delete_objects(self, spec: TargetSpec, run: TargetRun) -> None:
        """Delete the run's object, which owns the others but no volume."""
        from holdfast.launch.kubernetes.run_list import delete_run

        delete_run(spec, run)

    def policies(self, name: str, spec: TargetSpec, request: PolicyRequest) -> Rendered:
        """Admission policies of the namespace."""
        from holdfast.launch.kubernetes.manifests.policies import render_policies
        from holdfast.launch.kubernetes.manifests.yaml_writer import to_plain, to_yaml

        objects = render_policies(spec, request)
        return Rendered(text=to_yaml(objects), findings=(), objects=tuple(map(to_plain, objects)))

    def manifests(self, name: str, spec: TargetSpec, objects: Sequence[Mapping[str, Any]]) -> Rendered:
        """The objects in the target's namespace."""
        from holdfast.launch.kubernetes.manifests.yaml_writer import to_yaml

        placed = [{**each, "metadata": {**each["metadata"], "namespace": spec.namespace}} for each in objects]
        return Rendered(text=to_yaml(placed), findings=(), objects=tuple(placed))

    def controller_hooks(self) -> ControllerHooks:
        """The controller is in a pod, which may have lost its folder."""
        from holdfast.launch.kubernetes.incluster.controller_identity import had_earlier_controller
        from holdfast.launch.kubernetes.incluster.kubernetes_backend import (
            KubernetesBackend,
            controller_host,
            pod_resources,
        )

        def backend(*, folder: RunDir, accepted: RunSpec, **_: object) -> Backend:
            return KubernetesBackend(folder=folder, accepted=accepted)

        return ControllerHooks(
            backend=backend,
            node_resources=lambda accepted, _environ: pod_resources(accepted.job),
            controller_host=controller_host,
            had_controller=had_earlier_controller,
            node_folder=lambda folder, _accepted: folder,
        )


def _render_tree(wanted: Submission, run: str, findings: tuple[Finding, ...]) -> Rendered:
    """The objects of a run that others apply; code comes with them, unless `workdir` is a path of the image."""
    from holdfast.launch.kubernetes.manifests.run_manifests import render_tree
    from holdfast.launch.kubernetes.object_names import ObjectNames
    from holdfast.launch.kubernetes.preflight.tree_checks import check_tree, compressed_code

    with tempfile.TemporaryDirectory() as scratch:
        code = None if wanted.job.workdir.startswith("/") else _code(wanted, Path(scratch))
        context = _context(wanted, code, names=ObjectNames(run))
        packed = compressed_code(Path(scratch), code)
    findings = (*findings, *(_located(each, wanted) for each in check_tree(context, packed)))
    refuse_errors(findings)
    rendering = render_tree(context, packed)
    return Rendered(text=rendering.text, findings=findings, objects=tuple(rendering.objects))


def _require_client() -> None:
    require_extra("kubernetes", "kr8s", "a Kubernetes target needs")


def _manifest_findings(wanted: Submission) -> tuple[Finding, ...]:
    """The findings that do not depend on this machine: manifests may be rendered without the job's secrets."""
    from holdfast.launch.kubernetes.preflight.job_checks import check_job_on_cluster

    on_cluster = check_job_on_cluster(_context(wanted, None))
    return (*wanted.job_findings(), *(_located(finding, wanted) for finding in on_cluster))


def _target_findings(wanted: Submission) -> Iterator[Finding]:
    """Those that every job on the target gets, because they are about its pods or its volume."""
    from holdfast.launch.kubernetes.preflight.job_checks import check_job_on_cluster
    from holdfast.launch.kubernetes.preflight.pod_checks import MULTIKUEUE, POD

    for each in check_job_on_cluster(_context(wanted, None)):
        if each.where.startswith((POD, MULTIKUEUE)) or each.code == "checkpoint-not-shared":
            yield each


def _template_findings(wanted: Submission) -> Iterator[Finding]:
    """Whether the template that the target extends is still what was fetched."""
    path = target_file(wanted.target, wanted.base, os.environ) if wanted.spec.extends else None
    if path and (use := template_use(path)):
        from holdfast.launch.kubernetes.published_template import compare_with_published

        yield from compare_with_published(use)


def _located(finding: Finding, wanted: Submission) -> Finding:
    """The finding with its line in the job's file, or for a field of the target in the target's."""
    from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX

    of_target = finding.where.startswith(TARGET_PREFIX)
    return _located_in_target(finding, wanted) if of_target else wanted.loaded.located(finding)


def _located_in_target(finding: Finding, wanted: Submission) -> Finding:
    """The finding with its line in the target's file, if it is about a field of the target."""
    from holdfast.launch.kubernetes.preflight.pod_checks import TARGET_PREFIX

    if not finding.where.startswith(TARGET_PREFIX):
        return finding
    of_target = replace(finding, where=finding.where.removeprefix(TARGET_PREFIX))
    return located_in_target(of_target, wanted.target, start=wanted.base, environ=os.environ)


def _code(wanted: Submission, archives: Path) -> CodeArchive | None:
    """The job's code, archived in the folder `archives`; None without agents, whose images have it."""
    return submitted_code(wanted, archives) if wanted.spec.agent else None


def _context(
    wanted: Submission,
    code: CodeArchive | None,
    *,
    at: float = 0.0,
    names: ObjectNames | None = None,
    user: str | None = None,
) -> RenderContext:
    """The render context of a job, where relative paths start from the shared volume.

    `at`, `names` and `user` are known when it is started.
    """
    from holdfast.launch.kubernetes.manifests.render_context import SET_AT_START, RenderContext, workload_kind
    from holdfast.launch.kubernetes.object_names import PLACEHOLDER_ID, VOLUME_ROOT, ObjectNames

    job, spec = with_default_checks(wanted.job, wanted.spec), wanted.spec
    fabric = resolve(job.fabric.name, spec.fabric)
    accepted = RunSpec(
        job=job,
        base=VOLUME_ROOT,
        created_at=at,
        code=code,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        target_kind=spec.kind,
        workload=workload_kind(job, spec),
        node_selector=dict(spec.node_selector),
        agent=spec.agent,
        durable_controller_disk=spec.volume is not None,
        target=wanted.target,
        from_tree=wanted.tree is not None,
        resumed=wanted.resumed,
        notify=spec.notify if spec.agent and wanted.tree is None else (),
    )
    return RenderContext(
        accepted=accepted,
        target=spec,
        names=names or ObjectNames.of(job, PLACEHOLDER_ID),
        user=SET_AT_START if user is None else user,
    )


def _user_name() -> str:
    """This user's login name; the user id if the machine knows no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def with_default_checks(job: Job, spec: TargetSpec) -> Job:
    """The job; in production its nodes are checked, and another fabric ends it, unless it says otherwise."""
    if spec.template is not ManifestTemplate.PRODUCTION or not spec.agent:
        return job
    defaults: dict[str, object] = {}
    if "checks" not in job.model_fields_set:
        defaults["checks"] = Checks(before_start=CheckLevel.QUICK)
    if "on_fallback" not in job.fabric.model_fields_set:
        defaults["fabric"] = job.fabric.model_copy(update={"on_fallback": OnFallback.STOP})
    return job.model_copy(update=defaults)


TARGET: Target = KubernetesTarget()
