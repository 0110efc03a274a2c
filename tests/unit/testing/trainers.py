"""Trainers for the checks of exactness: one that is right, and some with a bug that a resume shows."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unbroken

TOTAL = 12


def train(directory: str, bug: str = "", total: int = TOTAL) -> None:
    """A small training with dropout, moments, a schedule, shuffled data and python's own generator."""
    torch.manual_seed(1)
    random.seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at))
    rows = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
    loader = DataLoader(rows, batch_size=8, shuffle=True, num_workers=1 if bug == "workers" else 0)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    if bug == "scheduler forgotten":
        del objects["scheduler"]
    if bug == "fails":
        raise RuntimeError("the trainer's own error")
    settings = unbroken.Settings(save_steps=None, logging_steps=1, audit="off")
    drawn = random.SystemRandom() if bug == "not deterministic" else random
    with unbroken.Run(directory, settings=settings, **objects) as run:
        for _ in run.steps(total):
            features, target = next(run.data)
            loss = (model(features * (1 + drawn.random())) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)


def never_saves(directory: str) -> None:
    """No run at all."""
    Path(directory).mkdir()
