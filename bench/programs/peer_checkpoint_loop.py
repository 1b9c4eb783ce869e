"""Steps while state is copied: `peer_checkpoint_loop.py OUT STATE_MIB device|cores`.

Rank 0 appends each step's end to OUT/steps. For a tenth of a second a device computes the gradients, which costs this
process nothing (`device`), or for about as long its own core does (`cores`). Then AdamW updates the whole state:
weights, and two tensors of their size for each.
"""

import os
import sys
import time

import torch

from holdfast.train import Session

WORK_S = 0.1
TENSOR_MIB = 12
"""MiB of state: a million weights and their AdamW state."""
SIDE, MULTIPLIED = 192, 300
"""Size of the matrices that a core multiplies, and the number of multiplications."""

state_mib, by = int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = torch.nn.ParameterList(torch.randn(1 << 20) for _ in range(state_mib // TENSOR_MIB))
for weights in model:
    weights.grad = torch.randn(1 << 20)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
session = Session(model=model, optimizer=optimizer)
log = os.open(os.path.join(sys.argv[1], "steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
factor = torch.randn(SIDE, SIDE)
for _step in session.steps(1_000_000):
    if by == "device":
        time.sleep(WORK_S)
    else:
        for _ in range(MULTIPLIED):
            factor @ factor
    optimizer.step()
    session.commit()
    if os.environ["RANK"] == "0":
        os.write(log, f"{time.time():.6f}\n".encode())
