"""A save's stall and speed, ours against stock ``dcp.save`` and ``dcp.async_save``, in one run, side by side.

    python -m bench.payload [--gigabytes 1] [--repeats 3] [--files 4] [--device cpu] [--directory DIR]

Stall is what the caller waits for before the loop may continue. Durable is until every byte is synced and, for ours,
digested. Read is into tensors that exist, from the page cache; ours checks every block on the way.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_stock
from torch.distributed.checkpoint.state_dict_saver import save as save_stock

from bench.measure import Samples, interleaved, write_results
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.state.description import finish
from unbroken.state.payload import plan_save, planned_parts, read, read_index, write
from unbroken.state.stage import Buffers, stage
from unbroken.store.commit import Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.names import PERIODIC
from unbroken.world import World

WORLD = World(0, 1)


class Bench:
    """The same tensors saved and loaded in turn by each side."""

    def __init__(self, gigabytes: float, device: str, files: int, root: Path) -> None:
        elements = 16 << 20
        count = max(1, round(gigabytes * 1e9 / (4 * elements)))
        self.tensors = {f"model.w{n}": torch.randn(4096, elements // 4096, device=device) for n in range(count)}
        self.tensors |= {f"model.b{n}": torch.randn(4096, device=device) for n in range(200)}
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.files, self.root, self.buffers = files, root, Buffers()
        self.plan = plan_save(self.tensors, WORLD)
        self.step = 0
        self.stalls: list[float] = []

    def save_ours(self) -> float:
        """Seconds until the checkpoint is committed; the stall is kept beside."""
        self._clean()
        self.step += 1
        store = Store(self.root / "ours")
        start = time.perf_counter()
        plan = plan_save(self.tensors, WORLD, self.plan)
        staged = stage(plan, self.tensors, self.buffers)
        self.stalls.append(time.perf_counter() - start)
        draft = begin(store, step=self.step, job="bench")
        written = write(staged, draft, 0, files=self.files)
        staged.release()
        parts = (*written.parts, *finish(plan, [written], draft))
        record = Record(kind=PERIODIC, saved_at_ns=self.step)
        commit(draft, plan=planned_parts(plan, files=self.files), parts=parts, record=record)
        return time.perf_counter() - start

    def save_theirs(self, threads: int) -> float:
        self._clean()
        start = time.perf_counter()
        writer = FileSystemWriter(self.root / "theirs", thread_count=threads, single_file_per_rank=threads == 1)
        save_stock({"model": self.tensors}, storage_writer=writer, no_dist=True)
        return time.perf_counter() - start

    def _clean(self) -> None:
        # What the side before left in the page cache is not this side's to write.
        for name in ("ours", "theirs"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        os.sync()

    def load_ours(self) -> float:
        store = Store(self.root / "ours")
        start = time.perf_counter()
        name = f"checkpoint-{self.step}"
        manifest = store.read_manifest(name)
        read(store, name, manifest, read_index(store, name, manifest), self.tensors, WORLD, threads=self.files)
        return time.perf_counter() - start

    def load_theirs(self) -> float:
        start = time.perf_counter()
        load_stock({"model": self.tensors}, storage_reader=FileSystemReader(self.root / "theirs"), no_dist=True)
        return time.perf_counter() - start


def measure(bench: Bench, repeats: int) -> dict[str, Samples]:
    """Seconds, by what was done."""
    objects: dict[str, Callable[[], float]] = {
        "save, stock, 1 thread": lambda: bench.save_theirs(1),
        f"save, stock, {bench.files} threads": lambda: bench.save_theirs(bench.files),
        f"save, unbroken, {bench.files} files": bench.save_ours,
    }
    found = interleaved(objects, repeats)
    found["stall, unbroken"] = Samples(tuple(bench.stalls[1:]))
    bench.save_theirs(1)
    kept = bench.root / "theirs"
    kept.rename(bench.root / "aside")
    bench.save_ours()
    (bench.root / "aside").rename(kept)
    found |= interleaved({"load, stock": bench.load_theirs, "load, unbroken": bench.load_ours}, repeats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as root:
        bench = Bench(options.gigabytes, options.device, options.files, Path(root))
        found = measure(bench, options.repeats)
    rows = [
        (name, f"{samples.median:.3f}", samples.spread, f"{bench.size_bytes / samples.median / 1e9:.2f}")
        for name, samples in found.items()
    ]
    columns = [Column("what"), Column("s", True), Column("spread"), Column("GB/s", True)]
    print(table(columns, rows, style=Style(False)))
    figures = {name: {"s": samples.values, "median_s": samples.median} for name, samples in found.items()}
    print(write_results(f"payload-{options.device}", {"bytes": bench.size_bytes, "figures": figures}))


if __name__ == "__main__":
    main()
