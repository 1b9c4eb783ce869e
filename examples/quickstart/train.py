"""Train a small Llama on real English, byte by byte, in an ordinary PyTorch loop; the lines marked + are holdfast's."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from holdfast.train import Session, Text  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "150")))
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=192, help="a multiple of 64")
parser.add_argument("--sharding", choices=["ddp", "fsdp", "hsdp"], default="ddp", help="hsdp: one copy on each node")
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--activation-checkpointing", action="store_true")
parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND")
parser.add_argument("--save", default=os.environ.get("MODEL"), help="a file for the weights at the end")
args = parser.parse_args()
BATCH, LENGTH = 8, 128

# holdfast and torchrun set these for every rank; `python train.py` alone is one rank.
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
    hidden_size=args.width,
    intermediate_size=args.width // 3 * 10,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 32,
    num_key_value_heads=args.width // 64,
    max_position_embeddings=LENGTH,
    use_cache=False,
)
llama = LlamaForCausalLM(config).to(device)
if args.activation_checkpointing:
    llama.activation_checkpointing_enable()
if args.compile:
    llama.compile(backend=args.compile)
model: torch.nn.Module = llama
if world_size > 1 and args.sharding == "ddp":
    model = DistributedDataParallel(llama)
elif world_size > 1:
    together = int(os.environ["LOCAL_WORLD_SIZE"]) if args.sharding == "hsdp" else world_size
    shape = (world_size // together, together)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    mesh = mesh if args.sharding == "hsdp" else mesh["shard"]
    for layer in llama.model.layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(llama, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
text = Text(length=LENGTH)  # + or your own dataset

session = Session(model=model, optimizer=optimizer)  # + resumes from the last checkpoint
for step in session.steps(args.steps):  # + counts from 1, or from the checkpoint's step
    optimizer.zero_grad()
    for micro in session.micro_batches(BATCH, micro_batch_size=BATCH // args.accumulate):  # + this rank's samples
        tokens = text.tokens(micro.samples).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = model(input_ids=tokens, labels=tokens).loss
        (loss * micro.loss_scale).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    session.commit(loss=loss, tokens=session.global_batch * LENGTH, grad_norm=norm)  # + reports, saves when due
    if rank == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if args.save:
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(weights, args.save)
if world_size > 1:
    dist.destroy_process_group()
