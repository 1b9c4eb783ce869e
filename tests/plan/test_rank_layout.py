"""The choice of nodes agrees with brute force, and predicted traffic with a count of every rank's messages."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from holdfast import api
from holdfast.job.spec import Job
from holdfast.plan.layout import Layout
from holdfast.plan.rank_layout import RankGrid, Topology, choose_nodes, crossing, lay_out, ordered_nodes, topology
from holdfast.plan.topology_file import order_by_switches

SENT = {"dp": 100.0, "tp": 1000.0, "pp": 10.0}


def tree_of(rooms: list[list[list[int]]]) -> Topology:
    """Zones of blocks of racks with so many nodes, in an order unlike the tree's."""
    labels = {
        f"n{zone}.{block}.{rack}.{node}": {"zone": f"z{zone}", "block": f"b{block}", "rack": f"r{rack}"}
        for zone, blocks in enumerate(rooms)
        for block, racks in enumerate(blocks)
        for rack, count in enumerate(racks)
        for node in range(count)
    }
    names = list(labels)
    random.Random(0).shuffle(names)
    return topology({name: labels[name] for name in names}, ("zone", "block", "rack"))


def random_tree(dice: random.Random) -> Topology:
    leaves = dice.randint(1, 12)
    rooms: list[list[list[int]]] = [[[]]]
    for _ in range(leaves):
        place = dice.choice(("rack", "rack", "block", "zone"))
        if place == "zone":
            rooms.append([[]])
        elif place == "block":
            rooms[-1].append([])
        rooms[-1][-1].append(dice.randint(1, 5))
    return tree_of(rooms)


def spread(tree: Topology, nodes: tuple[int, ...]) -> list[int]:
    """Number of levels at which the nodes are in several domains, then of their domains at each, highest first."""
    counts = [len({domains[node] for node in nodes}) for domains in tree.domains]
    return [sum(count > 1 for count in counts), *counts]


@pytest.mark.parametrize("seed", range(60))
def test_choice_on_small_trees_is_that_of_brute_force(seed: int) -> None:
    dice = random.Random(seed)
    tree, group = random_tree(dice), dice.choice((1, 1, 2, 3))
    room = [len(nodes) // group for nodes in tree.leaves]
    for wanted in {1, dice.randint(1, 12), dice.randint(1, 40)}:
        possible = [
            spread(tree, tuple(tree.leaves[leaf][0] for leaf in taken))
            for number in range(1, len(room) + 1)
            for taken in combinations(range(len(room)), number)
            if sum(room[leaf] for leaf in taken) >= wanted and all(room[leaf] for leaf in taken)
        ]
        found = choose_nodes(tree, wanted * group, group=group)
        if found is None:
            assert not possible
            continue
        assert len({*found}) == len(found) == wanted * group
        assert spread(tree, found) == min(possible)
        for start in range(0, len(found), group):
            assert len({tree.domains[-1][node] for node in found[start : start + group]}) == 1


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=32),
        Layout(tp=4, dp=4, pp=2),
        Layout(tp=2, cp=2, dp=2, pp=4),
        Layout(tp=8, dp=2, pp=2),
        Layout(tp=16, pp=2),
        Layout(pp=32),
        Layout(tp=4, pp=8),
    ],
    ids=str,
)
def test_predicted_traffic_is_that_of_a_count_over_all_ranks(layout: Layout) -> None:
    tree, grid = tree_of([[[1, 2], [3]], [[2, 2]]]), RankGrid(layout=layout, per_node=4)
    assert grid.is_even
    order = random.Random(1).sample(range(len(tree.nodes)), grid.nodes)
    shares = layout.cp * layout.dp
    sent = dict.fromkeys(tree.levels, 0.0)

    def node(tp: int, share: int, stage: int) -> int:
        return order[(tp + layout.tp * (share + shares * stage)) // grid.per_node]

    for tp, share, stage in product(range(layout.tp), range(shares), range(layout.pp)):
        messages = [
            ("tp", node((tp + 1) % layout.tp, share, stage)),
            ("dp", node(tp, (share + 1) % shares, stage)),
            *([("pp", node(tp, share, stage + 1))] if stage + 1 < layout.pp else []),
        ]
        for level, domains in zip(tree.levels, tree.domains, strict=True):
            here = domains[node(tp, share, stage)]
            sent[level] += sum(SENT[axis] for axis, peer in messages if domains[peer] != here)
    assert crossing(tree, order, grid, SENT) == pytest.approx(sent)


def test_layout_crosses_less_than_the_given_order_and_a_random_one() -> None:
    tree = tree_of([[[4] * 8 for _ in range(4)] for _ in range(2)])
    found = lay_out(tree, RankGrid(layout=Layout(tp=8, dp=32, pp=4), per_node=8), SENT)
    assert found is not None
    assert len({*found.nodes}) == 128
    assert found.crossing["zone"] == 0
    for level in tree.levels:
        assert found.crossing[level] < 0.5 * found.given[level]
        assert found.crossing[level] < 0.5 * found.at_random[level]


def test_stages_are_neighbours_where_they_send_more_than_rings() -> None:
    tree = tree_of([[[2, 2], [2, 2]]])
    grid = RankGrid(layout=Layout(tp=8, dp=4, pp=2), per_node=8)
    rings, pipelines = (
        ordered_nodes(tree, grid, {"dp": dp, "tp": 0.0, "pp": pp}) for dp, pp in ((100.0, 1.0), (1.0, 100.0))
    )
    assert rings is not None
    assert pipelines is not None
    racks, blocks = tree.domains[-1], tree.domains[-2]
    assert len({blocks[node] for node in rings[:4]}) == 1
    assert all(racks[pipelines[place]] == racks[pipelines[place + 4]] for place in range(4))


def test_job_without_room_has_no_layout() -> None:
    tree = tree_of([[[3, 3]]])
    assert lay_out(tree, RankGrid(layout=Layout(dp=56), per_node=8), SENT) is None
    assert choose_nodes(tree, 4, group=4) is None


def allocated(*overrides: str) -> Job:
    return api.load_job(None, command=("true",), nodes=2, name="test", overrides=overrides)


@pytest.mark.parametrize(
    ("switches", "overrides", "ordered"),
    [
        ("n1 s.a, n2 s.b, n3 s.b", (), "n2 n3 n1"),
        ("n1 s.a, n2 s.a, n3 s.b", (), "n1 n2 n3"),
        ("n1 s.a, n2 t.a, n3 t.b", (), "n2 n3 n1"),  # what is called alike below two switches is two
        ("n1 s.a, n2 s.b, n3 s.b, n4 s.a", ("nodes=2", "gpus_per_node=1", "parallel={tp: 2}"), "n1 n4 n2 n3"),
        (
            "n1 s.a, n2 s.b, n3 s.a, n4 s.b, n5 s.a",
            ("nodes=4", "gpus_per_node=1", "parallel={tp: 2, pp: 2}"),
            "n1 n3 n2 n4 n5",
        ),
        ("n1 s.a, n2 s.b, n3 s.b", ("nodes={min: 2, max: 8}",), "n1 n2 n3"),
        ("n1 s.a, n2 s.b.c, n3 s.b", (), "n1 n2 n3"),
        ("n1 , n2 s.b, n3 s.b", (), "n1 n2 n3"),
        ("n1 , n2 , n3 ", (), "n1 n2 n3"),
        ("n1 s.a, n2 s.b", ("parallel={tp: 4}", "gpus_per_node=2"), "n1 n2"),
    ],
)
def test_nodes_of_an_allocation_are_ordered_by_their_switches(
    switches: str, overrides: tuple[str, ...], ordered: str
) -> None:
    above = dict(each.strip().split(" ") if " " in each.strip() else (each.strip(), "") for each in switches.split(","))
    assert order_by_switches(allocated(*overrides), above) == tuple(ordered.split())
