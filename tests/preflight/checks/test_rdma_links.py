"""Checks of InfiniBand links by what both ends report; a simulated fabric has the tests with real programs."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.rdma_nodes import h100_files, rdma_node, roce_files

from holdfast.findings import Finding
from holdfast.preflight.checks.rdma_links import rdma_links
from holdfast.preflight.node_view import NodeView, NotLookedAt

# In the form of infiniband-diags 44 on a simulated fabric; `Extended speed` as from a ConnectX-3; the values are NDR's.
PORT_INFO = """# Port info: DR path slid 65535; dlid 65535; 0,1 port 7
Lid:.............................0
LocalPort:.......................7
LinkWidthEnabled:................1X or 2X or 4X
LinkWidthSupported:..............1X or 2X or 4X
LinkWidthActive:.................4X
LinkSpeedSupported:..............2.5 Gbps or 5.0 Gbps or 10.0 Gbps
LinkState:.......................Active
PhysLinkState:...................LinkUp
LinkSpeedActive:.................Extended speed
LinkSpeedEnabled:................2.5 Gbps or 5.0 Gbps or 10.0 Gbps
LinkSpeedExtActive:..............106.25 Gbps
LinkSpeedExtSupported:...........14.0625 Gbps or 25.78125 Gbps or 53.125 Gbps or 106.25 Gbps
LinkSpeedExtEnabled:.............14.0625 Gbps or 25.78125 Gbps or 53.125 Gbps or 106.25 Gbps
"""
HDR_ADAPTER = PORT_INFO.replace(" or 106.25 Gbps", "").replace("106.25", "53.125")
NODE_INFO = "NodeType:........................Switch\nLocalPort:.......................7\n"
COUNTERS = """# Port counters: Lid 9 port 7 (CapMask: 0x5300)
SymbolErrorCounter:..............{symbols}
LinkErrorRecoveryCounter:........0
LinkDownedCounter:...............{downed}
PortRcvErrors:...................0
"""
WIDTH_1X = {"LinkWidthActive:.................4X": "LinkWidthActive:.................1X"}
SPEED_HDR = {"ExtActive:..............106.25": "ExtActive:..............53.125"}


def changed(text: str, values: dict[str, str]) -> str:
    for before, after in values.items():
        assert before in text
        text = text.replace(before, after)
    return text


def commands(number: int, own: str = PORT_INFO, other: str = PORT_INFO, **counters: int) -> dict[str, str | Exception]:
    device = f"-C mlx5_{number} -P 1 -t 100"
    return {
        f"smpquery {device} -D nodeinfo 0,1": NODE_INFO,
        f"smpquery {device} -D nodedesc 0,1": "Node Description:...........MF0;leaf1:MQM9700/U1\n",
        f"smpquery {device} -D portinfo 0,1 7": other,
        f"smpquery {device} -D portinfo 0,1 0": "Lid:.............................9\n",
        f"smpquery {device} -D portinfo 0 1": own,
        f"perfquery {device} 9 7": COUNTERS.format(**{"symbols": 0, "downed": 3} | counters),
    }


def healthy() -> dict[str, str | Exception]:
    return {words: text for number in range(8) for words, text in commands(number).items()}


def check(node: MakeNode, answers: dict[str, str | Exception], **counters: int) -> list[Finding]:
    view = rdma_node(node, h100_node_files(counters), network="IB")
    return [*rdma_links(NodeView(wanted=view.wanted, root=view.root, run=node(commands=answers).run))]


def h100_node_files(counters: dict[str, int]) -> dict[str, str]:
    files = h100_files()
    for number in range(8):
        files |= {
            f"sys/class/infiniband_mad/umad{number}/ibdev": f"mlx5_{number}",
            f"sys/class/infiniband_mad/umad{number}/port": "1",
            f"dev/infiniband/umad{number}": "",
        }
    ports = "sys/class/infiniband/mlx5_2/ports/1"
    return files | {f"{ports}/counters/{name}": f"{count}\n" for name, count in counters.items()}


def test_healthy_h100_node_passes(node: MakeNode) -> None:
    assert check(node, healthy(), symbol_error=0, link_downed=0) == []


def test_network_of_ethernet_has_no_subnet(node: MakeNode) -> None:
    assert [*rdma_links(rdma_node(node, roce_files()))] == []


@pytest.mark.parametrize(
    ("end", "values", "what"),
    [
        ({"own", "other"}, WIDTH_1X, "has a width of 1X instead of 4X, although both ends enable more"),
        ({"own", "other"}, SPEED_HDR, "has a speed of 53.125 Gbit/s a lane instead of 106.25 Gbit/s a lane, although"),
        (
            {"other"},
            {"Enabled:................1X or 2X or 4X": "Enabled:................1X"},
            "because MF0;leaf1:MQM9700/U1 port 7 does not enable more",
        ),
    ],
)
def test_link_that_could_be_better_is_located(node: MakeNode, end: set[str], values: dict[str, str], what: str) -> None:
    texts = {each: changed(PORT_INFO, values if each in end else {}) for each in ("own", "other")}
    if end == {"other"}:
        texts = {each: changed(text, WIDTH_1X) for each, text in texts.items()}
    (found,) = check(node, healthy() | commands(2, **texts))
    assert (found.code, found.where) == ("rdma-link-degraded", "mlx5_2:1, MF0;leaf1:MQM9700/U1 port 7")
    assert what in found.what


def test_adapters_of_an_older_generation_than_their_switch_are_as_fast_as_they_can(node: MakeNode) -> None:
    other = changed(PORT_INFO, SPEED_HDR)
    answers = {words: text for n in range(8) for words, text in commands(n, HDR_ADAPTER, other).items()}
    assert check(node, answers) == []


def test_cables_of_an_older_generation_are_no_fault(node: MakeNode) -> None:
    slower = changed(PORT_INFO, SPEED_HDR)
    assert check(node, {words: text for n in range(8) for words, text in commands(n, slower, slower).items()}) == []


def test_half_of_a_splitter_cable_is_full_width(node: MakeNode) -> None:
    half = {"LinkWidthActive:.................4X": "LinkWidthActive:.................2X"}
    other = changed(PORT_INFO, half | {"Supported:..............1X or 2X or 4X": "Supported:..............1X or 2X"})
    other = changed(other, {"Enabled:................1X or 2X or 4X": "Enabled:................1X or 2X"})
    assert check(node, healthy() | commands(2, changed(PORT_INFO, half), other)) == []


def test_switch_port_that_is_not_active_is_named(node: MakeNode) -> None:
    other = changed(
        PORT_INFO, {"LinkState:.......................Active": "LinkState:.......................Initialize"}
    )
    assert codes(check(node, healthy() | commands(2, other=other))) == ["rdma-link-one-sided"]


@pytest.mark.parametrize(
    ("at_switch", "own", "evidence"),
    [
        ({"symbols": 2000}, {}, ("MF0;leaf1:MQM9700/U1 port 7: SymbolErrorCounter 2000",)),
        ({"downed": 40}, {}, ("MF0;leaf1:MQM9700/U1 port 7: LinkDownedCounter 40",)),
        ({}, {"symbol_error": 700}, ("mlx5_2:1: SymbolErrorCounter 700",)),
        ({"symbols": 90, "downed": 9}, {"symbol_error": 90}, ()),
    ],
)
def test_errors_of_one_link_are_located(
    node: MakeNode, at_switch: dict[str, int], own: dict[str, int], evidence: tuple[str, ...]
) -> None:
    found = check(node, healthy() | commands(2, **at_switch), **own)
    assert [each.evidence for each in found] == ([evidence] if evidence else [])
    assert codes(found) == ["rdma-link-errors"] * len(found)


def test_links_that_all_went_down_with_the_node_are_no_fault(node: MakeNode) -> None:
    assert check(node, {words: text for n in range(8) for words, text in commands(n, downed=40).items()}) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "`smpquery -D nodeinfo 0,1` through mlx5_0:1: no answer"),
        (NotLookedAt("there is no program `smpquery`"), "no program"),
        (TimeoutError("`smpquery` has not answered within 2 s"), "has not answered"),
    ],
)
def test_switches_that_do_not_answer_are_no_pass(node: MakeNode, answer: str | Exception, reason: str) -> None:
    with pytest.raises(NotLookedAt, match=reason):
        check(node, {"smpquery": answer})


@pytest.mark.parametrize("answer", ["", "NodeType:........................Switch\n", TimeoutError("not within 2 s")])
def test_port_that_does_not_answer_hides_no_other(node: MakeNode, answer: str | Exception) -> None:
    answers = healthy() | commands(2, **{each: changed(PORT_INFO, WIDTH_1X) for each in ("own", "other")})
    silent = "smpquery -C mlx5_5 -P 1 -t 100 -D nodeinfo 0,1"
    found = check(node, answers | {silent: answer})
    assert [(each.code, each.where) for each in found] == [
        ("rdma-link-degraded", "mlx5_2:1, MF0;leaf1:MQM9700/U1 port 7")
    ]


def test_container_without_management_files_is_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="load ib_umad"):
        [*rdma_links(rdma_node(node, h100_files()))]
