"""A loop with Lightning Fabric on a small network with dropout, made a run.

    python fabric_loop.py STEPS DIRECTORY

``fabric_loop_plain.py`` is the same training without it.
"""

import hashlib
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import unbroken

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


def main() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 8))
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(60, 8)), batch_size=4, shuffle=True))
    settings = unbroken.Settings(save_steps=4)
    run = unbroken.Run(sys.argv[2], settings=settings, model=model, optimizer=optimizer, data=loader)
    for _ in run.steps(STEPS):
        (batch,) = next(run.data)
        loss = torch.nn.functional.mse_loss(model(batch), batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)

    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
