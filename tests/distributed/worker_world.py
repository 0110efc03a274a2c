"""What ranks run that load their data in worker processes, until a signal stops them."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import unbroken
from unbroken.launch.processes import below, living

READY_AT = 3


@dataclass(frozen=True)
class Scene:
    """How the data is loaded, and what happens to its workers.

    Attributes:
        is_early: the loader's workers are started before the run is entered.
        is_by_hand: the loader is iterated by the script, and not handed to the run.
        hurt: a signal that the script sends to its own workers, as part of a group's, at step 4.
        draws_more: draw at that step what a hurt script draws, more than workers prefetch.
    """

    directory: str
    context: str = "fork"
    is_persistent: bool = False
    is_early: bool = False
    is_by_hand: bool = False
    total: int = 100_000
    pause_s: float = 0.02
    hurt: int | None = None
    draws_more: bool = False


class Rows(Dataset[torch.Tensor]):
    """Rows that a worker takes a moment for."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.sin(torch.arange(4.0) * (index + 1))


def train(scene: Scene) -> dict[str, Any]:
    """Train until the target or a stop."""
    torch.manual_seed(5)
    rank = dist.get_rank()
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(
        Rows(),
        batch_size=2,
        shuffle=True,
        num_workers=2,
        persistent_workers=scene.is_persistent,
        multiprocessing_context=scene.context,
    )
    early = [next(iter(loader))] if scene.is_early else []
    objects = {} if scene.is_by_hand else {"data": loader}
    settings = unbroken.Settings(audit="off", save_steps=None)
    with unbroken.Run(scene.directory, settings=settings, model=model, optimizer=optimizer, **objects) as run:
        batches = iter(DataLoader(Rows(), batch_size=2, num_workers=2)) if scene.is_by_hand else run.data
        for step in run.steps(scene.total):
            if step == READY_AT + 1:
                if scene.hurt is not None:
                    hurt_workers(scene.hurt)
                # More than was prefetched.
                for _ in range(8 if scene.hurt is not None or scene.draws_more else 0):
                    next(batches)
            batch = next(batches)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(scene.pause_s)
            if step == READY_AT:
                Path(f"{scene.directory}.ready-{rank}").touch()
    return {
        "step": run.step,
        "stopped": run.is_stopped,
        "weights": [float(each) for p in model.parameters() for each in p.detach().flatten()],
        "early": len(early),
        "left": len(below(os.getpid(), living())) if scene.context == "fork" and not scene.is_persistent else 0,
    }


def hurt_workers(number: int) -> None:
    """Kill every worker by SIGKILL while a stop is pending: what is left where no worker can be protected."""
    os.kill(os.getpid(), number)
    for pid in below(os.getpid(), living()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
