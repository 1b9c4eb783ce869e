"""Each cause is distinguished by its line, in every version's wording, and has its own remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from bench.nccl_log_generator import Job, Version, versions
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import JOB, OLD, chunks
from tests.diagnose.nccl_transport.test_promised_fabric import ON_SOCKETS, base, logs_of, observed

from holdfast.diagnose.nccl_transport import FabricJudgement, SetupLogReader, judge, observations
from holdfast.diagnose.nccl_transport.causes import BY_NAME, CAUSES, Effect, named_by
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome

HEAD = "worker-0000:41001:41101 [1] "
QUOTED = [
    pytest.param(cause, pattern, line, id=f"{cause.name}-{number}")
    for cause in CAUSES
    for number, (pattern, line) in enumerate(cause.matches.items())
]
FAILING = [cause.name for cause in CAUSES if cause.effect is Effect.FAILURE]
MEMLOCK = next(iter(BY_NAME["memlock"].matches.values())).partition(" NCCL WARN ")[2]


def warned(message: str, where: str = "misc/ibvwrap.cc:262", *, stamp: str = "") -> bytes:
    """A warning as NCCL writes it: after an empty line."""
    return f"\n{stamp}{HEAD}{where} NCCL WARN {message}\n".encode()


def unfinished(log: bytes) -> bytes:
    """The lines of a rank before the last of its set-up."""
    before = log[: log.index(b"Init COMPLETE")]
    return before[: before.rindex(b"\n") + 1]


def judged(*logs: bytes, promised: str = "infiniband") -> FabricJudgement:
    (seen,) = observed(*logs, promised=promised)
    return judge(seen)


@pytest.mark.parametrize(("cause", "pattern", "line"), QUOTED)
def test_each_pattern_matches_its_line_and_no_other_cause(cause: object, pattern: bytes, line: str) -> None:
    message = line.partition(" NCCL WARN ")[2].encode()
    assert re.search(pattern, message)
    assert BY_NAME[named_by(message)] is cause


def test_causes_have_remedies_of_their_own() -> None:
    assert len({cause.remedy for cause in CAUSES}) == len({cause.phrase for cause in CAUSES}) == len(CAUSES)


@pytest.mark.parametrize("name", FAILING)
def test_warning_that_ends_a_set_up_is_reported_with_its_fix(name: str) -> None:
    line = next(iter(BY_NAME[name].matches.values()))
    message = line.partition(" NCCL WARN ")[2]
    first, second, *others = logs_of(JOB)
    found = judged(first, unfinished(second) + warned(message), *others)
    assert (found.outcome, found.other_network) == (FabricOutcome.FAILED, False)
    assert found.finding is not None
    assert found.finding.what == f"NCCL cannot connect the nodes by infiniband: {BY_NAME[name].phrase}"
    assert found.finding.remedy == BY_NAME[name].remedy
    assert message[:100] in found.finding.evidence[0]


@pytest.mark.parametrize(
    ("where", "stamp"),
    [
        ("misc/ibvwrap.cc:262", ""),
        ("misc/ibvwrap.cc:262 (wrap_ibv_reg_mr)", "[2026-11-20 10:00:00] "),
        ("misc/ibvwrap.cc:262", "[1,3]<stdout>:"),
    ],
)
def test_warning_is_read_in_every_versions_form(where: str, stamp: str) -> None:
    logs = logs_of(JOB)
    (seen,) = observed(logs[0], unfinished(logs[1]) + warned(MEMLOCK, where, stamp=stamp), *logs[2:])
    assert seen.causes.keys() == {"memlock"}
    assert seen.causes["memlock"].endswith(f"{HEAD}{where} NCCL WARN {MEMLOCK}")


def warner_first(job: Job) -> list[bytes]:
    """The logs of a node, from the process that HEAD names."""
    first, second, *others = logs_of(job)
    return [second, first, *others]


def outcomes(log: bytes, others: Sequence[bytes], promised: str = "infiniband") -> list[FabricOutcome]:
    return [judge(seen).outcome for seen in observed(log, *others, promised=promised)]


def test_failure_counts_until_its_process_goes_on() -> None:
    first, *others = warner_first(JOB)
    failed = unfinished(first) + warned(MEMLOCK)
    assert outcomes(failed, others) == [FabricOutcome.FAILED]
    again = (log.replace(b"0x558", b"0x779").replace(b"0x9a9c0000", b"0xbb") for log in (first, *others))
    one, *more = again
    both = [other + another for other, another in zip(others, more, strict=True)]
    assert outcomes(failed + one, both) == [FabricOutcome.VERIFIED]


@pytest.mark.parametrize("version", [JOB.version, OLD.version], ids=str)
def test_failure_that_a_connection_survives_does_not_count(version: Version) -> None:
    first, *others = warner_first(replace(JOB, version=version))
    for mark in (b"Init COMPLETE", b"Connected all trees"):
        begin = first.rindex(b"\n", 0, first.index(mark)) + 1
        assert outcomes(first[:begin] + warned(MEMLOCK) + first[begin:], others) == [FabricOutcome.VERIFIED]
    assert outcomes(first + warned(MEMLOCK), others) == [FabricOutcome.VERIFIED]


def test_failure_between_set_up_and_connection_counts() -> None:
    first, *others = warner_first(JOB)
    begin = first.rindex(b"\n", 0, first.index(b"Connected all trees")) + 1
    assert outcomes(first[:begin] + warned(MEMLOCK), others) == [FabricOutcome.FAILED]


def test_failed_call_at_level_info_is_no_failure() -> None:
    first, *others = warner_first(JOB)
    assert outcomes(first + f"{HEAD}NCCL INFO {MEMLOCK}\n".encode(), others) == [FabricOutcome.VERIFIED]
    assert outcomes(unfinished(first) + f"{HEAD}NCCL INFO {MEMLOCK}\n".encode(), others) == []


def test_other_network_is_named_before_a_failure() -> None:
    first, *others = warner_first(JOB)
    found = judged(unfinished(first) + warned(MEMLOCK), *others, promised="efa")
    assert (found.outcome, found.other_network) == (FabricOutcome.DEGRADED, True)


@pytest.mark.parametrize(
    ("name", "outcome"), [("peer memory", FabricOutcome.VERIFIED), ("no interface", FabricOutcome.FAILED)]
)
def test_devices_that_sockets_do_not_need_fail_no_tcp(name: str, outcome: FabricOutcome) -> None:
    message = next(iter(BY_NAME[name].matches.values())).partition(" NCCL WARN ")[2]
    first, *others = warner_first(ON_SOCKETS)
    begin = first.rindex(b"\n", 0, first.index(b"Connected all trees")) + 1
    assert outcomes(first[:begin] + warned(message), others, "tcp") == [outcome]


def test_variable_counts_however_it_is_written() -> None:
    found = judged(*logs_of(replace(ON_SOCKETS, env=(("NCCL_NET", "SOCKET"),)))).finding
    assert found is not None
    assert found.what.endswith(": NCCL_NET=Socket is set")


def test_connection_that_is_retried_has_not_failed() -> None:
    retried = (
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, retrying 1/34 after 100 msec"
    )
    first, *others = logs_of(JOB)
    assert judged(first + f"{HEAD}NCCL INFO {retried} of sleep\n".encode(), *others).outcome is FabricOutcome.VERIFIED


SOCKETS = [
    ("no libibverbs", "{head}NCCL INFO Failed to open libibverbs.so[.1]"),
    ("no libibverbs", "\n{head}misc/ibvwrap.cc:62 NCCL WARN Failed to open libibverbs.so[.1]"),
    ("old libibverbs", "\n{head}misc/ibvsymbols.cc:40 NCCL WARN dlvsym failed on ibv_reg_mr - undefined symbol"),
    ("device closed", "\n{head}transport/net_ib.cc:212 NCCL WARN NET/IB : Unable to open device mlx5_0"),
    ("NCCL_IB_HCA", "{head}NCCL INFO NCCL_IB_HCA set to mlx5_9"),
    ("NCCL_IB_HCA", "{head}NCCL INFO NCCL_IB_HCA set by environment to mlx5_9"),
    ("no IP interface", "\n{head}transport/net_ib.cc:180 NCCL WARN NET/IB : No IP interface found."),
    (
        "no provider",
        "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs1",
    ),
    ("no device", "libibverbs: Warning: couldn't load driver 'libefa-rdmav34.so': libefa-rdmav34.so: cannot open"),
    ("no device", "{head}NCCL INFO NCCL_IB_HCA set to "),
]


@pytest.mark.parametrize("version", [JOB.version, OLD.version], ids=str)
@pytest.mark.parametrize(
    ("name", "line"), SOCKETS, ids=[f"{number}-{name}" for number, (name, _) in enumerate(SOCKETS)]
)
def test_reason_for_sockets_is_told_apart(name: str, line: str, version: Version) -> None:
    first, *others = logs_of(replace(ON_SOCKETS, version=version))
    found = judged(first + f"{line.format(head=HEAD)}\n".encode(), *others)
    assert found.outcome is FabricOutcome.TCP_FALLBACK
    assert found.finding is not None
    assert found.finding.what.endswith(f": {BY_NAME[name].phrase}")
    assert found.finding.remedy == BY_NAME[name].remedy


def test_plugin_that_does_not_start_is_the_reason_where_the_fabric_needs_it() -> None:
    line = next(iter(BY_NAME["plugin failed"].matches.values())).partition(" NCCL WARN ")[2]
    first, *others = logs_of(ON_SOCKETS)
    found = judged(first + warned(line, "nccl_net_ofi_create_plugin:1067"), *others, promised="efa").finding
    assert found is not None
    assert found.what.endswith("instead of efa: the network plugin does not start")


def test_library_warning_in_a_ranks_output_is_the_nodes() -> None:
    reader = SetupLogReader()
    for rank, data in enumerate(logs_of(ON_SOCKETS)):
        for chunk in chunks(f"rank-{rank}.1.log", data, node="node0"):
            reader.feed(chunk)
    for chunk in chunks("rank-0.log", SOCKETS[7][1].encode() + b"\n", node="node0"):
        reader.feed(chunk)
    (seen,) = observations(reader.result(), base("infiniband"), "")
    assert "no provider" in seen.causes


GDR_LINES = {
    "NCCL_NET_GDR_LEVEL": ("NCCL_NET_GDR_LEVEL set by environment to LOC",),
    "refused dma-buf": ("DMA-BUF is available on GPU device 0", "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"),
    "no peer memory": ("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",),
    "far apart": ("GPU Direct RDMA Disabled for GPU 0 / HCA 1 (distance 7 > 5)",),
}


@pytest.mark.parametrize("version", versions()[::6], ids=str)
@pytest.mark.parametrize("name", GDR_LINES)
def test_reason_for_host_memory_is_told_apart(name: str, version: Version) -> None:
    lines = "".join(f"{HEAD}NCCL INFO {line}\n" for line in GDR_LINES[name]).encode()
    first, *others = logs_of(replace(JOB, version=version, within="IPC", gdr=False))
    found = judged(lines + first, *others)
    assert found.outcome is FabricOutcome.DEGRADED
    assert found.finding is not None
    assert found.finding.what.endswith(f"without GPUDirect RDMA: {BY_NAME[name].phrase}")
    assert found.finding.remedy == BY_NAME[name].remedy
