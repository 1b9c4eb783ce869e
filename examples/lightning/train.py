"""Train a small Llama with Lightning, over as many ranks as torchrun starts."""

import os
from pydoc_data.topics import topics

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from holdfast.train.integrations.lightning import HoldfastCallback

STEPS, LENGTH = int(os.environ.get("STEPS", "60")), 64


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            attention_dropout=0.1,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


text = "".join(topics[name] for name in sorted(topics)).encode()  # Python's own documentation; every byte is a token
tokens = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

seed_everything(0)
module = Llama()
samples = tokens[: int(os.environ.get("SAMPLES", "5000"))]
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
loader = StatefulDataLoader(samples, batch_size=8, sampler=DistributedSampler(samples, world_size, rank))
holdfast = HoldfastCallback()
trainer = Trainer(
    callbacks=[holdfast],
    max_steps=STEPS,
    strategy="ddp" if world_size > 1 else "auto",
    use_distributed_sampler=False,
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader, ckpt_path=holdfast.resume_path)
if trainer.is_global_zero:
    torch.save(module.state_dict(), os.environ.get("MODEL", "model.pt"))
