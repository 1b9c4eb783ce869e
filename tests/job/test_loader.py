"""What a person wrote becomes a job, or every problem with its place, its line and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden import Golden, printed
from tests.job.loading import make_job, parse_job, read_job

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Finding, Severity
from holdfast.job.loader import RESERVED_FIELDS, validate_data, validate_text
from holdfast.job.spec import Fabric, Launch, Nodes
from holdfast.job.validation_messages import MESSAGES
from holdfast.job.yaml_source import MAX_BYTES, MAX_FINDINGS

FABRICS = ("auto", "tcp", "infiniband")


def only(text: str, *overrides: str) -> Finding:
    """The one finding that a text has, which must be an error."""
    examined = validate_text(text, "job.yaml", overrides, FABRICS)
    assert examined.job is None
    assert len(examined.findings) == 1, examined.findings
    return examined.findings[0]


def test_short_file_valid_shorthands_written_out() -> None:
    job = parse_job("command: python train.py\nnodes: 2\nfabric: tcp\ncheckpoint: out\n", "job.yaml")
    assert job.command == ("python", "train.py")
    assert job.nodes == Nodes(min=2, max=2)
    assert job.fabric == Fabric(name="tcp")
    assert job.checkpoint.path == "out"


def test_job_dumped_and_read_back_the_same() -> None:
    job = parse_job("command: [a]\nnodes: 3\nresources: {memory: 1.5GiB}\nenv: {A: 1.10}\nsecrets: {B: {env: B}}", "x")
    assert type(job).model_validate(job.model_dump(mode="json")) == job
    assert type(job).model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1.10", "1.10"),
        ("1e-4", "1e-4"),
        ("on", "on"),
        ("true", "true"),
        ("0x10", "0x10"),
        ("2026-11-20", "2026-11-20"),
    ],
)
def test_env_and_command_scalars_kept_as_written(written: str, read: str) -> None:
    job = parse_job(f"command: [python, {written}]\nenv: {{A: {written}}}\nfabric: {{env: {{B: {written}}}}}", "x")
    assert (job.command[1], job.env["A"], job.fabric.env["B"]) == (read, read, read)


def test_env_python_values_become_text() -> None:
    job = make_job({"command": ["a", 1], "env": {"A": 1, "B": 0.5, "C": True}})
    assert job.command == ("a", "1")
    assert job.env == {"A": "1", "B": "0.5", "C": "true"}


def test_command_over_several_lines_joined_as_a_shell_joins_them() -> None:
    job = parse_job("command: |\n  python train.py \\\n    --name 'a b'\n", "job.yaml")
    assert job.command == ("python", "train.py", "--name", "a b")


def test_several_problems_all_said_in_order_of_lines() -> None:
    text = "comand: a\nnodes: 4..2\nenv:\n  RANK: 1\nfabric: infiniban\nmounts: []\n"
    examined = validate_text(text, "job.yaml", ["recovery.max_restarts=-1"], FABRICS)
    assert [(finding.code, finding.where) for finding in examined.findings] == [
        ("unknown-field", "job.yaml:1"),
        ("bad-nodes", "job.yaml:2"),
        ("reserved-name", "job.yaml:4"),
        ("unknown-fabric", "job.yaml:5"),
        ("not-supported", "job.yaml:6"),
        ("missing-field", "job.yaml"),
        ("out-of-range", "--set recovery.max_restarts"),
    ]
    with pytest.raises(HoldfastError) as raised:
        examined.loaded_or_raise()
    assert raised.value.exit_code is ExitCode.INVALID_JOB
    assert raised.value.findings == examined.findings


def test_group_half_wrong_rules_still_speak_of_the_rest() -> None:
    examined = validate_text("command: a\nnodes: {min: 1, max: x}\nfabric: infiniban", "job.yaml", (), FABRICS)
    assert [finding.code for finding in examined.findings] == ["wrong-type", "unknown-fabric"]


# One row for each way in which one value can be wrong: text and code.
WRONG = [
    ("command: [a]\ncomand: b", "unknown-field"),
    ("command: [a]\ngpus: 8", "unknown-field"),
    ("command: [a]\nmax_restarts: 8", "unknown-field"),
    ("command: [a]\nzzz: 8", "unknown-field"),
    ("command: [a]\nsecrets: {A: {en: B, env: B}}", "unknown-field"),
    ("name: a", "missing-field"),
    ("command: [a]\nnodes: {min: 1}", "missing-field"),
    ("- a", "wrong-type"),
    ('command: [a]\ngpus_per_node: "8"', "wrong-type"),
    ("command: [a]\ngpus_per_node: true", "wrong-type"),
    ("command: [a]\ngpus_per_node: 1.0", "wrong-type"),
    ("command: [a]\nrecovery: {restart_window_s: long}", "wrong-type"),
    ("command: [a]\nname: 7", "wrong-type"),
    ("command: [a]\nenv:", "wrong-type"),
    ("command: [a]\nenv: {A: }", "wrong-type"),
    ("command: {a: b}", "wrong-type"),
    ("command: [[a]]", "wrong-type"),
    ("command: [a]\nresources: 7", "wrong-type"),
    ("command: []", "empty"),
    ('command: ""', "empty"),
    ("command: [a]\nworkdir: ''", "empty"),
    ("command: [a]\nname: My Job", "bad-name"),
    ("command: [a]\nenv: {A-B: 1}", "bad-name"),
    ("command: [a]\ngpus_per_node: -1", "out-of-range"),
    ("command: [a]\ngpus_per_node: 65", "out-of-range"),
    ("command: [a]\nresources: {cpu: 0}", "out-of-range"),
    ("command: [a]\nrecovery: {restart_window_s: .nan}", "out-of-range"),
    ("command: [a]\nlaunch: pernode", "bad-value"),
    ("command: [a]\nversion: 2", "bad-value"),
    ('command: ["a\\0b"]', "bad-text"),
    ('command: [a]\nworkdir: "a\\0b"', "bad-text"),
    ('command: [a]\nenv: {A: "a\\0b"}', "bad-text"),
    ("command: [a]\ncheckpoint: {every: auto, every_s: 60}", "bad-checkpoint-interval"),
    ("command: [a]\nnodes: many", "bad-nodes"),
    ("command: [a]\nnodes: 4..2", "bad-nodes"),
    ("command: [a]\nresources: {memory: 16Gb}", "bad-size"),
    ("command: [a]\nlogs: {max_bytes: 500KiB}", "bad-size"),
    ("command: [a]\nsecrets: {A: {}}", "bad-secret"),
    ('command: "python \'a"', "bad-command"),
    ("command: 'python \\'", "bad-command"),
    ("command: [a]\ncommand: [b]", "duplicate-key"),
    ("name: &x a\ncommand: *x", "unsupported-yaml"),
    ("command: !!python/name:os.system [a]", "unsupported-yaml"),
    ("command: [a", "bad-yaml"),
    ("command: [a]\n\tname: b", "bad-yaml"),
    ("command: [a]\nname: b: c", "bad-yaml"),
    ("command: a\x00", "bad-yaml"),
    ("command: a\udc80", "bad-yaml"),
    ('command: "\\UFFFFFFFF"', "bad-yaml"),
    ("command: " + "[" * 30 + "]" * 30, "bad-yaml"),
    ("command: " + "[" * 100_000, "bad-yaml"),
    ("command: [a]\n---\ncommand: [b]", "bad-yaml"),
    ("? [a]\n: b", "bad-yaml"),
]


def test_wrong_value_said_in_plain_words(golden: Golden) -> None:
    found = [(text, only(text)) for text, _ in WRONG]
    assert [finding.code for _, finding in found] == [code for _, code in WRONG]
    assert [finding for _, finding in found if not finding.where.startswith("job.yaml")] == []
    assert [finding for _, finding in found if "Input should" in finding.what] == []
    golden(*(f"{text[:60]!r}\n{printed(finding)}" for text, finding in found))


def test_half_a_character_in_an_escape_refused() -> None:
    assert only('command: ["\\ud800"]').code == "bad-text"


def test_python_keys_that_are_not_text_refused() -> None:
    examined = validate_data({"command": ["a"], "env": {1: "b"}})
    assert [finding.code for finding in examined.findings] == ["wrong-type"]
    examined = validate_data({"command": ["a"], 1: "b"})  # pyright: ignore[reportArgumentType] -- that is the test
    assert [finding.code for finding in examined.findings] == ["wrong-type"]


def test_every_complaint_code_has_a_row_above() -> None:
    of_targets = {"bad-egress", "bad-notify", "bad-path", "bad-volume"}
    assert {row.code for row in MESSAGES.values()} - of_targets <= {row[1] for row in WRONG}


@pytest.mark.parametrize("field", RESERVED_FIELDS)
def test_reserved_field_refused_as_not_built_yet(field: str) -> None:
    finding = only("command: [a]", f"{field}=3")
    assert finding.code == "not-supported"
    assert f"`{field}`" in finding.what


def test_wrong_secret_never_quoted() -> None:
    examined = validate_text("command: [a]\nsecrets: {TOKEN: hf_abcdef}", "job.yaml", ["secrets.OTHER=hf_abcdef"])
    assert len(examined.findings) == 2
    assert "hf_abcdef" not in repr(examined.findings)
    text = "command: [a]\nsecrets:\n  T: hf_abcdef\n  T: hf_abcdef\n"
    assert "hf_abcdef" not in repr(validate_text(text, "job.yaml", ["secrets={A: hf_abcdef"]).findings)


def test_many_problems_first_ones_said_and_the_rest_counted() -> None:
    text = "command: [a]\n" + "".join(f"zz{n}: 1\n" for n in range(500))
    findings = validate_text(text, "job.yaml").findings
    assert len(findings) == MAX_FINDINGS + 1
    assert findings[-1].code == "more-problems"
    assert "450 more" in findings[-1].what
    assert len(validate_text("command: [a]\n" + "name: b\n" * 500, "job.yaml").findings) == MAX_FINDINGS + 1


def test_overrides_win_over_the_file_with_the_types_of_yaml() -> None:
    overrides = [
        "recovery.max_restarts=4",
        "nodes.max=2",
        "checkpoint.every_steps=10",
        "env.URL=http://a: b #c",
        "env.N=1.10",
        "launch=per-node",
        'command=["torchrun", 1e-3]',
        "image=null",
    ]
    job = parse_job("command: [a]\nnodes: 2\ncheckpoint: out\nimage: x\nrecovery:\n", "job.yaml", overrides)
    assert job.recovery.max_restarts == 4
    assert job.nodes == Nodes(min=2, max=2)
    assert (job.checkpoint.path, job.checkpoint.every_steps) == ("out", 10)
    assert job.env == {"URL": "http://a: b #c", "N": "1.10"}
    assert job.launch is Launch.PER_NODE
    assert job.command == ("torchrun", "1e-3")
    assert job.image is None


def test_override_fixes_an_error_in_the_file() -> None:
    assert parse_job("command: [a]\nnodes: many", "job.yaml", ["nodes=3"]).nodes.max == 3


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ("nodes", "--set", "`nodes` does not set a field"),
        ("a b=1", "--set", "`a b=1` does not set a field"),
        ("name.first=1", "--set name.first", "`name` has no fields to set"),
        ("command=[a", "--set command", "not YAML"),
        ("\udc80=1", "--set", "does not set a field"),
    ],
)
def test_override_that_cannot_be_read_refused(override: str, where: str, what: str) -> None:
    finding = only("command: [a]\nname: b", override)
    assert finding.code == "bad-override"
    assert finding.where == where
    assert what in finding.what


def test_override_with_a_wrong_value_points_at_the_override() -> None:
    finding = only("command: [a]\nrecovery:\n  max_restarts: 3", "recovery.max_restarts=many")
    assert (finding.code, finding.where) == ("wrong-type", "--set recovery.max_restarts")
    assert finding.evidence == ("recovery.max_restarts=many",)


def test_plain_data_wrong_points_at_the_field() -> None:
    with pytest.raises(HoldfastError) as raised:
        make_job({"command": ["python"], "nodes": 0}, ["gpus_per_node=x"])
    assert {finding.where for finding in raised.value.findings} == {"nodes", "--set gpus_per_node"}


def test_warnings_come_with_the_job_and_its_lines() -> None:
    examined = validate_text("name: a\ncommand: torchrun train.py", "job.yaml", (), FABRICS)
    assert examined.job is not None
    assert [(finding.severity, finding.where) for finding in examined.findings] == [(Severity.WARNING, "job.yaml:2")]
    assert examined.findings[0].evidence == ("command: torchrun train.py",)


def test_file_read_with_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: a\r\ncommand: [b]\r\n")
    assert read_job(path, ["nodes=2"]).nodes.max == 2


def test_file_unreadable_refused_with_a_code(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary", tmp_path / "large"
    binary.write_bytes(b"command: [a]\nname: \xff\xfe")
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    wanted = [
        (tmp_path / "none", "no-such-file", ExitCode.NOT_FOUND, "none"),
        (tmp_path, "unreadable-file", ExitCode.INVALID_JOB, tmp_path.name),
        (Path("a\0b"), "unreadable-file", ExitCode.INVALID_JOB, "a\\x00b"),
        (binary, "not-text", ExitCode.INVALID_JOB, "binary:2"),
        (large, "file-too-large", ExitCode.INVALID_JOB, "large"),
    ]
    for path, code, exit_code, where in wanted:
        with pytest.raises(HoldfastError) as raised:
            read_job(path)
        assert raised.value.findings[0].code == code
        assert raised.value.exit_code is exit_code
        assert raised.value.findings[0].where.endswith(where)
