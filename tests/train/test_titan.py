"""What holdfast gives TorchTitan, part by part. Whole trainings: tests/runs/test_torchtitan.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.private_names import missing
from torch import nn

from holdfast.errors import HoldfastError
from holdfast.train.data.sharding import Batch, ShardPlan
from holdfast.train.session.rank_config import OuterSyncConfig, RankConfig, SyncMethod

pytestmark = pytest.mark.slow  # importing TorchTitan takes 6 s of CPU time

MODULE = "holdfast.train.integrations.titan"


def parsed(*arguments: str, config: str = "llama3.llama3_debugmodel") -> Any:
    """What TorchTitan's command line makes of these."""
    from torchtitan.config.manager import ConfigManager

    return ConfigManager().parse_args(["--module", MODULE, "--config", config, *arguments])


def test_configuration_of_torchtitan_keeps_its_settings_and_flags() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from holdfast.train.integrations.titan_trainer import HoldfastTrainer

    own = llama3_debugmodel()
    given = parsed("--training.steps", "7", "--checkpoint.async-mode", "async")
    assert type(given) is HoldfastTrainer.Config
    assert (given.training.steps, given.checkpoint.async_mode) == (7, "async")
    assert given.optimizer == own.optimizer
    assert given.model_spec.name == own.model_spec.name
    assert missing(given, *own.__dataclass_fields__) == []


def test_fault_tolerant_configuration_loses_only_what_needs_its_own_manager() -> None:
    given = parsed(
        *("--fault-tolerance.num-fragments", "1", "--fault-tolerance.semi-sync-method", "local_sgd"),
        config="torchft.llama3.llama3_torchft_debugmodel",
    )
    assert type(given.optimizer).__qualname__ == "OptimizersContainer.Config"
    assert type(given.checkpoint).__qualname__ == "CheckpointManager.Config"
    assert (given.fault_tolerance.semi_sync_method, given.fault_tolerance.sync_steps) == ("local_sgd", 10)
    assert given.optimizer.param_groups[0].optimizer_kwargs["lr"] == 8e-4


def test_data_and_tokenizers_of_the_hub_stay_torchtitans() -> None:
    from torchtitan.hf_datasets.text_datasets import DATASETS

    given = parsed(
        "--dataloader.dataset", "c4", "--hf-assets-path", "assets/hf/Llama-3.1-8B", config="llama3.llama3_8b"
    )
    assert (given.dataloader.dataset, given.dataloader.dataset_path) == ("c4", None)
    assert DATASETS["c4"].path == "allenai/c4"
    assert given.hf_assets_path == "assets/hf/Llama-3.1-8B"


def test_unknown_configuration_is_refused_with_torchtitans_message() -> None:
    for name in ("llama3.llama3_9b", "llama9.llama3_8b", "llama3_8b"):
        with pytest.raises(ValueError, match="not found in holdfast"):
            parsed(config=name)


def test_model_with_its_own_trainer_is_refused() -> None:
    with pytest.raises(HoldfastError) as raised:
        parsed(config="flux.flux_debugmodel")
    assert raised.value.findings[0].code == "torchtitan-trainer-unsupported"


@pytest.mark.parametrize("method", [*SyncMethod])
def test_method_of_synchronisation_replaces_that_of_the_job(method: SyncMethod) -> None:
    from torchtitan.experiments.torchft.config import FaultTolerance

    from holdfast.train.integrations.titan_limits import with_outer_sync

    config = RankConfig(replica_count=2, outer_sync=OuterSyncConfig(method=SyncMethod.LOCAL_SGD, every=3))
    assert with_outer_sync(config, FaultTolerance()) is config
    given = FaultTolerance(semi_sync_method=method.upper(), sync_steps=20)
    assert with_outer_sync(config, given).outer_sync == OuterSyncConfig(method=method, every=20)


@pytest.mark.parametrize(
    ("replicas", "given", "evidence"),
    [
        (1, {"semi_sync_method": "diloco"}, "HOLDFAST_REPLICA_COUNT is 1"),
        (2, {"semi_sync_method": "diloco", "num_fragments": 2}, "num_fragments=2"),
        (2, {"semi_sync_method": "nesterov"}, "there are local_sgd and diloco"),
    ],
)
def test_synchronisation_that_a_session_cannot_do_is_refused(replicas: int, given: Any, evidence: str) -> None:
    from torchtitan.experiments.torchft.config import FaultTolerance

    from holdfast.train.integrations.titan_limits import with_outer_sync

    with pytest.raises(HoldfastError) as raised:
        with_outer_sync(RankConfig(replica_count=replicas), FaultTolerance(**given))
    assert raised.value.findings[0].code == "torchtitan-unsupported"
    assert raised.value.findings[0].evidence == (evidence,)


def test_elastic_nodes_are_refused_unless_there_are_replicas() -> None:
    from holdfast.train.integrations.titan_limits import refuse_elastic

    with pytest.raises(HoldfastError) as raised:
        refuse_elastic(RankConfig(elastic=True))
    assert (raised.value.findings[0].code, raised.value.findings[0].where) == ("torchtitan-unsupported", "nodes")
    for fine in (RankConfig(), RankConfig(elastic=True, replica_count=2)):
        refuse_elastic(fine)


def test_parameters_have_one_name_each_and_stay_the_models() -> None:
    from holdfast.train.integrations.titan_state import parameter_tree

    def split(_: Any, state: dict[str, Any], *given: Any) -> None:
        state["0.first"], state["0.second"] = state.pop("0.weight").split((1, 2))

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.add_module("_checkpoint_wrapped_module", nn.Linear(3, 1))
    model.register_state_dict_post_hook(split)
    model.register_buffer("cache", torch.ones(1), persistent=False)
    tree = parameter_tree(model)
    assert {*dict(tree.named_parameters())} == {"0.weight", "0.bias", "1.weight", "1.bias", "weight", "bias"}
    assert {*tree.state_dict()} - {*dict(tree.named_parameters())} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    tree.load_state_dict({name: torch.full_like(each, 5) for name, each in tree.state_dict().items()})
    assert all(bool((each == 5).all()) for each in (*model.parameters(), model[1].running_mean))


def test_attention_on_a_host_is_that_of_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from holdfast.train.integrations.titan_cpu import masked_attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    document = torch.tensor([[0] * 10 + [1] * 6, [0] * 16])

    def mask(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return (row >= column) & (document[batch, row] == document[batch, column])

    blocks = create_block_mask(mask, 2, None, 16, 16, device="cpu")
    ours, _ = masked_attention(
        query, key, value, score_mod=None, block_mask=blocks, scale=None, enable_gqa=True, return_aux=None
    )
    theirs: Any = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True)
    assert torch.allclose(ours, theirs, atol=1e-6)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        masked_attention(query, key, value, score_mod=abs, block_mask=blocks, scale=None, enable_gqa=True)


def test_samples_that_are_computed_again_have_no_labels_that_count() -> None:
    from torchtitan.components.loss import IGNORE_INDEX

    from holdfast.train.integrations.titan_data import to_titan

    data = ({"input": torch.ones(1, 4)}, torch.arange(4)[None])
    counted, again = (
        to_titan(Batch(samples=range(1), loss_scale=scale, is_last=True, data=data)) for scale in (1.0, 0.0)
    )
    assert counted[1].tolist() == [[0, 1, 2, 3]]
    assert again[1].tolist() == [[IGNORE_INDEX] * 4]


def test_place_in_the_data_holds_for_one_number_of_shards() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    from holdfast.train.integrations.titan_data import LoaderPosition

    def loader() -> Any:
        return StatefulDataLoader([*range(8)], batch_size=2)

    first, second = loader(), loader()
    batches = iter(first)
    next(batches)
    state = LoaderPosition(first, shards=2).state_dict()
    LoaderPosition(second, shards=2).load_state_dict(state)
    assert [each.tolist() for each in second] == [each.tolist() for each in batches]
    with pytest.raises(HoldfastError) as raised:
        LoaderPosition(second, shards=4).load_state_dict(state)
    finding = raised.value.findings[0]
    assert finding.code == "torchtitan-unsupported"
    assert "2 before, 4 now" in finding.what
    assert finding.remedy == "Set `recovery.replicas`, or return to 2 ranks that read different samples."


def test_position_of_torchtitans_loader_is_saved_without_pickle(tmp_path: Path) -> None:
    from torchtitan.components.dataloader import ParallelAwareDataloader

    from holdfast.train.integrations.titan_data import LoaderPosition

    def loader() -> Any:
        return ParallelAwareDataloader([*range(8)], dp_rank=0, dp_world_size=1, batch_size=2)

    first, second = loader(), loader()
    batches = iter(first)
    next(batches)
    torch.save(LoaderPosition(first, shards=1).state_dict(), tmp_path / "state")
    LoaderPosition(second, shards=1).load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert b"dp_rank" not in (tmp_path / "state").read_bytes()
    assert [each.tolist() for each in second] == [each.tolist() for each in batches]


def test_replicas_gradients_count_by_their_samples() -> None:
    plans = [ShardPlan(global_batch=7, micro_batch_size=2, rank=rank, world_size=4) for rank in range(4)]
    weights = [plans[0].weight_of(range(first, first + 2)) for first in (0, 2)]
    assert weights == [4 * 2 / 7, 3 * 2 / 7]
    assert sum(weights) / len(weights) == 1
