"""DeepSpeed with ZeRO and its own checkpoints, as its CIFAR example."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from killed import killed_once, tell

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}

deepspeed.ops.__compatible_ops__ = {}  # DeepSpeed would compile a C++ extension first, which takes a minute
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=CONFIG)
tag, state = engine.load_checkpoint("saved")
first = state["epoch"] + 1 if tag else 0
for epoch in range(first, 4):
    killed_once(dist.get_rank(), epoch)
    engine.backward(engine(torch.full((2, 8), float(epoch))).square().mean())
    engine.step()
    engine.save_checkpoint("saved", client_state={"epoch": epoch})
tell(dist.get_rank(), first, sum(each.double().sum().item() for each in engine.module.parameters()))
dist.destroy_process_group()
