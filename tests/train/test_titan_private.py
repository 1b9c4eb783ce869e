"""The private names of TorchTitan that holdfast uses: an upgrade fails here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version

import pytest
from tests.train.private_names import require, takes

pytestmark = pytest.mark.slow  # importing TorchTitan takes 6 s of CPU time


def check(holds: bool, name: str, feature: str) -> None:
    require(holds, f"torchtitan {version('torchtitan')}", name, feature)


def test_release_is_the_one_whose_private_names_are_known() -> None:
    check(version("torchtitan").startswith("0.3."), "the release", "everything: read the changes of its Trainer first")


def test_trainers_loop_makes_the_calls_that_the_session_takes_for_steps() -> None:
    from torchtitan.trainer import Trainer

    calls = (
        "self.checkpointer.load(step=",
        "self.batch_generator(self.dataloader)",
        "while self.should_continue_training():",
        "self.step += 1",
        "self.train_step(data_iterator)",
        "self.checkpointer.save(",
        "self.validator.validate(self.model_parts, self.step)",
    )
    loop = inspect.getsource(Trainer.train)
    places = [loop.find(call) for call in calls]
    check(places == sorted(places) and places[0] > 0, "Trainer.train", "the steps of a session")
    step = inspect.getsource(Trainer.train_step)
    for name in ("range(self.gradient_accumulation_steps)", "self.forward_backward_step(", "global_valid_tokens="):
        check(name in step, f"Trainer.train_step: {name}", "losses, and the samples of replicas")
    check("self.ntokens_seen += " in inspect.getsource(Trainer), "Trainer.ntokens_seen", "resuming its count of tokens")
    built = inspect.getsource(Trainer.__init__)
    for name in ("self.checkpointer = ", "self.validator = ", "self.dataloader = ", "self.tokenizer = "):
        check(name in built, name, "what a session takes the place of")


def test_containers_hold_one_optimizer_and_one_schedule_each_for_all_of_a_model() -> None:
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer

    check("iter(self.optimizers)" in inspect.getsource(OptimizersContainer.__iter__), "OptimizersContainer", "saves")
    check(
        "iter(self.schedulers)" in inspect.getsource(LRSchedulersContainer.__iter__), "LRSchedulersContainer", "saves"
    )


def test_configurations_and_names_are_found_where_they_were() -> None:
    from torchtitan.components.checkpointer.utils import canonical_fqn
    from torchtitan.components.loss import IGNORE_INDEX
    from torchtitan.components.metrics import BaseLogger, MetricsProcessor
    from torchtitan.config.manager import ConfigManager

    plain = canonical_fqn("layers.0._checkpoint_wrapped_module.attention.wo.weight")
    check(plain == "layers.0.attention.wo.weight", "canonical_fqn", "names of parameters in checkpoints")
    check(IGNORE_INDEX == -100, "IGNORE_INDEX", "samples that are computed again")
    check(takes(BaseLogger.log, "self", "metrics", "step"), "BaseLogger.log", "the numbers that TorchTitan logs")
    check("self.logger.log(metrics, step)" in inspect.getsource(MetricsProcessor.log), "MetricsProcessor", "its MFU")
    check("getattr(module, config_name" in inspect.getsource(ConfigManager), "ConfigManager", "`--config llama3.NAME`")


def test_kernels_and_devices_can_be_replaced_on_a_host_without_gpu() -> None:
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.common import attention
    from torchtitan.tools import utils as tools

    flex: Callable[..., object] = attention.FlexAttention.compiled_flex_attn
    check("FlexAttention._compiled_flex_attn(" in inspect.getsource(flex), "_compiled_flex_attn", "attention on CPUs")
    mask = inspect.getsource(attention.create_attention_mask)
    check("_compiled_create_block_mask(" in mask, "_compiled_create_block_mask", "masks on CPUs")
    check(hasattr(tools, "_get_available_device_type"), "_get_available_device_type", "finding that there is no GPU")
    for module in (metrics, utils):
        for name in ("device_type", "device_module"):
            check(hasattr(module, name), f"{module.__name__}.{name}", "training on CPUs")
