"""Trains a tiny Llama on bytes of English; every rung of the ladder runs this program with the same model and data."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from holdfast.train import Session, Text

STEPS, BATCH, LENGTH = int(os.environ.get("STEPS", "60")), 4, 64
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    dist.init_process_group("nccl" if on_gpu else "gloo")

torch.manual_seed(0)
llama = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
).to(device)
model = DistributedDataParallel(llama) if dist.is_initialized() else llama
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = Text(length=LENGTH)

session = Session(model=model, optimizer=optimizer, sequence_length=LENGTH)
for _ in session.steps(STEPS):
    optimizer.zero_grad()
    for micro in session.micro_batches(BATCH):
        tokens = text.tokens(micro.samples).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss * micro.loss_scale).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    session.commit(loss=loss, tokens=session.global_batch * LENGTH, grad_norm=norm)
if dist.is_initialized():
    dist.destroy_process_group()
