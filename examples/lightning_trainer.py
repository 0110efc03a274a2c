"""The Trainer of Lightning on a small network with dropout and averaged weights, made a run by one callback.

    python lightning_trainer.py STEPS DIRECTORY

``lightning_trainer_plain.py`` is the same training without it.
"""

import hashlib
import sys

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from unbroken.frameworks import lightning as unbroken_pl

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


class Autoencoder(lightning.LightningModule):
    """Learns to return what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    lightning.seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    model = Autoencoder()
    loader = DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=4, shuffle=True)
    callbacks: list[Callback] = [
        ModelCheckpoint(f"{sys.argv[2]}/models", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=4),
        EMAWeightAveraging(decay=0.9),
    ]
    callbacks.append(unbroken_pl.Callback(sys.argv[2]))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(model, loader, ckpt_path="last")

    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
