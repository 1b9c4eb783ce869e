"""A plain data-parallel loop, without holdfast, that checkpoints each step and resumes: `resumable_loop.py OUT [ddp]`.

Each rank appends lines `PID WHAT STEP SECONDS` to OUT/rank-R. It averages and applies gradients by hand: creating a
DistributedDataParallel or any optimizer of torch.optim imports torch._dynamo (2.7 s on two cores), which would hide the
measured time, on both sides alike. With `ddp` it uses both, as most scripts do.
"""

import time

BORN = time.time()

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.time()
STEP_S = 0.05
WIDTH = 256
LEARNING_RATE = 0.01

out = Path(sys.argv[1])
rank = int(os.environ["RANK"])
log = os.open(out / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(what: str, step: int, at: float) -> None:
    """Write one line in one call, so that a kill leaves no half of it."""
    os.write(log, f"{os.getpid()} {what} {step} {at:.6f}\n".encode())


note("born", 0, BORN)
note("imported", 0, IMPORTED)
dist.init_process_group("gloo")
note("met", 0, time.time())

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
checkpoint = out / "checkpoint.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    step = saved["step"]
wrapped, optimizer = (model, None)
if "ddp" in sys.argv:
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
note("loaded", step, time.time())


@torch.no_grad()
def update() -> None:
    """Plain SGD on the mean gradient of all ranks."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.add_(parameter.grad, alpha=-LEARNING_RATE / dist.get_world_size())


generator = torch.Generator()
while True:
    step += 1
    generator.manual_seed(step * dist.get_world_size() + rank)
    inputs = torch.randn(64, WIDTH, generator=generator)
    loss = (wrapped(inputs).squeeze(1) - inputs.mean(dim=1)).square().mean()
    model.zero_grad()
    loss.backward()
    if optimizer is None:
        update()
    else:
        optimizer.step()
    time.sleep(STEP_S)  # Simulates a step's work; a kill can come anywhere in it.
    note("step", step, time.time())
    if rank == 0:
        partial = checkpoint.with_suffix(".new")
        torch.save({"model": model.state_dict(), "step": step}, partial)
        partial.replace(checkpoint)
