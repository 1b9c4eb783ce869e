"""Which agents of a run's log a controller refuses to take over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.control.protocol_mismatch import AgentProtocols
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import AgentConnected, AnyEvent, RunCreated
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.protocol import orders

CREATED = RunCreated(at=1.0, run="demo", job={})


def joined(node: int, protocol: int, oldest: int = 0) -> AgentConnected:
    return AgentConnected(
        at=2.0,
        node=node,
        generation=0,
        incarnation="i",
        hostname="h",
        address="127.0.0.1",
        port=4000,
        pid=1,
        protocol=protocol,
        oldest_protocol=oldest,
    )


@pytest.mark.parametrize(
    ("newest", "oldest", "history", "what"),
    [
        (5, 4, [CREATED], None),
        (5, 4, [CREATED, joined(0, 4, 3), joined(1, 5, 4), joined(2, 6, 5)], None),
        (5, 4, [CREATED, joined(0, 3, 2), joined(0, 5, 4)], None),
        (
            5,
            4,
            [CREATED, joined(0, 5, 4), joined(1, 3, 2)],
            "node1 speaks protocol 2 and 3, and",
        ),
        (4, 4, [CREATED, joined(7, 5)], "node7 speaks protocol 5, and this controller 4"),
    ],
    ids=["none", "near", "replaced", "earlier", "later"],
)
def test_controller_takes_over_agents_at_most_one_version_apart(
    monkeypatch: pytest.MonkeyPatch, newest: int, oldest: int, history: list[AnyEvent], what: str | None
) -> None:
    for name, value in (("PROTOCOL", newest), ("OLDEST_PROTOCOL", oldest)):
        monkeypatch.setattr(orders, name, value)
        monkeypatch.setattr(f"holdfast.control.protocol_mismatch.{name}", value)
    protocols = AgentProtocols()
    assert list(protocols.note(history)) == history
    if what is None:
        protocols.refuse_unspoken()
        return
    with pytest.raises(HoldfastError) as refusal:
        protocols.refuse_unspoken()
    (finding,) = refusal.value.findings
    assert finding.code == "protocol-mismatch"
    assert what in finding.what
    assert refusal.value.exit_code is ExitCode.CANNOT_RUN_HERE


def test_run_with_what_only_a_later_version_has_is_refused_by_the_name_of_it(tmp_path: Path) -> None:
    path = tmp_path / "demo-aaaaaa" / "job.json"
    path.parent.mkdir()
    accepted = RunSpec(job=Job(command=("train",)), base="/", created_at=1.0, fabric="tcp").model_dump(mode="json")
    accepted["job"]["recovery"]["by_magic"] = True
    for later, code, words in (
        ({}, "run-of-later-version", "does not have: job.recovery.by_magic"),
        ({"tariff": 3}, "run-of-later-version", "job.recovery.by_magic, tariff"),
        ({"base": 5}, "run-file-corrupt", "is not what holdfast wrote there"),
    ):
        path.write_text(json.dumps(accepted | later))
        with pytest.raises(HoldfastError) as refusal:
            RunSpec.read(path)
        (finding,) = refusal.value.findings
        assert finding.code == code
        assert words in finding.what
