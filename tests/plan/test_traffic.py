"""Predicted bytes of each rank and link; `bench.traffic` compares them with the kernel's counters."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from holdfast.plan.collectives import ALGORITHMS, Collective, Library
from holdfast.plan.layout import Layout, Sharding
from holdfast.plan.model_catalog import MODELS
from holdfast.plan.traffic import Step, between_stages, rank_traffic, stage_weights, step_traffic

MODEL = MODELS["llama-3-8b"]


def step(layout: Layout, *, library: Library = Library.NCCL, domain: int = 8) -> Step:
    return Step(model=MODEL, layout=layout, batch=32, length=128, gradient_bytes=4, domain=domain, library=library)


def sent(step: Step) -> dict[tuple[int, int], float]:
    links: defaultdict[tuple[int, int], float] = defaultdict(float)
    for rank in range(step.layout.gpus):
        for message in rank_traffic(step, rank):
            links[rank, message.peer] += message.sent_bytes
    return links


def test_every_collective_of_every_library_has_an_algorithm_with_a_source() -> None:
    assert ALGORITHMS.keys() == {*product(Library, Collective)}
    assert all(each.source for each in ALGORITHMS.values())


@pytest.mark.parametrize(("library", "way"), [(Library.NCCL, 1), (Library.GLOO, -1)])
def test_ddp_sends_all_gradients_around_a_ring(library: Library, way: int) -> None:
    links = sent(step(Layout(dp=4, sharding=Sharding.DDP), library=library))
    each = 2 * 0.75 * MODEL.parameters * 4
    assert links == {(rank, (rank + way) % 4): pytest.approx(each) for rank in range(4)}


def test_gloo_reduces_all_gradients_where_nccl_reduces_a_shard() -> None:
    layout = Layout(dp=8, micro_batch=4, sharding=Sharding.FSDP)
    usual, other = (sum(sent(step(layout, library=each)).values()) for each in (Library.NCCL, Library.GLOO))
    assert other - usual == pytest.approx(8 * 0.875 * MODEL.parameters * 4)


def test_fsdp_gathers_the_root_once_and_the_layers_twice() -> None:
    load = step(Layout(dp=2, micro_batch=16, sharding=Sharding.FSDP))
    parameters, root = stage_weights(load, 0)
    assert root == 2 * MODEL.embedding_weights + MODEL.shape.hidden
    assert sent(load)[0, 1] == pytest.approx(0.5 * ((2 * parameters - root) * 2 + parameters * 4))


def test_hsdp_sends_across_nodes_only_a_shard() -> None:
    load = step(Layout(dp=8, micro_batch=4, sharding=Sharding.HSDP), domain=4)
    across = sum(each for (one, other), each in sent(load).items() if one // 4 != other // 4)
    assert across == pytest.approx(8 * 2 * 0.5 * MODEL.parameters / 4 * 4)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_have_all_parameters_together(stages: int) -> None:
    load = step(Layout(pp=stages))
    assert sum(stage_weights(load, stage)[0] for stage in range(stages)) == MODEL.parameters


@pytest.mark.parametrize("chunks", [1, 4])
def test_both_directions_of_a_pipeline_carry_the_same(chunks: int) -> None:
    load = step(Layout(pp=4, dp=2, interleave=chunks, sharding=Sharding.OPTIMIZER))
    links = [
        (rank, message.peer, message.sent_bytes)
        for rank in range(8)
        for message in rank_traffic(load, rank)
        if message.axis == "pp"
    ]
    whole = 16 * 128 * MODEL.shape.hidden * 2
    assert {(peer, rank): each for rank, peer, each in links} == {(rank, peer): each for rank, peer, each in links}
    assert sum(each for *_, each in links) == 2 * 2 * (4 * chunks - 1) * whole
    assert step_traffic(load)["pp"] == between_stages(load.layout, 2 * chunks * whole) == 2 * chunks * whole


@pytest.mark.parametrize("chunks", [1, 4])
def test_two_stages_send_one_chunk_less_than_crosses_their_boundary(chunks: int) -> None:
    load = step(Layout(pp=2, interleave=chunks))
    each = 32 * 128 * MODEL.shape.hidden * 2
    busiest = step_traffic(load)["pp"]
    assert busiest == max(sum(message.sent_bytes for message in rank_traffic(load, rank)) for rank in range(2))
    assert busiest == (2 * chunks - 1) * each
    assert between_stages(load.layout, busiest) == pytest.approx(2 * chunks * each)


def test_tensor_parallel_ranks_reduce_four_times_per_layer_and_in_embedding_and_head() -> None:
    whole = 32 * 128 * MODEL.shape.hidden * 2
    assert step_traffic(step(Layout(tp=8)))["tp"] == pytest.approx((4 * 32 + 2) * 2 * 7 / 8 * whole)


def test_traffic_of_axes_of_size_one_is_zero() -> None:
    assert step_traffic(step(Layout(sharding=Sharding.DDP))) == {"dp": 0.0, "tp": 0.0, "pp": 0.0}
