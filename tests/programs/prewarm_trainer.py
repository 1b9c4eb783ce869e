"""A rank that trains a little and records how it was started: `prewarm_trainer.py OUT STEPS STEP_S`.

Each incarnation appends a line to OUT/rank-R: its number, the attempt, how many modules of torch were loaded before its
first line, the file's own text, and the results of its first three steps.
"""

import sys

BEFORE = sum(name.startswith("torch") for name in sys.modules)

import json  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from holdfast.train import Session  # noqa: E402

OUT, STEPS, STEP_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
WORD = "first"

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
session = Session(model=model, optimizer=optimizer)
losses: list[float] = []
for step in session.steps(STEPS):
    loss = model(torch.ones(8, 4) * step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    session.commit(loss=loss)
    if len(losses) == 3:
        life = {"pid": os.getpid(), "before": BEFORE, "word": WORD, "losses": losses}
        life |= {"attempt": os.environ["HOLDFAST_ATTEMPT"], "argv": sys.argv, "path": os.environ.get("PYTHONPATH")}
        with (OUT / f"rank-{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps(life) + "\n")
    time.sleep(STEP_S)
