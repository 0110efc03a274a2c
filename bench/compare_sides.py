"""One side of ``bench.compare``, in a process and an environment of its own: saves on demand, or loads once.

    python bench/compare_sides.py SIDE save WIDTH LAYERS            # then on stdin, line by line: folders to save to
    python bench/compare_sides.py SIDE load WIDTH LAYERS FOLDER

Run as a script, since the environments of peers do not have the project. Every side has the same model and AdamW and is
used as its documentation shows it, with its default settings. Answers are lines of JSON behind ``ANSWER``.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ANSWER = "@answer "
# Seconds that the loop waits, until it is durable, and of CPU.
Timed = tuple[float, float, float]
LEARNING_RATE = 1e-4
TITAN = "torchtitan.components"


class Clock:
    """Seconds since it was made: by the wall, and of CPU by this process and the living ones that it started."""

    def __init__(self) -> None:
        self._began_s, self._began_cpu_s = time.perf_counter(), self._spent()

    @staticmethod
    def _spent() -> float:
        ticks = 0
        for child in multiprocessing.active_children():
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._began_s

    @property
    def cpu_s(self) -> float:
        return self._spent() - self._began_cpu_s


class State:
    """The model and its optimizer after one step."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.batch = torch.randn(4, width)
        self.step()

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def dictionary(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def take(self, found: dict[str, Any]) -> None:
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])


def timed(save: Callable[[], object], folder: Path, finish: Callable[[], object] = lambda: None) -> Timed:
    """Seconds that the loop waits for a save, and until it would outlive a power cut."""
    clock = Clock()
    save()
    waited_s = clock.wall_s
    finish()
    # Most sides leave that to the kernel, which takes some thirty seconds; where all is synced it takes no time.
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return waited_s, clock.wall_s, clock.cpu_s


def answer(**values: object) -> None:
    print(f"\n{ANSWER}{json.dumps(values)}", flush=True)


def serve(save: Callable[[Path], Timed]) -> None:
    """Save for every line of stdin."""
    answer(ready=True)
    for line in sys.stdin:
        folder = Path(line.strip())
        folder.mkdir(parents=True, exist_ok=True)
        waited_s, durable_s, cpu_s = save(folder)
        answer(waited_s=waited_s, durable_s=durable_s, cpu_s=cpu_s)


def loaded(load: Callable[[], object]) -> None:
    clock = Clock()
    load()
    answer(load_s=clock.wall_s, cpu_s=clock.cpu_s)


# ---- the sides ----


def torch_save(mode: str, state: State, folder: Path) -> None:
    if mode == "load":
        return loaded(lambda: state.take(torch.load(folder / "checkpoint.pt")))
    return serve(lambda into: timed(lambda: torch.save(state.dictionary(), into / "checkpoint.pt"), into))


def untyped(name: str) -> Any:  # noqa: ANN401 - modules whose names are not declared for type checkers
    return importlib.import_module(f"torch.distributed{name}")


def start_group() -> None:
    """A process group of this process alone."""
    dist = untyped("")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def dcp(mode: str, state: State, folder: Path, way: str) -> None:
    """``way``: sync, async (a thread) or process (which needs a process group)."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    checkpoint, saver = map(untyped, (".checkpoint", ".checkpoint.state_dict_saver"))
    if way == "process":
        start_group()

    def dictionary() -> dict[str, Any]:
        model, optimizer = get_state_dict(state.model, state.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load() -> None:
        found = dictionary()
        checkpoint.load(found, checkpoint_id=folder)
        set_state_dict(
            state.model, state.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    def save(into: Path) -> Timed:
        if way == "sync":
            return timed(lambda: checkpoint.save(dictionary(), checkpoint_id=into), into)
        pending: list[Any] = []
        # Known since torch 2.7; a torch without it says so.
        options = {"async_checkpointer_type": saver.AsyncCheckpointerType.PROCESS} if way == "process" else {}
        return timed(
            lambda: pending.append(checkpoint.async_save(dictionary(), checkpoint_id=into, **options)),
            into,
            lambda: pending[0].result(),
        )

    return loaded(load) if mode == "load" else serve(save)


def accelerate(mode: str, state: State, folder: Path) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    state.model, state.optimizer = accelerator.prepare(state.model, state.optimizer)
    if mode == "load":
        return loaded(lambda: accelerator.load_state(str(folder)))
    return serve(lambda into: timed(lambda: accelerator.save_state(str(into)), into))


def lightning(mode: str, state: State, folder: Path) -> None:
    pl: Any = importlib.import_module("lightning")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = state.model
            self.clock = Clock()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            found: torch.Tensor = self.model(batch).square().mean()
            return found

        def on_train_batch_start(self, *_: object) -> None:
            if mode == "load":
                answer(load_s=self.clock.wall_s, cpu_s=self.clock.cpu_s)
                os._exit(0)

        def on_train_batch_end(self, *_: object) -> None:
            serve(lambda into: timed(lambda: trainer.save_checkpoint(into / "checkpoint.ckpt"), into))
            os._exit(0)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1000, **quiet)
    data: Any = state.batch.unsqueeze(0).repeat(2000, 1, 1)
    module, rows = Module(), torch.utils.data.DataLoader[Any](data, batch_size=None)
    module.clock = Clock()
    trainer.fit(module, rows, ckpt_path=str(folder / "checkpoint.ckpt") if mode == "load" else None)


def gpt_simple(mode: str, state: State, folder: Path) -> None:
    """Its checkpoint manager, in the order of its trainer."""
    checkpoint: Any = importlib.import_module("gpt_simple._checkpoint")
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda _: 1.0)

    def load() -> None:
        manager = checkpoint.CheckpointManager(folder)
        place = manager.resolve_resume("auto")
        manager.load_model_state(state.model, place)
        model, optimizer, prepared = accelerator.prepare(state.model, state.optimizer, scheduler)
        state.model, state.optimizer = model, optimizer
        manager.load_optimizer_state(optimizer, place)
        manager.load_scheduler_state(prepared, place)
        manager.load_rng_state(0, place)

    if mode == "load":
        return loaded(load)
    model, optimizer, prepared = accelerator.prepare(state.model, state.optimizer, scheduler)

    def save(into: Path) -> None:
        checkpoint.CheckpointManager(into).save(
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            scheduler=prepared,
            trainer_state=checkpoint.TrainerState(step=1),
            model_config_dict={},
        )

    return serve(lambda into: timed(lambda: save(into), into))


def torchtitan(mode: str, state: State, folder: Path) -> None:
    """Its optimizer container and its checkpoint manager, which saves synchronously by default."""
    checkpoint, optimizer = map(importlib.import_module, (f"{TITAN}.checkpoint", f"{TITAN}.optimizer"))
    start_group()
    container = optimizer.default_adamw(lr=LEARNING_RATE).build(model_parts=[state.model])
    schedulers = torch.optim.lr_scheduler.LambdaLR(container.optimizers[0], lambda _: 1.0)
    state.optimizer = container
    state.step()

    def manager(base: Path) -> Any:  # noqa: ANN401
        return checkpoint.CheckpointManager(
            checkpoint.CheckpointManager.Config(enable=True, interval=1),
            dataloader=None,
            model_parts=[state.model],
            optimizers=container,
            lr_schedulers=schedulers,
            states={},
            sd_adapter=None,
            base_folder=str(base),
        )

    if mode == "load":
        return loaded(lambda: manager(folder).load())

    def save(into: Path) -> Timed:
        made = manager(into)
        return timed(lambda: made.save(1), into)

    return serve(save)


def unbroken(mode: str, state: State, folder: Path) -> None:
    from unbroken import Run, Settings

    # Every step is saved, so that a save comes when it is asked for.
    settings = Settings(save_steps=1, console=False)
    directory = folder.parent / "run"
    if mode == "load":
        clock = Clock()
        with Run(directory, model=state.model, optimizer=state.optimizer, settings=settings) as run:
            for _ in run.steps(10**6):
                answer(load_s=clock.wall_s, cpu_s=clock.cpu_s)
                os._exit(0)

    steps: list[Any] = []

    def save(into: Path) -> Timed:
        directory = into.parent / "run"
        if not steps:
            run = Run(directory, model=state.model, optimizer=state.optimizer, settings=settings)
            steps.append(run.steps(10**6))
            steps.append(next(steps[0]))
        state.step()
        clock = Clock()
        step = next(steps[0])
        waited_s = clock.wall_s
        # The rename to this name is the commit; all is synced before it.
        while not (directory / "checkpoints" / f"checkpoint-{step}").exists():
            time.sleep(0.002)
        return waited_s, clock.wall_s, clock.cpu_s

    serve(save)


SIDES: dict[str, Callable[[str, State, Path], None]] = {
    "unbroken": unbroken,
    "torch.save": torch_save,
    "dcp.save": lambda mode, state, folder: dcp(mode, state, folder, "sync"),
    "dcp.async_save": lambda mode, state, folder: dcp(mode, state, folder, "async"),
    "dcp.async_save, process": lambda mode, state, folder: dcp(mode, state, folder, "process"),
    "accelerate": accelerate,
    "lightning": lightning,
    "gpt-simple": gpt_simple,
    "torchtitan": torchtitan,
}


if __name__ == "__main__":
    side, mode, width, layers, *place = sys.argv[1:]
    SIDES[side](mode, State(int(width), int(layers)), Path(place[0]) if place else Path())
