"""A loop in a Session on a GPU, if there is one, that notes when it reached what: `gpu_loop.py OUT [WIDTH]`.

Rank 0 appends lines `PID WHAT STEP SECONDS` to OUT/rank-0: born, imported, device (opened), resumed, and each step.
"""

import time

BORN = time.time()

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from holdfast.train import Session  # noqa: E402

IMPORTED = time.time()
STEP_S = 0.05
log = os.open(Path(sys.argv[1], "rank-0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what: str, step: int, at: float) -> None:
    """Write one line in one call, so that a kill leaves no half of it."""
    os.write(log, f"{os.getpid()} {what} {step} {at:.6f}\n".encode())


note("born", 0, BORN)
note("imported", 0, IMPORTED)
width = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
batch = torch.randn(64, width, device=device)
if device.type == "cuda":
    torch.cuda.synchronize()
note("device", 0, time.time())
model = torch.nn.Linear(width, width, device=device)
optimizer = torch.optim.AdamW(model.parameters())
session = Session(model=model, optimizer=optimizer)
note("resumed", session.step, time.time())
for step in session.steps(1_000_000):
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()  # the device has done the step
    note("step", step, time.time())
    session.commit(loss=loss)
    time.sleep(STEP_S)  # simulates a longer step: a kill can come anywhere in it
