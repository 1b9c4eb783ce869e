"""Accelerate's own loop: prepare, save_state and load_state."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from killed import killed_once, tell
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def main() -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if saved := sorted(name for name in os.listdir() if name.startswith("epoch_") and os.path.exists(f"{name}/done")):
        accelerator.load_state(saved[-1])
        first = int(saved[-1].removeprefix("epoch_")) + 1
    for epoch in range(first, EPOCHS):
        killed_once(accelerator.process_index, epoch)
        for inputs, targets in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(f"epoch_{epoch}")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            open(f"epoch_{epoch}/done", "w").close()
    tell(accelerator.process_index, first, sum(each.double().sum().item() for each in model.parameters()))
    accelerator.end_training()


if __name__ == "__main__":
    main()
