"""TorchTitan's smallest Llama with holdfast, on text and a tokenizer that are made here.

`--module small_llama --config small_llama`: a registry of configurations, as TorchTitan has one for each model. Without
holdfast it would return `Trainer.Config` from the same settings.
"""

import os
from pathlib import Path

import small_text
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from holdfast.train.integrations.titan import with_holdfast
from holdfast.train.integrations.titan_trainer import HoldfastTrainer

ASSETS = Path(os.environ.get("ASSETS", "assets"))
"""Where the tokenizer and the text are, on every node; made there if missing."""


def small_llama() -> HoldfastTrainer.Config:
    """The debug model, of 6 layers and 256 channels, on text in the files and the format of C4."""
    small_text.make(ASSETS)
    config = llama3_debugmodel()
    config.hf_assets_path = str(ASSETS / "tokenizer")
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4", dataset_path=str(ASSETS / "c4"))
    config.validator.dataloader = HuggingFaceTextDataLoader.Config(
        dataset="c4_validation", dataset_path=str(ASSETS / "c4"), infinite=False
    )
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 128, 60
    config.metrics = MetricsProcessor.Config(log_freq=5, disable_color_printing=True)
    config.debug.seed = 1
    return with_holdfast(config)
