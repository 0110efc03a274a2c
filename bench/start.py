"""How long `unbroken train` takes from the command to the end of the first step, part by part.

    python -m bench.start [--size tiny|small|large] [--ranks N] [--rounds 3] [--directory DIR] [section.field=value]...

Jobs through the command line, each a new process, on documents drawn at random. The first one finds nothing: no result
of the self-test, nothing compiled. Those after it start a new run ("fresh") or resume it ("resumed") and find what the
first one left; with --wiped the temporary directory is emptied before each of them, as it is on a new compute node.
Wall and CPU seconds of rank 0, as the job recorded them; medians. On a busy machine look at the CPU seconds.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import write_results
from unbroken.data.corpus.shards import Entries, write_shard
from unbroken.files import LOCAL
from unbroken.launch.start_clock import PARTS
from unbroken.report.style import Style
from unbroken.report.table import Column, table

TOKENS = 4_000_000
SIZES: Mapping[str, tuple[str, ...]] = {
    "tiny": ("model.n_embd=128", "model.n_layer=4", "model.n_head=4", "data.max_length=128", "data.overlap_size=16"),
    "small": ("model.n_embd=768", "model.n_layer=12", "model.n_head=12", "data.max_length=2048"),
    "large": ("model.n_embd=2048", "model.n_layer=24", "model.n_head=32", "data.max_length=2048"),
}
COLD, FRESH, RESUMED = "first job", "fresh", "resumed"
PATIENCE_S = 1_800.0


def make_data(folder: Path, vocab: int) -> None:
    """One shard of documents of a thousand tokens."""
    lengths = np.full(TOKENS // 1000, 1000, np.int64)
    content = np.random.default_rng(3).integers(1, vocab, int(lengths.sum()), dtype=np.uint16)
    content[np.cumsum(lengths) - 1] = 0
    entries = Entries(content, lengths, np.zeros(len(lengths), np.uint16))
    write_shard(LOCAL, folder / "train", "00000", [entries], token_bytes=2)


class Jobs:
    """Jobs of one config, with caches and a temporary directory of their own."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        make_data(folder / "data", 50_000)
        (folder / "run.yaml").write_text("data: {path: data, num_workers: 0}\nmodel: {vocab_size: 50304}\n")
        self.wipe()

    def wipe(self) -> None:
        """Empty the temporary directory."""
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        (self.folder / "tmp").mkdir()

    def run(self, name: str) -> dict[str, Any]:
        """One job: started, stopped after its first step; what it recorded about its start."""
        if self.options.wiped:
            self.wipe()
        run = self.folder / name
        words = ["train", "run.yaml", f"training.output_dir={run}", "training.max_steps=100000", "data.epochs=1000000"]
        words += ["training.save_steps=100000", *SIZES[self.options.size], *self.options.overrides]
        words += [] if self.options.ranks == 1 else ["--nproc-per-node", str(self.options.ranks)]
        before = len(starts(run))
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "TMPDIR": str(self.folder / "tmp")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "unbroken", *words], cwd=self.folder, env=environment, stdout=log, stderr=log
            )
            until = time.monotonic() + PATIENCE_S
            while len(starts(run)) == before and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            process.wait()
        found = starts(run)
        if len(found) == before:
            raise SystemExit((self.folder / "log").read_text()[-4000:])
        return found[-1]


def starts(run: Path) -> list[dict[str, Any]]:
    """The events of first steps in the journal of a run, by job."""
    lines = [line for path in sorted(run.glob("journal/*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if '"first-step"' in line and line.endswith("}")]


def measure(jobs: Jobs, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The first job; then a fresh one and a resumed one in turn."""
    found: dict[str, list[dict[str, Any]]] = {COLD: [jobs.run("run-0")], FRESH: [], RESUMED: []}
    for number in range(1, rounds + 1):
        found[FRESH].append(jobs.run(f"run-{number}"))
        found[RESUMED].append(jobs.run(f"run-{number}"))
    return found


def show(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Medians of each part, wall and CPU seconds."""

    def cell(kind: str, which: str, part: str) -> str:
        values = [event[which].get(part) for event in found[kind]]
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.2f}" if known else ""

    columns = [Column("part")]
    columns += [Column(f"{kind}, {what}", is_number=True) for kind in found for what in ("wall s", "CPU s")]
    rows = [
        (part, *(cell(kind, which, part) for kind in found for which in ("parts", "cpu_parts")))
        for part in PARTS
        if any(part in event["parts"] for events in found.values() for event in events)
    ]
    totals = [
        f"{statistics.median(sum(event[which].values()) for event in events):.2f}"
        for events in found.values()
        for which in ("parts", "cpu_parts")
    ]
    return table(columns, [*rows, ("all", *totals)], style=Style(color=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wiped", action="store_true", help="empty the temporary directory before each job")
    parser.add_argument("--directory", help="where runs and caches are made, and removed afterwards")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        found = measure(Jobs(Path(folder), options), options.rounds)
    print(show(found))
    wiped = "-wiped" if options.wiped else ""
    facts = {"size": options.size, "ranks": options.ranks, "overrides": options.overrides, "starts": found}
    write_results(f"start-{options.size}{wiped}", facts)


if __name__ == "__main__":
    main()
