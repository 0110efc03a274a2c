"""Small trainings that are shown by trackers; each is called in a child and may kill itself."""

import contextlib
import hashlib
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy
import torch

import unbroken
from tests.patience import PATIENCE_S
from tests.trackers.readers import trackio_points
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.tracker_marks import known_ids, last_marks
from unbroken.trackers.following import Mode

TOTAL = 12
# So much beside the loss that wandb, which writes blocks of 32 KiB, has written the first steps when the job is killed.
OTHERS = {f"{'one of many metrics whose names are long and whose values change' * 2}/{at}": at for at in range(60)}


def call(function: Callable[..., object], values: Sequence[object], named: Mapping[str, object]) -> object:
    return function(*values, **named)


def model_and_step() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A step that draws from all global generators."""
    noise = random.random() + float(numpy.random.rand())
    loss: torch.Tensor = (model(torch.randn(2, 4)) + noise).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_until_sent(directory: str, step: int) -> None:
    """Until every tracker was sent this step."""
    layout, until = Layout(Path(directory)), time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        wanted = [*known_ids(read_history(layout).events).items()]
        sent = last_marks(layout, wanted)
        if wanted and all(sent.get(each, -1) >= step for each in wanted):
            return
        time.sleep(0.05)
    raise AssertionError(f"not sent: {sent} of {wanted}")


def wait_until_stored(count: int) -> None:
    """Until trackio's thread has written so many rows."""
    database, until = Path(os.environ["TRACKIO_DIR"]) / "plain.db", time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        # Its table is made when the first row is written.
        with contextlib.suppress(sqlite3.OperationalError):
            if database.exists() and len(trackio_points(database).get("plain", ())) >= count:
                return
        time.sleep(0.05)
    raise AssertionError(f"{database} has fewer than {count} rows")


def wait_until_saved(run: unbroken.Run) -> None:
    assert run._job is not None
    run._job.opened.saver.wait(PATIENCE_S)


def train(
    directory: str, trackers: str, *, mode: Mode = "live", kill_at: int = 0, sent: int = 0, stop_at: int = 0
) -> str:
    """Train to the end, or to a kill in the middle of a step, once the trackers were sent so many steps."""
    model, optimizer = model_and_step()
    settings = unbroken.Settings(
        save_steps=4, logging_steps=1, trackers=trackers, tracker_mode=mode, tracker_config={"lr": 0.05}
    )
    with unbroken.Run(directory, settings=settings, model=model, optimizer=optimizer) as run:
        for step in run.steps(TOTAL):
            loss = one_step(model, optimizer)
            run.log(loss=loss, **OTHERS)
            if mode == "committed" and step + 2 == kill_at:
                # The edge of this step learns of the commit.
                wait_until_saved(run)
            if step + 1 == kill_at:
                wait_until_sent(directory, sent)
                die()
            if step + 1 == stop_at:
                run.stop()
    found = hashlib.sha256(repr((random.getstate(), numpy.random.get_state())).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    for value in model.parameters():
        found.update(value.detach().numpy().tobytes())
    return found.hexdigest()


def train_plainly(directory: str, *, kill_at: int = 0) -> None:
    """The same without unbroken, with the trackers as their manuals say: an id of its own, and ``resume``."""
    import mlflow
    import trackio
    import wandb
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = model_and_step()
    first = 0
    saved = Path(directory) / "checkpoint.pt"
    if saved.exists():
        first, weights = torch.load(saved)
        model.load_state_dict(weights)
    shown = wandb.init(project="p", id="plain", resume="allow", dir=directory)
    tracked = trackio.init(project="plain", name="plain", resume="allow", embed=False, auto_log_cpu=False)
    board = SummaryWriter(f"{directory}/tensorboard/plain")
    mlflow.set_experiment("plain")
    before = mlflow.search_runs(output_format="list")
    mlflow.start_run(run_id=before[0].info.run_id if before else None)
    for step in range(first + 1, TOTAL + 1):
        loss = float(one_step(model, optimizer))
        shown.log({"loss": loss, **OTHERS}, step=step)
        tracked.log({"loss": loss}, step=step)
        board.add_scalar("loss", loss, step)
        mlflow.log_metric("loss", loss, step=step)
        if step % 4 == 0:
            torch.save((step, model.state_dict()), saved)
        if step == kill_at:
            board.flush()
            wait_until_stored(step)
            die()
    shown.finish()
    tracked.finish()  # type: ignore[no-untyped-call]
    board.close()
    mlflow.end_run()
