"""Train a small transformer, byte by byte, in an ordinary PyTorch loop, over as many ranks as torchrun starts."""

import os
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from holdfast.train import Data, Session

STEPS, BATCH, LENGTH, WIDTH = int(os.environ.get("STEPS", "60")), 8, 64, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        predicted = self.head(self.layer(self.embedding(tokens), mask, is_causal=True))
        return cross_entropy(predicted[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


text = "".join(topics[name] for name in sorted(topics)).encode()  # Python's own documentation; every byte is a token
samples = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH)

rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(rank)
model = DistributedDataParallel(Model()) if world_size > 1 else Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = Data(samples, batch_size=BATCH)
session = Session(model=model, optimizer=optimizer)
for step in session.steps(STEPS):
    optimizer.zero_grad()
    for micro in session.batches(data):
        loss = model(micro.data)
        (loss * micro.loss_scale).backward()
    optimizer.step()
    session.commit(loss=loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if rank == 0:
    torch.save(model.state_dict(), os.environ.get("MODEL", "model.pt"))
if world_size > 1:
    dist.destroy_process_group()
