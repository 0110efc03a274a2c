"""One rank of a job that only reads: it notes a digest of every batch and saves its loader's state, until it dies."""

import contextlib
import hashlib
import json
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.patience import PATIENCE_S
from tests.unit.data.streams import open_stream
from unbroken.data.ingest.text_corpus import open_text_corpus
from unbroken.data.loader import Batch, Loader
from unbroken.data.stream import Stream
from unbroken.testing.worlds import preload, warm_context

GLOBAL_BATCH, LANE, LANES = 16, 2, 8
STEPS = 1_250  # of eight lanes: 10,000 batches
_SAVE_EVERY = 20
_LIMIT_S = PATIENCE_S
preload("tests.exact.lanes")


@dataclass(frozen=True)
class Rank:
    """What one process is told: where the data and the notes are, its place, its state, and when it kills itself."""

    data: str
    notes: str
    rank: int
    world: int
    workers: int
    state: str | None = None
    die_after: int | None = None


def digest(batch: Batch) -> str:
    """The bits of a batch."""
    found = hashlib.sha256()
    for tensor in (batch.tokens, batch.labels, batch.doc_ids):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def read(results: Rank) -> None:
    """Read to the end, or to the batch at which this rank kills itself; each batch is noted before the next one."""
    torch.set_num_threads(1)
    stream = _stream(Path(results.data))
    # A child of a fork server would start its workers with a server of its own, which outlives it.
    context = "fork" if results.workers else None
    loader = Loader(
        stream,
        global_batch_size=GLOBAL_BATCH,
        per_device_batch_size=LANE,
        rank=results.rank,
        world_size=results.world,
        num_workers=results.workers,
        multiprocessing_context=context,
    )
    if results.state is not None:
        loader.load_state_dict(json.loads(Path(results.state).read_text()))
    notes = Path(results.notes)
    with (notes / f"{os.getpid()}.batches").open("a") as lines:
        for number, batch in enumerate(loader):
            lines.write(f"{batch.step} {batch.lane} {digest(batch)}\n")
            lines.flush()
            if loader.steps % _SAVE_EVERY == 0 and loader.steps > batch.step:
                _save(loader, notes / f"state-{loader.steps}-{results.rank}")
            if results.die_after is not None and number + 1 == results.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if loader.steps == STEPS:
                return


def _stream(data: Path) -> Stream:
    """The samples of shards, or of text where that is what there is."""
    settings: dict[str, Any] = {"max_length": 16, "overlap_size": 3, "epochs": None}
    if any((data / "train").glob("*.jsonl")):
        return Stream(open_text_corpus(data, "train", "bytes", data / "cache"), cache_dir=data / "cache", **settings)
    return open_stream(data, **settings)


def _save(loader: Loader, path: Path) -> None:
    scratch = path.with_suffix(".scratch")
    scratch.write_text(json.dumps(loader.state_dict()))
    scratch.replace(path)


def run_job(results: list[Rank]) -> list[int]:
    """All ranks of one job; where one dies, the others are killed too. Tells how each ended."""
    context = warm_context()
    processes: list[BaseProcess] = [context.Process(target=read, args=(each,)) for each in results]
    for process in processes:
        process.start()
    running, ends_at = list(processes), time.monotonic() + _LIMIT_S
    while running:
        wait([process.sentinel for process in running], max(0.0, ends_at - time.monotonic()))
        if any(process.exitcode not in (None, 0) for process in running) or time.monotonic() > ends_at:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process in running:
            if process.exitcode is not None or time.monotonic() > ends_at:
                process.join()
        running = [process for process in running if process.exitcode is None]
    return [process.exitcode or 0 for process in processes]


def _read_in_group(results: Rank) -> None:
    os.setpgid(0, 0)
    read(results)


def run_in_group(results: Rank) -> tuple[int, int]:
    """One rank in a process group of its own: the group, and how the rank ended."""
    process = warm_context().Process(target=_read_in_group, args=(results,))
    process.start()
    process.join(_LIMIT_S)
    assert process.pid is not None and process.exitcode is not None
    return process.pid, process.exitcode


def newest_state(notes: Path, world: int) -> Path | None:
    """The state of the newest step that every rank of a job has saved."""
    saved: dict[int, int] = {}
    for path in notes.glob("state-*-*"):
        if path.suffix != ".scratch":
            step = int(path.name.split("-")[1])
            saved[step] = saved.get(step, 0) + 1
    whole = [step for step, count in saved.items() if count == world]
    return notes / f"state-{max(whole)}-0" if whole else None


def noted(folders: list[Path]) -> dict[tuple[int, int], set[str]]:
    """Every digest that was ever noted for each batch of the run."""
    found: dict[tuple[int, int], set[str]] = {}
    for folder in folders:
        for path in folder.glob("*.batches"):
            for line in path.read_text().splitlines(keepends=True):
                step, lane, *digests = line.split()
                # The last line of a killed process may be torn.
                if line.endswith("\n") and digests:
                    found.setdefault((int(step), int(lane)), set()).add(digests[0])
    return found
