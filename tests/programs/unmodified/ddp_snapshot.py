"""DistributedDataParallel with a snapshot of rank 0 that all ranks load, as in PyTorch's tutorials and minGPT-ddp."""

import os

import torch
import torch.distributed as dist
from killed import killed_once, tell
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, SNAPSHOT = 4, "snapshot.pt"


class Trainer:
    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.rank = int(os.environ["RANK"])
        self.first = 0
        self.model, self.optimizer = model, optimizer
        if os.path.exists(SNAPSHOT):
            snapshot = torch.load(SNAPSHOT)
            self.model.load_state_dict(snapshot["MODEL_STATE"])
            self.optimizer.load_state_dict(snapshot["OPTIMIZER"])
            self.first = snapshot["EPOCHS_RUN"]
        self.model = DDP(self.model)

    def train(self) -> None:
        for epoch in range(self.first, EPOCHS):
            killed_once(self.rank, epoch)
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), float(epoch + self.rank))).square().mean().backward()
            self.optimizer.step()
            if self.rank == 0:
                state = {"MODEL_STATE": self.model.module.state_dict(), "OPTIMIZER": self.optimizer.state_dict()}
                torch.save({**state, "EPOCHS_RUN": epoch + 1}, SNAPSHOT + ".new")
                os.replace(SNAPSHOT + ".new", SNAPSHOT)
            dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    trainer.train()
    tell(trainer.rank, trainer.first, sum(each.double().sum().item() for each in model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
