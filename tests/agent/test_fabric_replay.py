"""Logs of every version, with every planted cause, and recorded ones take the live path: files, reader, verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
from bench.nccl_log_generator import Job, Version, versions
from msgspec.structs import replace
from tests.diagnose.nccl_transport.test_causes import FAILING, GDR_LINES, SOCKETS
from tests.diagnose.nccl_transport.test_promised_fabric import base

from holdfast.agent.fabric_watch import observe
from holdfast.agent.nccl_warnings import explaining
from holdfast.diagnose.nccl_transport import FabricJudgement, judge
from holdfast.diagnose.nccl_transport.causes import BY_NAME, CAUSES, Cause, Effect
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome

INCIDENTS = sorted((Path(__file__).parents[1] / "incidents").glob("*.jsonl"))
LOGS_START_SINCE, LAZY_SINCE = Version.of("2.18.3"), Version.of("2.22.3")
HEAD = "worker-0000:41001:41101 [1] "
OUTCOMES = {
    "sockets": FabricOutcome.TCP_FALLBACK,
    "failure": FabricOutcome.FAILED,
    "host-memory": FabricOutcome.DEGRADED,
}


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A node's logs with one cause in them."""

    cause: Cause
    job: Job
    line: str = ""
    promised: str = "infiniband"
    ends: bool = True
    """Whether the rank that logs the line finishes its set-up."""

    def logs(self) -> list[bytes]:
        logs = _logs(self.job)
        line = f"{self.line}\n".encode()
        if self.cause.effect != "failure":
            return [logs[0], line + logs[1]]
        first, second = (_set_up(data, self.ends) for data in logs)
        return [first, second + b"\n" + line]


@lru_cache(8)
def _logs(job: Job) -> tuple[bytes, ...]:
    return tuple(b"".join(job.log(rank)) for rank in range(job.gpus))


def _set_up(data: bytes, ends: bool) -> bytes:
    """The lines of a rank up to the end of its set-up, or up to the line before."""
    end = data.index(b"\n", data.index(b"Init COMPLETE")) + 1
    return data[:end] if ends else data[: data.rindex(b"\n", 0, end - 1) + 1]


def planted(version: Version) -> Iterator[Planted]:
    job = Job(version=version, nodes=2, gpus=2, channels=1, nics=1, within="IPC", env=())
    sockets = replace(job, network="Socket", gdr=False)
    stamp = "[2026-11-20 10:00:00] " if version >= Version.of("2.26.2") else ""
    for name, value in (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "Socket")):
        yield Planted(cause=BY_NAME[name], job=replace(sockets, env=((name, value),)))
    for name, line in SOCKETS:
        yield Planted(cause=BY_NAME[name], job=sockets, line=line.format(head=HEAD))
    for name, promised in (("plugin failed", "efa"), ("no plugin", "efa")):
        line = next(iter(BY_NAME[name].matches.values()), f"{HEAD}NCCL INFO NET/Plugin : No plugin found")
        message = f"\n{stamp}{HEAD}nccl_net:7 NCCL WARN {line.partition(' WARN ')[2]}" if " WARN " in line else line
        yield Planted(cause=BY_NAME[name], job=sockets, promised=promised, line=message)
    for name, lines in GDR_LINES.items():
        text = "\n".join(f"{HEAD}NCCL INFO {line}" for line in lines)
        yield Planted(cause=BY_NAME[name], job=replace(job, gdr=False), line=text)
    for name in FAILING:
        message = next(iter(BY_NAME[name].matches.values())).partition(" NCCL WARN ")[2]
        where = "misc/ibvwrap.cc:262" + (" (wrap_ibv_reg_mr)" if version >= Version.of("2.30.3") else "")
        line = f"{stamp}{HEAD}{where} NCCL WARN {message}"
        yield Planted(cause=BY_NAME[name], job=job, line=line, ends=version >= LAZY_SINCE)


def judged(folder: Path, logs: Sequence[bytes], promised: str) -> list[FabricJudgement]:
    files = [folder / f"rank-{rank}.{41000 + rank}.log" for rank in range(len(logs))]
    for path, data in zip(files, logs, strict=True):
        path.write_bytes(data)
    return [judge(seen) for seen in observe(files, (), base(promised), "")]


@pytest.mark.parametrize("version", versions(), ids=str)
def test_each_planted_cause_has_its_own_verdict_in_each_version(version: Version, tmp_path: Path) -> None:
    seen = set[str]()
    for case in planted(version):
        found = judged(tmp_path, case.logs(), case.promised)
        seen.add(case.cause.name)
        if not case.ends and version < LOGS_START_SINCE:  # it logs a communicator only when that is set up
            assert found == []
            assert explaining(case.line.splitlines()) == (case.line,)
            continue
        (judgement,) = found
        assert judgement.outcome is OUTCOMES[case.cause.effect], case
        assert judgement.finding is not None
        assert judgement.finding.what.endswith(f": {case.cause.phrase}"), case
        assert judgement.finding.remedy == case.cause.remedy
    assert seen == BY_NAME.keys()


@pytest.mark.parametrize("version", versions(), ids=str)
def test_sound_fabric_of_each_kind_is_as_promised_in_each_version(version: Version, tmp_path: Path) -> None:
    kinds = [("IB", "IB", "infiniband"), ("IB", "RoCE", "roce"), ("IBext_v8", "IB", "infiniband")]
    for network, layer, promised in (*kinds, ("AWS Libfabric", "IB", "efa"), ("Socket", "IB", "tcp")):
        job = Job(version=version, gpus=2, channels=1, nics=1, network=network, layer=layer, within="IPC")
        job = replace(job, gdr=network != "Socket")
        found = judged(tmp_path, _logs(job), promised)
        assert [each.outcome for each in found] == [FabricOutcome.VERIFIED], (network, found)


WRITER = re.compile(r"(\S+:\d+:)\d+ \[-?\d+\]")
RECORDED = [
    pytest.param(incident["id"], incident["evidence"], id=incident["id"])
    for path in INCIDENTS
    for incident in map(json.loads, path.read_text().splitlines())
    if any(WRITER.search(line) and "NCCL" in line for line in incident["evidence"])
]
TOLD: dict[str, tuple[str, str]] = {
    "NVIDIA/nccl#941": ("infiniband", "no device"),
    "NVIDIA/nccl#1105": ("infiniband", "no device"),
    "awslabs/awsome-distributed-ai#386": ("efa", "plugin failed"),
    "NVIDIA/nccl-tests#185": ("roce", "GID unreachable"),
    "NVIDIA/nccl#551": ("roce", "GID index"),
    "NVIDIA/nccl#799": ("roce", "GID index"),
    "pytorch/pytorch#29482": ("infiniband", "no interface"),
}
"""The incidents whose quoted lines name a cause, with the fabric that they were promised; the others name none."""


@pytest.mark.parametrize(("incident", "lines"), RECORDED)
def test_recorded_incident_takes_the_live_path(incident: str, lines: list[str], tmp_path: Path) -> None:
    """Its lines within a set-up by its first writer, since incidents quote only what matters."""
    promised, name = TOLD.get(incident, ("infiniband", ""))
    writer = next(match for line in lines if (match := WRITER.search(line)))[1]
    comm = f"{writer}1 [0] NCCL INFO comm 0x7f2a rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 7000 commId 0x1 - Init"
    ended = () if name and BY_NAME[name].effect is Effect.FAILURE else (f"{comm} COMPLETE",)
    text = "\n".join((f"{comm} START", *lines, *ended, ""))
    findings = [each.finding for each in judged(tmp_path, [text.encode()], promised) if each.finding is not None]
    named = {cause.name for cause in CAUSES if any(finding.what.endswith(cause.phrase) for finding in findings)}
    assert named == ({name} if name else set())
    assert all(finding.remedy and finding.evidence for finding in findings)


def test_recorded_causes_are_all_among_the_incidents() -> None:
    assert TOLD.keys() <= {parameter.values[0] for parameter in RECORDED}
