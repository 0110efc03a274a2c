"""One side of ``bench.compare``, in a process and an environment of its own: saves on demand, or loads once.

    python bench/compare_sides.py SIDE save WIDTH LAYERS            # then on stdin, line by line: folders to save to
    python bench/compare_sides.py SIDE load WIDTH LAYERS FOLDER

Run as a script, since the environments of peers do not have the project. Every side has the same model and AdamW and is
used as its documentation shows it, with its default settings. Answers are lines of JSON behind ``ANSWER``.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ANSWER = "@answer "
Timed = tuple[float, float]


class State:
    """The model and its optimizer after one step."""

    def __init__(self, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
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
    began = time.perf_counter()
    save()
    waited_s = time.perf_counter() - began
    finish()
    # Most sides leave that to the kernel, which takes some thirty seconds; where all is synced it takes no time.
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return waited_s, time.perf_counter() - began


def answer(**values: object) -> None:
    print(f"\n{ANSWER}{json.dumps(values)}", flush=True)


def serve(save: Callable[[Path], Timed]) -> None:
    """Save for every line of stdin."""
    answer(ready=True)
    for line in sys.stdin:
        folder = Path(line.strip())
        folder.mkdir(parents=True, exist_ok=True)
        waited_s, durable_s = save(folder)
        answer(waited_s=waited_s, durable_s=durable_s)


def loaded(load: Callable[[], object]) -> None:
    began = time.perf_counter()
    load()
    answer(load_s=time.perf_counter() - began)


# ---- the sides ----


def torch_save(mode: str, state: State, folder: Path) -> None:
    if mode == "load":
        return loaded(lambda: state.take(torch.load(folder / "checkpoint.pt")))
    return serve(lambda into: timed(lambda: torch.save(state.dictionary(), into / "checkpoint.pt"), into))


def untyped(name: str) -> Any:  # noqa: ANN401 - modules whose names are not declared for type checkers
    return importlib.import_module(f"torch.distributed{name}")


def dcp(mode: str, state: State, folder: Path, way: str) -> None:
    """``way``: sync, async (a thread) or process (which needs a process group)."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist, checkpoint, saver = map(untyped, ("", ".checkpoint", ".checkpoint.state_dict_saver"))
    if way == "process":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

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
            self.began = 0.0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-4)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            found: torch.Tensor = self.model(batch).square().mean()
            return found

        def on_train_batch_start(self, *_: object) -> None:
            if mode == "load":
                answer(load_s=time.perf_counter() - self.began)
                os._exit(0)

        def on_train_batch_end(self, *_: object) -> None:
            serve(lambda into: timed(lambda: trainer.save_checkpoint(into / "checkpoint.ckpt"), into))
            os._exit(0)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1000, **quiet)
    data: Any = state.batch.unsqueeze(0).repeat(2000, 1, 1)
    module, rows = Module(), torch.utils.data.DataLoader[Any](data, batch_size=None)
    module.began = time.perf_counter()
    trainer.fit(module, rows, ckpt_path=str(folder / "checkpoint.ckpt") if mode == "load" else None)


def unbroken(mode: str, state: State, folder: Path) -> None:
    from unbroken import Run, Settings

    # Every step is saved, so that a save comes when it is asked for.
    settings = Settings(save_steps=1, console=False)
    directory = folder.parent / "run"
    if mode == "load":
        began = time.perf_counter()
        with Run(directory, model=state.model, optimizer=state.optimizer, settings=settings) as run:
            for _ in run.steps(10**6):
                answer(load_s=time.perf_counter() - began)
                os._exit(0)

    steps: list[Any] = []

    def save(into: Path) -> Timed:
        directory = into.parent / "run"
        if not steps:
            run = Run(directory, model=state.model, optimizer=state.optimizer, settings=settings)
            steps.append(run.steps(10**6))
            steps.append(next(steps[0]))
        state.step()
        began = time.perf_counter()
        step = next(steps[0])
        waited_s = time.perf_counter() - began
        # The rename to this name is the commit; all is synced before it.
        while not (directory / "checkpoints" / f"checkpoint-{step}").exists():
            time.sleep(0.002)
        return waited_s, time.perf_counter() - began

    serve(save)


SIDES: dict[str, Callable[[str, State, Path], None]] = {
    "unbroken": unbroken,
    "torch.save": torch_save,
    "dcp.save": lambda mode, state, folder: dcp(mode, state, folder, "sync"),
    "dcp.async_save": lambda mode, state, folder: dcp(mode, state, folder, "async"),
    "dcp.async_save, process": lambda mode, state, folder: dcp(mode, state, folder, "process"),
    "accelerate": accelerate,
    "lightning": lightning,
}


if __name__ == "__main__":
    side, mode, width, layers, *place = sys.argv[1:]
    SIDES[side](mode, State(int(width), int(layers)), Path(place[0]) if place else Path())
