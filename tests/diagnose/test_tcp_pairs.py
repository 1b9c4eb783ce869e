"""The nodes' reports of their ranks' sockets are put together and judged: which pair, which interface, and why."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from holdfast.diagnose.tcp_pairs import (
    DATA_BYTES,
    DATA_BYTES_WITH_GPUS,
    carries_data,
    judge_sockets,
    link_slowed,
    pairs,
    slower_than_probed,
    wrong_pairs,
)
from holdfast.events import LinkRate, LinkSlowed, LinksMeasured, SocketEnds, SocketsObserved

SUBNETS = {"eth0": "10.0.0", "net1": "10.1.0"}


def ends(near: int, far: int, interface: str = "net1", carried_bytes: int = 0) -> SocketEnds:
    """The end at `near` of a connection between two ranks, each on the node of its number."""
    local, remote = (f"{SUBNETS[interface]}.{rank}:{4000 + near + far}" for rank in (near, far))
    return SocketEnds(rank=near, interface=interface, local=local, remote=remote, carried_bytes=carried_bytes)


def report(
    node: int,
    *connections: SocketEnds,
    promised: tuple[str, ...] = ("net1",),
    variables: Mapping[str, str] = {},
    host_name: str = "",
) -> SocketsObserved:
    used = {each.interface for each in connections}
    return SocketsObserved(
        at=1.0,
        node=node,
        replica=0,
        attempt=0,
        promised=promised,
        other_interfaces=tuple(sorted(used - {*promised})) if promised else (),
        connections=connections,
        count=len(connections),
        addresses={f"{subnet}.{node}": name for name, subnet in SUBNETS.items()},
        variables=dict(variables),
        host_name=host_name,
    )


def of(*reports: SocketsObserved) -> dict[int, SocketsObserved]:
    return {each.node: each for each in reports}


def three_nodes(wrong: tuple[int, int], **known: Mapping[str, str] | str) -> dict[int, SocketsObserved]:
    """A mesh of which one pair uses eth0."""

    def interface(near: int, far: int) -> str:
        return "eth0" if {near, far} == {*wrong} else "net1"

    return of(
        *(
            msgspec.structs.replace(
                report(near, *(ends(near, far, interface(near, far)) for far in range(3) if far != near)), **known
            )
            for near in range(3)
        )
    )


def test_connection_counts_if_two_nodes_report_it() -> None:
    to_storage = SocketEnds(rank=0, interface="eth0", local="10.0.0.0:5", remote="10.0.0.99:443")
    ((one, other),) = pairs([report(0, to_storage, ends(0, 1)), report(1, ends(1, 0), ends(1, 2))])
    assert (one.ends.rank, other.ends.rank) == (0, 1)
    assert pairs([report(0, ends(0, 1), ends(1, 0))]) == []


def test_nothing_is_said_before_both_ends_are_known() -> None:
    assert judge_sockets({}).line == ""
    assert judge_sockets(of(report(0, ends(0, 1, "eth0")))).line == ""
    storage = SocketEnds(rank=1, interface="eth0", local="10.0.0.1:5", remote="10.0.0.99:443")
    judgement = judge_sockets(of(report(0, ends(0, 1)), report(1, ends(1, 0), storage)))
    assert (judgement.line, judgement.finding) == ("tcp over net1, as promised", None)


def test_run_that_names_no_interface_is_told_which_it_uses() -> None:
    reports = of(report(0, ends(0, 1, "eth0"), promised=()), report(1, ends(1, 0, "eth0"), promised=()))
    judgement = judge_sockets(reports)
    assert (judgement.line, judgement.finding) == ("tcp over eth0", None)


def test_one_wrong_pair_among_many_is_named() -> None:
    judgement = judge_sockets(three_nodes((1, 2)))
    assert judgement.pairs == 3
    assert judgement.line == "tcp over eth0 and net1 instead of net1"
    assert judgement.finding is not None
    assert judgement.finding.code == "wrong-interface"
    assert judgement.finding.what.startswith(
        "rank 1 on node1 and rank 2 on node2 exchange data over eth0 instead of net1: "
    )
    assert judgement.finding.evidence == ("rank 1 on node1: eth0 10.0.0.1:4003; rank 2 on node2: eth0 10.0.0.2:4003",)


def test_several_wrong_pairs_are_counted() -> None:
    reports = of(*(report(near, *(ends(near, far, "eth0") for far in range(3) if far != near)) for near in range(3)))
    finding = judge_sockets(reports).finding
    assert finding is not None
    assert "over eth0 instead of net1, and 2 other connections: " in finding.what


@pytest.mark.parametrize(
    ("variables", "host_name", "because", "todo"),
    [
        (
            {},
            "node1 (eth0)",
            "GLOO_SOCKET_IFNAME is not set, so Gloo uses the interface that the host name resolves to, node1 (eth0)",
            "Set GLOO_SOCKET_IFNAME=net1 in the job's `fabric.env`, or have the host name resolve to",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "eth0"},
            "node1 (net1)",
            "GLOO_SOCKET_IFNAME=eth0 in its environment",
            "Set GLOO_SOCKET_IFNAME=net1 in the job's `fabric.env`, and remove it from the job's `env`",
        ),
        (
            {"NCCL_SOCKET_IFNAME": "=eth,eth0"},
            "",
            "NCCL_SOCKET_IFNAME==eth,eth0 in its environment",
            "Set NCCL_SOCKET_IFNAME=net1",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "net1", "NCCL_SOCKET_IFNAME": "^docker"},
            "node1 (eth0)",
            "the program names another interface itself",
            "Remove what sets GLOO_SOCKET_IFNAME",
        ),
    ],
)
def test_cause_names_the_variable_to_set(variables: dict[str, str], host_name: str, because: str, todo: str) -> None:
    finding = judge_sockets(three_nodes((0, 1), variables=variables, host_name=host_name)).finding
    assert finding is not None
    assert finding.what.endswith(f": {because}")
    assert finding.remedy.startswith(todo)


def slowed(remote: str = "", **others: int) -> LinkSlowed:
    connection = ends(1, 2)
    return LinkSlowed(
        at=9.0,
        node=1,
        replica=0,
        attempt=0,
        ends=msgspec.structs.replace(connection, remote=remote or connection.remote),
        before_bytes_s=1_234_000_000,
        now_bytes_s=2_400_000,
        retransmits=17,
        segments=8000,
        others_bytes_s=others or {ends(1, 0).remote: 1_100_000_000},
    )


def test_slow_link_is_named_with_its_evidence() -> None:
    slow = link_slowed(slowed(), three_nodes((7, 8)))
    assert slow is not None
    assert slow.nodes == (1, 2)
    assert slow.share == pytest.approx(0.0019, rel=0.1)
    finding = slow.finding
    assert finding.code == "link-slowed"
    assert finding.what == (
        "the link from rank 1 on node1 to rank 2 on node2 over net1 has become slow: 2.4 MB/s instead of 1.23 GB/s"
    )
    assert finding.evidence == (
        "10.1.0.1:4003 to 10.1.0.2:4003",
        "17 of 8,000 segments were sent again",
        "1.1 GB/s to node0 at the same time",
    )


def test_rank_at_the_other_end_may_be_unknown_but_not_its_node() -> None:
    slow = link_slowed(slowed("10.1.0.2:9999"), three_nodes((7, 8)))
    assert slow is not None
    assert "to node2 over net1" in slow.finding.what
    assert link_slowed(slowed("10.1.0.99:443"), three_nodes((7, 8))) is None, "storage, perhaps"
    assert link_slowed(slowed("10.1.0.1:9999"), three_nodes((7, 8))) is None


def measured(*rates: tuple[int, int]) -> LinksMeasured:
    """The rates of node 1 to others, in MB/s."""
    links = tuple(LinkRate(ends=ends(1, far), bytes_s=rate * 1_000_000) for far, rate in rates)
    return LinksMeasured(at=5.0, node=1, replica=0, attempt=0, links=links)


def test_link_that_is_slower_than_in_the_probe_is_named() -> None:
    probed = {(1, 0): 1e9, (1, 2): 0.9e9}
    slow = slower_than_probed(
        measured((2, 100), (0, 900)), three_nodes((7, 8)), lambda near, far: probed.get((near, far), 0.0)
    )
    assert slow is not None
    finding = slow.finding
    assert finding.what == (
        "the link from rank 1 on node1 to rank 2 on node2 over net1 has been slow since the first steps: "
        "100 MB/s, and 900 MB/s when the nodes probed each other"
    )
    assert finding.evidence == ("10.1.0.1:4003 to 10.1.0.2:4003", "900 MB/s to node0 at the same time")


def test_links_that_share_an_interface_are_about_as_slow_as_each_other() -> None:
    assert slower_than_probed(measured((2, 160), (0, 180)), three_nodes((7, 8)), lambda *_: 1e9) is None


@pytest.mark.parametrize(
    ("carried", "promised", "has_gpus", "data"),
    [
        (DATA_BYTES, 0, False, True),
        (DATA_BYTES - 1, 0, False, False),
        (9 * DATA_BYTES, 9 * DATA_BYTES, False, False),
        (DATA_BYTES_WITH_GPUS - 1, 0, True, False),
        (DATA_BYTES_WITH_GPUS, DATA_BYTES, True, True),
    ],
)
def test_interface_carries_the_data_of_a_node_if_it_carries_most_of_it(
    carried: int, promised: int, has_gpus: bool, data: bool
) -> None:
    new = msgspec.structs.replace(report(0, ends(0, 1, "eth0", carried), ends(0, 2)), promised_bytes=promised)
    wrong = wrong_pairs(new, of(new, report(1, ends(1, 0, "eth0")), report(2, ends(2, 0))))
    assert [(one.ends.rank, other.ends.rank) for one, other in wrong] == [(0, 1)]
    assert carries_data(wrong, has_gpus=has_gpus) is data


@pytest.mark.parametrize("probed_bytes_s", [0.0, 100e6, 160e6])
def test_link_without_a_probe_or_about_as_fast_as_in_it_needs_nothing(probed_bytes_s: float) -> None:
    assert slower_than_probed(measured((2, 100), (9, 1)), three_nodes((7, 8)), lambda *_: probed_bytes_s) is None
