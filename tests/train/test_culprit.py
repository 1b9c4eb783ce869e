"""One wrong rank among equal ones is named, whatever its number and however ranks are placed on nodes."""

from __future__ import annotations

from math import gcd

from holdfast.train.ft.culprit import Corruption, Repetition, judge_repetitions, outvoted, partner_distance

PLACEMENTS = [(ranks, per_node) for per_node in (1, 2, 3, 4, 8) for ranks in range(2, 33) if ranks % per_node == 0]


def repetitions(ranks: int, distance: int, wrong: int, *, always: bool) -> list[Repetition]:
    """What ranks see when one of them computes wrongly, always in the same way or once."""
    same = [always or rank != wrong for rank in range(ranks)]
    involved = {wrong, (wrong - distance) % ranks} if always else {wrong}
    return [Repetition(same[rank], rank not in involved) for rank in range(ranks)]


def test_minority_is_wrong_and_without_a_majority_nobody_is_proven_to_be():
    assert outvoted([7, 7, 7]) is None
    for rank in range(5):
        digests = [7] * 5
        digests[rank] = 9
        assert outvoted(digests) == Corruption((rank,), certain=True)
    assert outvoted([7, 9]) == Corruption((0, 1), certain=False)
    assert outvoted([7, 7, 9, 9]) == Corruption((0, 1, 2, 3), certain=False)
    assert outvoted([7, 9, 7, 9, 7]) == Corruption((1, 3), certain=True)


def test_partner_is_on_another_node_and_partners_lead_through_three_ranks_or_all():
    for ranks, per_node in PLACEMENTS:
        distance = partner_distance(ranks, per_node)
        assert 0 < distance < ranks
        assert ranks // gcd(ranks, distance) >= min(3, ranks), (ranks, per_node)
        if ranks // per_node > 2:
            assert all(rank // per_node != (rank + distance) % ranks // per_node for rank in range(ranks))


def test_rank_that_computes_wrongly_once_or_always_is_the_only_one_named():
    for ranks, per_node in PLACEMENTS:
        distance = partner_distance(ranks, per_node)
        for wrong in range(ranks):
            once = judge_repetitions(repetitions(ranks, distance, wrong, always=False), distance)
            assert once == Corruption((wrong,), certain=True)
            always = judge_repetitions(repetitions(ranks, distance, wrong, always=True), distance)
            assert always == (Corruption((wrong,), certain=True) if ranks > 2 else Corruption((0, 1), certain=False))


def test_nobody_is_named_where_nothing_differs_or_the_program_never_repeats_itself():
    assert judge_repetitions([Repetition(True, True)] * 4, 1) is None
    assert judge_repetitions([Repetition(False, False)] * 4, 1) is None
    assert judge_repetitions([Repetition(True, False)] + [Repetition(True, True)] * 3, 1) == Corruption(
        (0, 1), certain=False
    )
