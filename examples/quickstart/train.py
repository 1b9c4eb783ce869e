"""Train a small Llama on real English, byte by byte, in an ordinary PyTorch loop; the lines marked + are holdfast's."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from holdfast.train import Session, Text  # +

STEPS = int(os.environ.get("STEPS", "150"))
BATCH, LENGTH = 8, 128

# Every rank finds these set, whether holdfast or torchrun started it; `python train.py` alone is one rank.
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
if world_size > 1:
    dist.init_process_group("nccl" if on_gpu else "gloo")

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,  # every byte is a token
    hidden_size=192,
    intermediate_size=640,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=LENGTH,
    use_cache=False,
)
model: torch.nn.Module = LlamaForCausalLM(config).to(device)
if world_size > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = Text(length=LENGTH)  # + or a data set of your own

session = Session(model=model, optimizer=optimizer)  # + resumes where the last checkpoint was taken
for step in session.steps(STEPS):  # + counts from 1, or from there
    optimizer.zero_grad()
    for micro in session.micro_batches(BATCH):  # + this rank's samples; more where there are fewer ranks
        tokens = text.tokens(micro.samples).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss * micro.weight).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    session.commit(loss=loss, tokens=session.global_batch * LENGTH)  # + reports the step, saves when due
    if rank == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if world_size > 1:
    dist.destroy_process_group()
