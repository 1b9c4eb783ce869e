"""What holds for every kind of target; the local one is the specification."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from holdfast import api
from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Severity
from holdfast.job.field_descriptions import describe_fields
from holdfast.job.loader import LoadedJob
from holdfast.job.run_spec import RunSpec
from holdfast.job.targets import SlurmSettings, TargetSpec
from holdfast.launch import prestarted_supervisor
from holdfast.launch.target import TARGET_KINDS, kind_of_file, open_target, prestart, target_of
from holdfast.run_dir import RunDir

JOB = ("image=registry.example/train:1", "nodes=2", "env={GREETING: hello}")
SLURM = SlurmSettings(address="10.0.0.1")
SECRETS = "secrets={KEY: {env: NOT_SET_ANYWHERE}, OTHER: {file: not-there}}"
INVALID: Mapping[str, str] = {
    "local": "workdir=nowhere",
    "hosts": "nodes=3",
    "slurm": "code.root=nowhere",
    "kubernetes": "checkpoint.path=/tmp/here",
}
"""A field that makes the job impossible on a kind of target."""


@pytest.fixture(params=sorted(TARGET_KINDS))
def kind(request: pytest.FixtureRequest, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of target, with a target `here` and no cluster to be reached."""
    folder = tmp_path / ".holdfast" / "targets"
    folder.mkdir(parents=True)
    hosts = "hosts: [alpha, beta]\n" if request.param == "hosts" else ""
    (folder / "here.yaml").write_text(f"kind: {request.param}\n{hosts}")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    return request.param


def load(*overrides: str) -> LoadedJob:
    return api.load(None, command=(sys.executable, "-c", "pass"), overrides=(*JOB, *overrides))


def test_job_that_can_run_has_no_errors_and_is_rendered_with_its_command_and_variables(
    kind: str, tmp_path: Path
) -> None:
    findings = api.check(load(), "here", base=tmp_path)
    assert [finding for finding in findings if finding.severity is Severity.ERROR] == []
    text = api.render(load(), "here", base=tmp_path).text
    assert sys.executable in text
    assert "hello" in text


def test_job_that_cannot_run_is_refused_with_its_field_and_leaves_no_run(kind: str, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError) as refused:
        api.start(load(INVALID[kind]), "here", base=tmp_path)
    assert refused.value.exit_code is ExitCode.CANNOT_RUN_HERE
    errors = [finding for finding in refused.value.findings if finding.severity is Severity.ERROR]
    assert [finding.where for finding in errors] == [f"--set {INVALID[kind].partition('=')[0]}"]
    assert api.runs() == []


def test_missing_secrets_are_named_before_anything_starts(kind: str, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError) as refused:
        api.start(load(SECRETS), "here", base=tmp_path)
    checked = api.check(load(SECRETS), "here", base=tmp_path)
    for findings in (refused.value.findings, checked):
        errors = [finding.code for finding in findings if finding.severity is Severity.ERROR]
        assert errors == ["missing-secret", "missing-secret"]
    assert api.runs() == []


def test_rendering_starts_nothing_and_never_reads_a_secret(kind: str, tmp_path: Path) -> None:
    assert "KEY" in api.render(load(SECRETS), "here", base=tmp_path).text
    assert api.runs() == []


def test_rendering_shows_or_refuses_what_is_wrong_with_the_job_on_every_target(kind: str, tmp_path: Path) -> None:
    script = api.load(None, command=("sh", "-c", "torchrun train.py"), overrides=JOB)
    try:
        findings = api.render(script, "here", base=tmp_path).findings
    except HoldfastError as refused:
        findings = refused.findings
    assert "launcher-per-rank" in {finding.code for finding in findings}


def test_target_of_a_run_is_the_one_it_was_accepted_for(kind: str, tmp_path: Path) -> None:
    run = RunDir.create("accepted")
    accepted = RunSpec(job=load().job, base="/", created_at=1.0, fabric="tcp", target_kind=kind, slurm=SLURM)
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    assert target_of(run) is open_target(kind)
    assert target_of(run).pending_reason(run) is None  # it is not known to be anywhere else
    module, *options = target_of(run).supervisor(accepted)
    assert callable(import_module(module).main)
    assert all(isinstance(option, str) for option in options)


def test_run_with_a_corrupt_job_file_has_a_target_only_if_it_has_nodes_here(home: Path) -> None:
    run = RunDir.create("corrupt")
    run.job.write_text("{")
    with pytest.raises(HoldfastError, match="is not what holdfast wrote there"):
        target_of(run)
    run.remote.write_text("{}")
    assert (reason := api.pending_reason(run)) is not None
    assert reason.code == "run-file-corrupt"  # so that the rest of its status is shown
    run.nodes.mkdir()
    assert target_of(run) is open_target("local")


def test_run_of_a_kind_that_this_version_does_not_know_names_its_file_and_the_remedy(home: Path) -> None:
    run = RunDir.create("newer")
    accepted = RunSpec(job=load().job, base="/", created_at=1.0, fabric="tcp", target_kind="cloud")
    run.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    with pytest.raises(HoldfastError) as refused:
        target_of(run)
    (finding,) = refused.value.findings
    assert (finding.code, finding.where) == ("unknown-target-kind", str(run.job))
    assert "`cloud`" in finding.what
    assert finding.remedy == "Use the version of holdfast that started the run."


def test_controllers_part_gives_each_node_its_resources(kind: str, tmp_path: Path) -> None:
    hooks = open_target(kind).controller_hooks()
    accepted = RunSpec(job=load().job, base="/", created_at=1.0, fabric="tcp", target_kind=kind)
    assert len(hooks.node_resources(accepted, {})) == 2
    assert hooks.controller_host(RunDir(tmp_path / "run-abc"), "10.0.0.1")


def test_target_files_documentation_names_every_kind(kind: str) -> None:
    describe_fields()
    assert f"`{kind}`" in str(TargetSpec.model_fields["kind"].description)


@pytest.mark.parametrize(
    "form", ["kind: {kind}\n", "fabric: tcp\n'kind' : \"{kind}\"\n", '{{"namespace": "ml", "kind": "{kind}"}}']
)
def test_only_a_target_whose_kind_has_something_to_start_early_starts_it(kind: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / ".holdfast" / "targets" / "here.yaml"
    path.write_text(form.format(kind=kind))
    assert kind_of_file(path) == kind
    module = TARGET_KINDS[kind].prestart
    assert not module or callable(import_module(module).prestart)


@pytest.mark.parametrize("text", ["", "kind:\n", "kind: cloud\n", "[", None])
def test_target_that_cannot_be_used_starts_nothing_early(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / ".holdfast" / "targets" / "here.yaml"
    path.parent.mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    assert kind_of_file(path) not in TARGET_KINDS
    prestarted_supervisor._prestarted.process = None  # what another test of this process has left
    prestart("here", start=tmp_path, environ={})
    assert prestarted_supervisor._prestarted.process is None


def test_first_target_of_a_cluster_cannot_replace_the_local_one(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError) as refused:
        api.init_target("kubernetes", "local", folder=tmp_path)
    assert (refused.value.findings[0].code, refused.value.exit_code) == ("bad-name", ExitCode.USAGE)
    assert not [*tmp_path.iterdir()]
