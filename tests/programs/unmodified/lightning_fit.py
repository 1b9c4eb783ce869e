"""Lightning's Trainer over two nodes with its own checkpoint callback."""

import lightning
import torch
from killed import killed_once, tell
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.first = -1

    def on_train_epoch_start(self) -> None:
        self.first = self.current_epoch if self.first < 0 else self.first
        killed_once(self.global_rank, self.current_epoch)

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(1)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=4,
        callbacks=[ModelCheckpoint("saved", save_last=True, every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1)), batch_size=2), ckpt_path="last")
    tell(trainer.global_rank, model.first, sum(each.double().sum().item() for each in model.parameters()))


if __name__ == "__main__":
    main()
