"""One table: saving and loading with this library, with others, and the limit of the disk.

    python -m bench.compare [--width 2048] [--layers 8] [--repeats 5] [--directory DIR] [--peers .peers]

``make bench`` installs the peers (``tools/peers.sh``) and runs this. The same model and AdamW on every side, default
settings, each side in a process of its own; the sides take turns, and every round counts, the first included. A save
has two times: what the training loop waits, and until the bytes would outlive a power cut. A load is cold and ends with
the state in the model and the optimizer, in a new process; starting Python is not counted. Ours is verified by
checksums and fingerprints; the others verify nothing. Writes ``bench/results/compare.json`` and
``docs/measured/bench.svg``; ``--show`` makes table and picture of what is kept.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.defaults import BLOCK_BYTES, _read, _write
from bench.measure import RESULTS, Samples, write_results
from bench.plot import Bars, bars_svg
from bench.store import drop_cache
from unbroken.report.style import Style
from unbroken.report.table import Column, table

SCRIPT = Path(__file__).resolve().parent / "compare_sides.py"
PICTURE = Path(__file__).resolve().parent.parent / "docs/measured/bench.svg"
ANSWER = "@answer "
LIMIT = "disk"
SIDES = (
    "unbroken",
    "torch.save",
    "dcp.save",
    "dcp.async_save",
    "dcp.async_save, process",
    "accelerate",
    "lightning",
    "gpt-simple",
    "torchtitan",
)
WAITS, DURABLE, LOAD = "save: the loop waits", "save: durable", "load"


class SideFailed(Exception):
    """A side ended instead of answering."""


@dataclass
class Side:
    """One side: where its Python is, how large the model is, and its process while it saves."""

    name: str
    python: str
    size: tuple[int, int]
    folder: Path
    process: subprocess.Popen[str] | None = None

    def start(self, mode: str, *place: str) -> None:
        width, layers = self.size
        # Without the script's folder on the path: a module there is called as one of the standard library.
        command = [self.python, "-P", str(SCRIPT), self.name, mode, str(width), str(layers), *place]
        log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.folder
        )

    def answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                found: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return found
        raise SideFailed((self.folder / "log").read_text()[-2000:])

    def save(self, into: Path) -> dict[str, Any]:
        if self.process is None:
            self.start("save")
            self.answer()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{into}\n")
        self.process.stdin.flush()
        return self.answer()

    def load(self, source: Path) -> dict[str, Any]:
        self.start("load", str(source))
        found = self.answer()
        self.stop()
        return found

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def limit(root: Path, size_bytes: int) -> tuple[float, float]:
    """Seconds of a plain write with a sync, and of a cold read: the better of direct by two and buffered by one."""
    writes, reads = [], []
    for files, is_direct in ((2, True), (1, False)):
        each = max(1, size_bytes // files // BLOCK_BYTES) * BLOCK_BYTES
        paths = [root / f"limit-{number}" for number in range(files)]
        with ThreadPoolExecutor(files) as pool:
            began = time.perf_counter()
            list(pool.map(_write, paths, [each] * files, [is_direct] * files))
            writes.append((time.perf_counter() - began) * size_bytes / (each * files))
            drop_cache(root)
            places = [(path, at) for at in range(0, each, BLOCK_BYTES) for path in paths]
            began = time.perf_counter()
            list(pool.map(_read, *zip(*places, strict=True), [is_direct] * len(places)))
            reads.append((time.perf_counter() - began) * size_bytes / (each * files))
        for path in paths:
            path.unlink()
    return min(writes), min(reads)


class Found:
    """Seconds by what was done and by side, by the wall and of CPU, and why a side was left out."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {WAITS: {}, DURABLE: {}, LOAD: {}}
        self.cpu_s: dict[str, dict[str, list[float]]] = {DURABLE: {}, LOAD: {}}
        self.failed: dict[str, str] = {}

    def note(self, what: str, side: str, seconds: float, cpu_s: float | None = None) -> None:
        self.seconds[what].setdefault(side, []).append(seconds)
        if cpu_s is not None:
            self.cpu_s[what].setdefault(side, []).append(cpu_s)

    def leave_out(self, side: str, why: SideFailed) -> None:
        """A side that fails has no figures; a median over the rounds that it lived through would flatter it."""
        self.failed[side] = str(why).strip().rpartition("\n")[2] or "it ended without a word"
        for by_side in (*self.seconds.values(), *self.cpu_s.values()):
            by_side.pop(side, None)


def measure(sides: Sequence[Side], root: Path, size_bytes: int, repeats: int, keep: Callable[[Found], object]) -> Found:
    """All rounds of saves, then all rounds of loads; what is found is kept after each."""
    found = Found()
    (root / "limit").mkdir()
    for number in range(repeats):
        found.note(DURABLE, LIMIT, limit(root / "limit", size_bytes)[0])
        for side in sides:
            if side.name not in found.failed:
                _one_save(side, number, found)
        keep(found)
    for side in sides:
        side.stop()
    for number in range(repeats):
        found.note(LOAD, LIMIT, limit(root / "limit", size_bytes)[1])
        for side in sides:
            if side.name not in found.failed:
                drop_cache(side.folder)
                try:
                    answered = side.load(side.folder / f"save-{repeats - 1}")
                    found.note(LOAD, side.name, answered["load_s"], answered["cpu_s"])
                    print(f"round {number + 1}, {side.name}: {answered}", flush=True)
                except SideFailed as failed:
                    found.leave_out(side.name, failed)
        keep(found)
    return found


def _one_save(side: Side, number: int, found: Found) -> None:
    # What the side before left in the page cache is not this side's to write.
    os.sync()
    try:
        answered = side.save(side.folder / f"save-{number}")
    except SideFailed as failed:
        found.leave_out(side.name, failed)
        return
    found.note(WAITS, side.name, answered["waited_s"])
    found.note(DURABLE, side.name, answered["durable_s"], answered["cpu_s"])
    print(f"round {number + 1}, {side.name}: {answered}", flush=True)
    if number:
        shutil.rmtree(side.folder / f"save-{number - 1}")


def rows_of(found: Found, size_bytes: int) -> list[tuple[str, ...]]:
    """The table: a side a row, the fastest first; the ratio is to the limit, or to ours where a disk is no limit."""
    rows = list[tuple[str, ...]]()
    for what, by_side in found.seconds.items():
        samples = {side: Samples(tuple(values)) for side, values in by_side.items()}
        against = LIMIT if LIMIT in samples else "unbroken"
        for side, each in sorted(samples.items(), key=lambda each: each[1].median):
            ratio = each.median / samples[against].median if against in samples else float("nan")
            rate = "" if what == WAITS else f"{size_bytes / each.median / 1e9:.2f}"
            cpu_s = found.cpu_s.get(what, {}).get(side)
            cpu = (f"{Samples(tuple(cpu_s)).median:.2f}", Samples(tuple(cpu_s)).spread) if cpu_s else ("", "")
            rows.append((what, side, f"{each.median:.3f}", each.spread, rate, f"{ratio:.2f}", *cpu))
    return rows


COLUMNS = (
    Column("what"),
    Column("side"),
    Column("median s", True),
    Column("lowest to highest"),
    Column("GB/s", True),
    Column("times the disk, or ours", True),
    Column("CPU s", True),
    Column("lowest to highest"),
)


def python_of(side: str, peers: Path) -> str:
    """The environment of a peer; torch's own ways are in ours."""
    is_ready = any((peers / side).glob(".installed-*"))
    return str((peers / side / "bin" / "python").absolute()) if is_ready else sys.executable


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory")
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--sides", nargs="*", default=SIDES, metavar="SIDE")
    parser.add_argument("--dry", action="store_true", help="keep no results")
    parser.add_argument("--show", action="store_true", help="table and picture of the results that are kept")
    options = parser.parse_args()
    if options.show:
        show(json.loads((RESULTS / "compare.json").read_text()))
        return
    size_bytes = 12 * options.layers * (options.width**2 + options.width)
    # Not relative: every side works in a folder of its own.
    root = Path(tempfile.mkdtemp(prefix="unbroken-compare-", dir=options.directory)).resolve()
    sides = []
    for name in options.sides:
        folder = root / name.replace(", ", "-")
        folder.mkdir()
        sides.append(Side(name, python_of(name, options.peers), (options.width, options.layers), folder))
    facts = dict[str, Any]()

    def keep(found: Found) -> None:
        load, cores = os.getloadavg()[2], os.cpu_count() or 1
        facts.update({"bytes": size_bytes, "cores": cores, "load": load, "failed": found.failed})
        facts.update({"seconds": found.seconds, "cpu_s": found.cpu_s})
        if not options.dry:
            write_results("compare", facts)

    try:
        measure(sides, root, size_bytes, options.repeats, keep)
    finally:
        for side in sides:
            side.stop()
        shutil.rmtree(root, ignore_errors=True)
    show(facts, is_kept=not options.dry)


def show(facts: Mapping[str, Any], *, is_kept: bool = True) -> None:
    """The table, and the picture of what is kept."""
    found, size_bytes = Found(), facts["bytes"]
    found.seconds, found.cpu_s, found.failed = facts["seconds"], facts["cpu_s"], facts["failed"]
    rounds = max(len(each) for by_side in found.seconds.values() for each in by_side.values())
    print(f"{size_bytes / 1e6:.0f} MB of state, {rounds} rounds, the first included")
    if facts["load"] > facts["cores"]:
        busy = f"load {facts['load']:.0f} on {facts['cores']} cores"
        print(f"other programs were running ({busy}): repeat on a quiet machine, or compare CPU seconds")
    print(table(COLUMNS, rows_of(found, size_bytes), style=Style(False)))
    for name, why in found.failed.items():
        print(f"left out: {name}: {why}")
    if is_kept:
        PICTURE.write_text(bars_svg(panels(found)))
        print(PICTURE)


def panels(found: Found) -> list[Bars]:
    """A panel for each kind of seconds."""
    kinds = {f"{what}, seconds by the clock": by_side for what, by_side in found.seconds.items()}
    kinds |= {f"{what}, CPU seconds": by_side for what, by_side in found.cpu_s.items()}
    return [
        Bars(title, {side: (Samples(tuple(each)).median, min(each), max(each)) for side, each in by_side.items()})
        for title, by_side in kinds.items()
    ]


if __name__ == "__main__":
    main()
