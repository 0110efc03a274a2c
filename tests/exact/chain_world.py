"""Jobs of one run in worlds of different sizes; each is called in a spawned world and may kill itself."""

import os
import signal
from typing import Any

import torch

import unbroken
from tests.exact.lane_world import MAX_NORM, Case, build, fingerprint
from tests.exact.small_gpt import batch
from unbroken import exact

TOTAL = 12


def job(directory: str, case: Case, end_at: int) -> dict[str, Any]:
    """Train until the end, or until every rank is killed after computing a step, before its edge.

    A negative step is one at which the job is asked to stop, and saves.
    """
    numerics = exact.pin(case.device)
    model, optimizer, reducer = build(case)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = unbroken.Settings(save_steps=2, logging_steps=1, audit="error")
    with unbroken.Run(directory, settings=settings, reducer=reducer, numerics=numerics, **objects) as run:
        began = run.step
        for step in run.steps(TOTAL):
            for lane in reducer.lanes(step):
                tokens, targets = batch(step, lane.number)
                lane.backward(model(tokens.to(case.device), targets.to(case.device)))
            norm = reducer.clip(MAX_NORM)
            optimizer.step()
            scheduler.step()
            run.log(loss=reducer.loss, grad_norm=norm)
            if step + 1 == end_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step + 1 == -end_at:
                run.stop("asked")
    return {"began": began, "fingerprint": fingerprint(model, optimizer)}


def refused(directory: str, case: Case) -> None:
    """A job that is not to start."""
    job(directory, case, 0)
    raise AssertionError("it started")
