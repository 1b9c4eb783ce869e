from __future__ import annotations

from holdfast.metrics.metric_catalog import (
    CATALOG,
    METRICS,
    TCP_RETRANSMITS,
    TCP_SENT_BYTES,
    metric_of,
    reduce_metrics,
    reduced_metrics,
    sticky_metrics,
)


def test_names_are_unique_and_end_in_their_unit_where_it_is_one():
    assert len(METRICS) == len(CATALOG)
    ends = {"s": "_s", "bytes": "_bytes"}
    assert [row.name for row in CATALOG if row.unit in ends and not row.name.endswith(ends[row.unit])] == []


def test_metrics_of_several_ranks_come_together_as_their_rows_say():
    head = {"loss": 1.0, "tokens": 64.0, "data_wait_s": 0.1, "mine": 7.0}
    others = [{"loss": 2.0, "tokens": 64.0, "data_wait_s": 0.3}, {"loss": 6.0, "data_wait_s": 0.2, "mine": 9.0}]
    assert reduce_metrics(head, others) == {"loss": 3.0, "tokens": 64.0, "data_wait_s": 0.3, "mine": 7.0}


def test_metric_that_rank_0_lacks_is_that_of_those_who_have_it():
    assert reduce_metrics({}, [{"memory_peak_bytes": 5.0, "grad_norm": 1.0}]) == {"memory_peak_bytes": 5.0}


def test_only_metrics_that_others_have_a_say_in_are_shared():
    assert reduced_metrics({"loss": 1.0, "tokens": 64.0, "mine": 7.0}) == {"loss": 1.0}


def test_metrics_of_parts_follow_the_row_of_the_whole():
    sent, again = metric_of(TCP_SENT_BYTES, "eth0"), metric_of(TCP_RETRANSMITS, "eth0")
    other = metric_of(TCP_SENT_BYTES, "net1")
    assert reduce_metrics({sent: 1.0, again: 2.0}, [{sent: 5.0, again: 1.0, other: 9.0, "mine@eth0": 3.0}]) == {
        sent: 3.0,
        again: 2.0,
        other: 9.0,
    }
    assert sticky_metrics({sent: 1.0, "loss": 2.0, "loss@eth0": 3.0}) == {sent: 1.0}
