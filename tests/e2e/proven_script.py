"""A user's training script, small and quick, with everything that a resume can get wrong; `prove` is let loose on it.

Dropout, AdamW, a learning rate per step, a shuffled loader with a generator of its own, augmentation by numpy's and
python's generators. It knows nothing of drills: ``python proven_script.py RUN [STEPS]``.
"""

import math
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken


def main(directory: str, total: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5 * (1 + math.cos(math.pi * at / total)))
    rows = TensorDataset(torch.randn(56, 8), torch.randn(56, 1))
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4))
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    with unbroken.Run(directory, settings=unbroken.Settings(save_steps=None), **objects) as run:
        for _ in run.steps(total):
            features, target = next(run.data)
            features = features + torch.from_numpy(np.random.randn(*features.shape)).float() * 0.05
            if random.random() < 0.5:
                features = -features
            loss = (model(features) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss=loss, lr=scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40)
