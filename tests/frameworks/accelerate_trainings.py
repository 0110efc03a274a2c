"""Small loops with Accelerate, each described by a dict and run in a process of its own."""

import contextlib
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from accelerate import Accelerator, DataLoaderConfiguration  # type: ignore[import-untyped]
from accelerate.utils import ProjectConfiguration, set_seed  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, Dataset, IterableDataset

import unbroken
from tests.frameworks.digests import flat
from unbroken.frameworks import accelerate as unbroken_acc

SAMPLES = 42
EPOCHS = 3
# A world of Accelerate's imports it when a loader is prepared, if it is installed; the process that forks has it then.
with contextlib.suppress(ImportError):
    importlib.import_module("datasets")
# What that process does once, to import what the trainings will.
SMALLEST = {"plain": True, "project": {"automatic_checkpoint_naming": True}}


class Rows(Dataset[torch.Tensor]):
    """Rows that are functions of their numbers; with ``noise`` each is changed by numbers drawn when it is read."""

    reads = 0

    def __init__(self, noise: str = "") -> None:
        self._noise = noise
        self._own = torch.Generator().manual_seed(5) if noise == "own" else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        Rows.reads += 1
        row = torch.rand(4, generator=torch.Generator().manual_seed(index))
        return row + torch.rand(4, generator=self._own) if self._noise else row


class Stream(IterableDataset[torch.Tensor]):
    """Rows in their order, with a state of its own."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._next < SAMPLES:
            self._next += 1
            yield torch.rand(4, generator=torch.Generator().manual_seed(self._next))
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Average:
    """A running mean of the losses: state that a script has to register."""

    def __init__(self) -> None:
        self.value = 0.0

    def update(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def kill_while_writing(name: str, step: int) -> None:
    """Die in the middle of one file of Accelerate's own checkpoint: at the ``step``-th time that it is written."""
    save, seen = torch.save, 0

    def torch_save(value: object, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        nonlocal seen
        seen += Path(str(path)).name == name
        if Path(str(path)).name == name and seen == step:
            Path(path).write_bytes(b"PK\x03\x04 half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        save(value, path, *rest, **more)

    setattr(torch, "save", torch_save)  # noqa: B010 - typed otherwise


def by_launcher() -> None:
    """Stop the launcher, and continue when it has sent the signal to this process."""
    received: list[int] = []
    before: Any = signal.getsignal(signal.SIGTERM)

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        before(number, frame)

    signal.signal(signal.SIGTERM, receive)
    os.kill(os.getppid(), signal.SIGTERM)
    while not received:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, before)


class Script:
    """What a script makes before its loop, and the body of its loop."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        # Another seed in each job: what a resume does not restore shows.
        set_seed(job.get("seed", 3))
        project = ProjectConfiguration(job["directory"], **job["project"]) if "project" in job else None
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=job.get("accumulation", 1),
            project_config=project,
            log_with=job.get("log_with"),
            dataloader_config=DataLoaderConfiguration(**job.get("loading", {})),
        )
        if job.get("scaler"):
            # On the CPU Accelerate makes none; large enough to overflow at first.
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        self.own_scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**127, growth_interval=3, enabled="own_scaler" in job
        )
        set_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        set_seed(job.get("seed", 3))
        self.average = Average()
        loader, held_out = self._loaders()
        if job.get("is_scheduler_loose"):
            self.model, self.optimizer, self.loader, self.held_out = accelerator.prepare(
                model, optimizer, loader, held_out
            )
            self.scheduler: Any = scheduler
            if job["is_scheduler_loose"] == "registered":
                accelerator.register_for_checkpointing(scheduler)
        else:
            self.model, self.optimizer, self.loader, self.held_out, self.scheduler = accelerator.prepare(
                model, optimizer, loader, held_out, scheduler
            )
        accelerator.register_for_checkpointing(self.average)
        if job.get("own_scaler") == "registered":
            accelerator.register_for_checkpointing(self.own_scaler)
        if "log_with" in job:
            accelerator.init_trackers("plain")
        if not job.get("seed"):
            set_seed(9, device_specific=True)

    def _loaders(self) -> tuple[Any, Any]:
        options: dict[str, Any] = {"batch_size": 4, **self.job.get("loader", {})}
        dataset: Any = Rows(self.job.get("noise", ""))
        if self.job.get("is_stream"):
            dataset = Stream()
        else:
            options.setdefault("shuffle", True)
        if "samples" in self.job:
            dataset = torch.utils.data.Subset(dataset, range(self.job["samples"]))
        held_out = torch.utils.data.Subset(Rows(), range(8))
        return DataLoader(dataset, **options), DataLoader(held_out, batch_size=4, shuffle=True)

    def compute(self, batch: torch.Tensor) -> torch.Tensor:
        """The body of the loop."""
        with self.accelerator.accumulate(self.model):
            loss: torch.Tensor = self.model(batch).square().mean()
            if self.job.get("scaler") or "own_scaler" in self.job:
                # Its gradients overflow at the first scales.
                loss = loss * 64
            self.accelerator.backward(self.own_scaler.scale(loss))
            self.own_scaler.step(self.optimizer)
            self.own_scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.average.update(loss.item())
        return loss

    def evaluate(self) -> None:
        """What a script does after an epoch: it draws, too."""
        for batch in self.held_out:
            self.average.update(self.model(batch).mean().item())

    def interrupt(self, step: int) -> None:
        """Send this process, or its launcher, the signal that the job wants in the body of this step."""
        for each in self.job.get("interrupts", ()):
            if each["step"] == step and each.get("rank", 0) in (-1, self.accelerator.process_index):
                if each.get("launcher") and each["number"] == signal.SIGTERM:
                    by_launcher()
                else:
                    os.kill(os.getppid() if each.get("launcher") else os.getpid(), each["number"])

    def digest(self) -> str:
        """All that a training has come to: weights, optimizer, schedule, RNG states and the registered object."""
        found = hashlib.sha256()
        for value in self.model.parameters():
            found.update(value.detach().numpy().tobytes())
        scaler = self.accelerator.scaler
        states = [self.optimizer.state_dict(), self.average.value, None if scaler is None else scaler.state_dict()]
        states.append(self.own_scaler.state_dict())
        for key, text in sorted(flat("", states)):
            found.update(f"{key}={text}".encode())
        found.update(repr(self.scheduler.get_last_lr()).encode())
        found.update(torch.get_rng_state().numpy().tobytes())
        found.update(repr(random.getstate()).encode() + repr(numpy.random.get_state()).encode())
        return found.hexdigest()


def _plainly(script: Script) -> dict[str, Any]:
    """As Accelerate's own guide has it: save_state every 4 updates, load_state, skip_first_batches."""
    accelerator, start, step = script.accelerator, 0, 0
    if script.job.get("resume"):
        accelerator.load_state()
        # Else it would not save: the folder exists.
        accelerator.project_configuration.iteration = int(script.job["resume"])
        step = start = 4 * int(script.job["resume"])
    scale = script.own_scaler.get_scale()
    per_epoch = len(script.loader)
    for epoch in range(start // per_epoch, EPOCHS):
        loader = script.loader
        if epoch == start // per_epoch and start % per_epoch:
            loader = accelerator.skip_first_batches(loader, start % per_epoch)
        for batch in loader:
            loss = script.compute(batch)
            step += 1
            if "log_with" in script.job:
                accelerator.log({"loss": loss.item()}, step=step)
            if "project" in script.job and step % 4 == 0:
                accelerator.save_state()
            script.interrupt(step)
        script.evaluate()
    return {"step": step, "is_stopped": False, "scale": scale}


def _attached(script: Script) -> dict[str, Any]:
    job = script.job
    evaluations = 0
    directory = None if "project" in job else job["directory"]
    with unbroken_acc.attach(script.accelerator, directory, **{"save_steps": 4, **job.get("options", {})}) as run:
        for _ in run.epochs(EPOCHS, max_steps=job.get("max_steps")):
            for batch in run.batches(script.loader):
                loss = script.compute(batch)
                run.log(loss=loss)
                script.interrupt(run.step + 1)
            script.evaluate()
            evaluations += 1
            if job.get("saves_epochs"):
                run.save()
    return {"step": run.step, "is_stopped": run.is_stopped, "evaluations": evaluations}


def _by_run(script: Script) -> dict[str, Any]:
    """With ``unbroken.Run``, which gets the objects that Accelerate has prepared."""
    objects = {"model": script.model, "optimizer": script.optimizer, "scheduler": script.scheduler}
    if script.accelerator.scaler is not None:
        objects["scaler"] = script.accelerator.scaler
    settings = unbroken.Settings(save_steps=4, audit="error", audit_ignore=("held_out",))
    with unbroken.Run(
        script.job["directory"], settings=settings, data=script.loader, average=script.average, **objects
    ) as run:
        for step in run.steps(20):
            run.log(loss=script.compute(next(run.data)))
            script.interrupt(step + 1)
    return {"step": run.step, "is_stopped": run.is_stopped}


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken. ``result``: where its end is written."""
    torch.set_num_threads(1)
    if "torn" in job:
        kill_while_writing(**job["torn"])
    script = Script(job)
    loops = {"plain": _plainly, "by_run": _by_run}
    loop = next((loops[name] for name in loops if job.get(name)), _attached)
    result = loop(script)
    result |= {"digest": script.digest(), "reads": Rows.reads}
    if script.accelerator.process_index == 0:
        Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
