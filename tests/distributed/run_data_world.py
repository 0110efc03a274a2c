"""What the ranks of a run over the data stream do: a model that hardly learns, and a note of every batch."""

import os
import signal
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

import unbroken
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.loader import Loader
from unbroken.data.order.schedule import Phase
from unbroken.data.stream import Stream

MIX = Phase(10_000, (("code", Fraction(1)), ("web", Fraction(3))))


@dataclass(frozen=True)
class Leg:
    """One job: how it reads, and how it ends."""

    run: str
    data: str
    global_batch: int = 6
    lane: int = 2
    total: int = 1_000
    stop_at: int | None = None
    kill_at: int | None = None
    accept: tuple[str, ...] = ()
    stream: dict[str, Any] = field(default_factory=dict)
    signal_at: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def serve(leg: Leg) -> list[tuple[int, int, list[int]]]:
    """Train one job; (step, first sample, its tokens added up by row) of every batch of this rank."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    stream = Stream(open_corpus(Path(leg.data)), max_length=32, overlap_size=4, seed=5, **leg.stream)
    loader = Loader(stream, global_batch_size=leg.global_batch, per_device_batch_size=leg.lane)
    settings = unbroken.Settings(**{"save_steps": 2, "audit": "off", "accept": leg.accept, **leg.settings})
    seen = []
    with unbroken.Run(leg.run, settings=settings, model=model, optimizer=optimizer, data=loader) as run:
        for step in run.steps(leg.total):
            for _ in range(loader.lanes.per_step):
                batch = next(run.data)
                seen.append((step, batch.samples.start, batch.tokens.sum(dim=1).tolist()))
                loss = model(batch.tokens.double().mean().reshape(1).float()).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            if step + 1 == leg.stop_at:
                run.stop()
            if step + 1 == leg.signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if step + 1 == leg.kill_at:
                run._open.opened.saver.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return seen
