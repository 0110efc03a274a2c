"""What a save costs a training loop: its time with one save against its time with none, ours and stock, on one device.

    python -m bench.stall [--device cuda] [--width 8192] [--layers 4] [--steps 40] [--repeats 3]

The loop's own time is what counts, not the time a call takes to return: copies that run beside the loop slow it too.
"""

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_stock
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from bench.measure import interleaved, write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.state.description import finish
from unbroken.state.payload import plan_save, planned_parts, write
from unbroken.state.stage import Buffers, Staged, stage
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.names import PERIODIC
from unbroken.world import World

WORLD = World(0, 1)
SAVE_AT = 5


class Loop:
    """A model, its AdamW, and steps of plain matrix products."""

    def __init__(self, device: str, width: int, layers: int, batch: int, root: Path) -> None:
        self.device, self.root, self.number = device, root, 0
        root.mkdir()
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(batch, width, device=device)
        self.buffers = Buffers()
        self.step()
        self.plan = plan_save(self.state(), WORLD)
        self.background: threading.Thread | None = None

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.state.{number}.{key}": value for key, value in values.items()}
        return found

    def ours(self, *, is_lazy: bool) -> None:
        tensors = self.state()
        self.plan = plan_save(tensors, WORLD, self.plan)
        staged = stage(self.plan, tensors, self.buffers, until_step=tensors.keys() if is_lazy else ())
        staged.guard([self.optimizer])
        self.background = threading.Thread(target=self._write, args=(staged,))
        self.background.start()

    def _write(self, staged: Staged) -> None:
        self.number += 1
        draft = begin(Store(self.root / "ours"), step=self.number, job="bench")
        written = write(staged, draft, 0, files=4)
        staged.release()
        parts = (*written.parts, *finish(self.plan, [written], draft))
        record = Record(kind=PERIODIC, saved_at_ns=self.number)
        commit(draft, plan=planned_parts(self.plan, files=4), parts=parts, record=record)

    def theirs(self) -> None:
        self.number += 1
        writer = FileSystemWriter(self.root / f"theirs-{self.number}", thread_count=4, single_file_per_rank=False)
        save_stock(self.state(), storage_writer=writer, no_dist=True)

    def theirs_behind(self) -> None:
        self.number += 1
        writer = FileSystemWriter(self.root / f"theirs-{self.number}", thread_count=4, single_file_per_rank=False)
        behind = async_save_stock(self.state(), storage_writer=writer, no_dist=True)
        # What it returns is a future, or holds one, by its version.
        future = behind if isinstance(behind, Future) else behind.upload_completion
        self.background = threading.Thread(target=future.result)
        self.background.start()

    def timed(self, steps: int, save: Callable[[], None]) -> float:
        """Seconds of the loop, with a save at one of its steps; what is written behind it ends outside the clock."""
        self._settle()
        shutil.rmtree(self.root)
        self.root.mkdir()
        os.sync()
        start = time.perf_counter()
        for number in range(steps):
            self.step()
            if number == SAVE_AT:
                save()
        self._settle_device()
        taken = time.perf_counter() - start
        self._settle()
        return taken

    def _settle_device(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _settle(self) -> None:
        if self.background is not None:
            self.background.join()
        self._settle_device()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        loop = Loop(options.device, options.width, options.layers, options.batch, Path(root) / "run")
        objects: dict[str, Callable[[], float]] = {
            "no save": lambda: loop.timed(options.steps, lambda: None),
            "unbroken, copies beside the next step": lambda: loop.timed(options.steps, lambda: loop.ours(is_lazy=True)),
            "unbroken, copies in order": lambda: loop.timed(options.steps, lambda: loop.ours(is_lazy=False)),
            "stock dcp.save, 4 threads": lambda: loop.timed(options.steps, loop.theirs),
            "stock dcp.async_save, 4 threads": lambda: loop.timed(options.steps, loop.theirs_behind),
        }
        found = interleaved(objects, options.repeats)
        size_bytes = sum(tensor.nbytes for tensor in loop.state().values())
    plain = found["no save"].median
    rows = [(name, f"{s.median:.3f}", s.spread, f"{s.median - plain:.3f}") for name, s in found.items()]
    columns = [Column("loop"), Column("s", True), Column("spread"), Column("stall, s", True)]
    print(f"{size_bytes / 1e9:.1f} GB of state, {plain / options.steps:.4f} s a step")
    print(table(columns, rows, style=Style(False)))
    figures = {name: {"s": samples.values, "median_s": samples.median} for name, samples in found.items()}
    print(write_results(f"stall-{options.device}", {"bytes": size_bytes, "figures": figures}))


if __name__ == "__main__":
    main()
