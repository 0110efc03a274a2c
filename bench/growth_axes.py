"""What ``bench.growth`` measures: one function for each axis, which takes a size and returns CPU seconds by operation.

Every function runs in a process of its own, so that its memory is its own. What prepares an operation is not counted.
Real code does the work on real files; only the processes of other ranks are missing, and the parts of a checkpoint that
are alike are links to one file.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import unbroken
from bench.messages import _names, held_by_rank
from bench.plan import Endless, opened, serve
from bench.store import many_checkpoints
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsWriter, bits_of, lost_values, read_metrics
from unbroken.records.summary import checkpoint_lines, summarize
from unbroken.state import payload, save
from unbroken.state.description import Describer
from unbroken.state.pieces import SavePlan, agree_on, assign, bytes_of, part_name, spread_over
from unbroken.state.stage import StagedPiece
from unbroken.state.trainer_state import rank_part
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.commit import Record, begin, commit
from unbroken.store.compare import compare
from unbroken.store.directory import Store
from unbroken.store.dumps import Pointer, point
from unbroken.store.keep import LastK, decide
from unbroken.store.manifest import Part, Tensor
from unbroken.store.names import PERIODIC
from unbroken.store.sweep import candidates, plan_sweep, settle
from unbroken.world import World

Seconds = dict[str, float]
JOB = "j0001_ab12cd34"
TENSORS_OF_A_RANK = 100
MOST_CHILDREN = 64
# All metrics at once take about a kilobyte a step; only `validate` of a run with a walltime limit, and drills, do that.
MOST_IN_MEMORY = 1_000_000
STEPS_OF_A_JOB, LOST_STEPS, SAVED_EVERY = 10_000, 100, 1_000


def cpu(act: Callable[[], object], *, is_repeatable: bool = True) -> float:
    """CPU seconds of all threads; of something short that can be repeated, the least of several times."""
    found: list[float] = []
    while not found or (is_repeatable and len(found) < 7 and sum(found) < 1.0):
        began = time.process_time()
        act()
        found.append(time.process_time() - began)
    return min(found)


# ---- ranks ----


def over_ranks(ranks: int, root: Path) -> Seconds:
    """Tensors that are sharded over all ranks: what rank 0 does at a save, and what a resume reads of it."""
    found: Seconds = {}
    names, made = _names(TENSORS_OF_A_RANK), list[SavePlan]()
    held = [held_by_rank(rank, ranks, names, is_sharded=True) for rank in range(ranks)]

    def make() -> None:
        spreads = spread_over(held)
        planned = agree_on(spreads)
        assigned = assign(held, spreads, planned)
        pieces = tuple(one.pieces(names, chosen) for one, chosen in zip(held, assigned, strict=True))
        made[:] = [SavePlan(0, planned, pieces, (), bytes_of(planned))]

    found["save: rank 0 plans"] = cpu(make, is_repeatable=False)
    plan, store = made[0], Store(Layout(root / "run").checkpoints)
    draft = begin(store, step=1, job=JOB)
    pieces = plan.pieces_by_rank[-1]
    staged = [StagedPiece(each, (torch.zeros(each.size_bytes, dtype=torch.uint8),)) for each in pieces]
    written = payload.write_bundles([staged], draft, ranks - 1)
    record = draft.write_part(rank_part(ranks - 1), [b"{}"])
    last = payload.WriteReport.of(written, pieces)
    reports, records = list[payload.WriteReport](), list[Part]()
    for rank in range(ranks):
        part = Part(part_name(rank, 0), last.parts[0].digest)
        reports.append(payload.WriteReport((part,), last.layout))
        records.append(Part(rank_part(rank), record.digest))
        if rank < ranks - 1:
            for one, other in ((part, last.parts[0]), (records[-1], record)):
                os.link(draft.path / other.name, draft.path / one.name)
    described: list[Part] = []
    describing = Describer()
    found["save: rank 0 describes"] = cpu(
        lambda: described.extend(describing.write(plan, reports, draft)), is_repeatable=False
    )
    parts = [*(part for report in reports for part in report.parts), *records, *described]
    tensors = {name: Tensor(one.dtype, one.shape, "0" * 32) for name, one in plan.tensors.items()}
    wanted = [part.name for part in parts]
    saved = Record(kind=PERIODIC, saved_at_ns=1, tensors=tensors)
    found["commit"] = cpu(lambda: commit(draft, plan=wanted, parts=parts, record=saved), is_repeatable=False)
    found |= _read_again(store, {name: torch.empty(one.shape) for name, one in plan.tensors.items()})
    for rank in range(ranks):
        point(store.root.parent, Pointer(rank, ranks, 2, JOB, f"host{rank // 8}", "/local/dump"))
    found["status, with a dump of each rank"] = cpu(lambda: summarize(store, now_s=time.time()))
    return found


def _read_again(store: Store, tensors: dict[str, torch.Tensor]) -> Seconds:
    """Choose, verify and read the one checkpoint of a store."""
    name, found = "checkpoint-1", dict[str, float]()
    found["choose"] = cpu(lambda: resume_point(store, Level.QUICK, job=JOB, at_ns=2).required(store))
    found["verify --full"] = cpu(lambda: _sound(store, name))
    manifest = store.read_manifest(name)
    index = payload.read_index(store, name, manifest)
    found["resume: manifest and index"] = cpu(
        lambda: payload.read_index(store, name, store.read_manifest(name)), is_repeatable=False
    )
    found["resume: one rank reads all"] = cpu(
        lambda: payload.read(store, name, manifest, index, tensors, World(0, 1)), is_repeatable=False
    )
    return found


def _sound(store: Store, name: str) -> bool:
    verdict = verify(store, name, Level.FULL)
    assert verdict.is_sound, verdict.findings
    return True


# ---- tensors ----


class Block(torch.nn.Module):
    """Two parameters of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 2))
        self.bias = torch.nn.Parameter(torch.randn(4))


def nested(blocks: int) -> torch.nn.Module:
    """So many blocks, no module with more than 64 of them: as models are built, and quick for torch to load.

    Its ``load_state_dict`` looks at all names of a module once for each child of that module.
    """
    if blocks <= MOST_CHILDREN:
        return torch.nn.ModuleList(Block() for _ in range(blocks))
    children = min(MOST_CHILDREN, -(-blocks // MOST_CHILDREN))
    sizes = [blocks // children + (number < blocks % children) for number in range(children)]
    return torch.nn.ModuleList(map(nested, sizes))


def _many(tensors: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and AdamW that have so many tensors together: a parameter has two moments and a count of steps."""
    model = nested(tensors // 8)
    return model, torch.optim.AdamW(model.parameters())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _pauses() -> Iterator[list[float]]:
    """CPU seconds that the training thread spends in each start of a save."""
    found, start = list[float](), save.Saver.start

    def measured(saver: save.Saver, request: save.Request, rng: Callable[[], dict[str, Any]]) -> None:
        began = time.thread_time()
        start(saver, request, rng)
        found.append(time.thread_time() - began)

    save.Saver.start = measured  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        save.Saver.start = start  # type: ignore[method-assign]


def over_tensors(tensors: int, root: Path) -> Seconds:
    """Two jobs of a run whose model and optimizer have so many tensors, through ``unbroken.Run``."""
    settings = unbroken.Settings(save_steps=1, console=False, keep_last_k=None)
    model, optimizer = _many(tensors)
    run = unbroken.Run(root / "run", settings=settings, model=model, optimizer=optimizer)
    found: Seconds = {"first opening": cpu(run.open, is_repeatable=False)}
    with _pauses() as pauses:
        saves, began = list[float](), 0.0
        for step in run.steps(3):
            if step:
                _wait_for_save()
                saves.append(time.process_time() - began)
            _step(model, optimizer)
            began = time.process_time()
    names = ("first save", "second save")
    for name, pause_s, total_s in zip(names, pauses, saves, strict=False):
        found |= {f"{name}: training paused": pause_s, f"{name}: beside training": total_s - pause_s}
    store = Store(Layout(root / "run").checkpoints)
    found["choose"] = cpu(lambda: resume_point(store, Level.QUICK, job=JOB, at_ns=2).required(store))
    found["verify --full"] = cpu(lambda: _sound(store, "final"))
    found["status"] = cpu(lambda: summarize(store, now_s=time.time()))
    found["ls"] = cpu(lambda: checkpoint_lines(store))
    found["diff"] = cpu(lambda: compare(store.read_manifest("checkpoint-1"), store.read_manifest("final")))
    model, optimizer = _many(tensors)
    began = time.process_time()
    with (
        contextlib.suppress(_Resumed),
        unbroken.Run(root / "run", settings=settings, model=model, optimizer=optimizer) as run,
    ):
        for _ in run.steps(4):
            found["resume"] = time.process_time() - began
            raise _Resumed
    return found


class _Resumed(Exception):
    """Ends the job where its first step would begin: what follows is not measured."""


def _wait_for_save() -> None:
    for thread in threading.enumerate():
        if thread.name == "unbroken-save":
            thread.join()


def over_manifest(tensors: int, root: Path) -> Seconds:
    """A checkpoint that names so many tensors and holds none: what is read before the first of them."""
    store, found = Store(Layout(root / "run").checkpoints), dict[str, float]()
    named = {f"layers.{n // 16}.block.{n % 16}.weight": Tensor("float32", (4,), "0" * 32) for n in range(tensors)}
    draft = begin(store, step=1, job=JOB)
    part = draft.write_part("0.bin", [b"0"])
    saved = Record(kind=PERIODIC, saved_at_ns=1, tensors=named)
    found["commit"] = cpu(lambda: commit(draft, plan=[part.name], parts=[part], record=saved), is_repeatable=False)
    found["choose"] = cpu(lambda: resume_point(store, Level.QUICK, job=JOB, at_ns=2).required(store))
    found["verify --full"] = cpu(lambda: _sound(store, "checkpoint-1"))
    found["status"] = cpu(lambda: summarize(store, now_s=time.time()))
    return found


# ---- checkpoints ----


def over_checkpoints(checkpoints: int, root: Path) -> Seconds:
    """A store that keeps so many checkpoints of four parts."""
    many_checkpoints(root, checkpoints, 4)
    store = Store(Layout(root / "run").checkpoints)
    store.root.parent.mkdir()
    (root / "many").rename(store.root)
    (store.root / "latest").symlink_to("checkpoint-0")
    found: Seconds = {}
    steps = iter(range(checkpoints, checkpoints + 100))
    for name, keep in (("save, commit, keep all", None), ("save, commit, keep that many", 2 * checkpoints + 100)):
        found[name] = cpu(lambda keep=keep: _one_more(store, next(steps), keep))  # type: ignore[misc]
    found["choose"] = cpu(lambda: resume_point(store, Level.QUICK, job=JOB, at_ns=2).required(store))
    found["status"] = cpu(lambda: summarize(store, now_s=time.time()))
    found["ls"] = cpu(lambda: checkpoint_lines(store))
    names = [f"checkpoint-{step}" for step in range(checkpoints)]
    found["verify --full, all"] = cpu(lambda: all(_sound(store, name) for name in names))
    released = decide(candidates(store, names), (LastK(1),)).released
    found["prune: what to remove"] = cpu(lambda: plan_sweep(store, released, is_live=lambda _: False))
    for name in names:
        (store.path(name) / "state/__0_0.distcp").unlink()
    found["resume, all of them damaged"] = cpu(
        lambda: resume_point(store, Level.QUICK, job=JOB, at_ns=2), is_repeatable=False
    )
    return found


def _one_more(store: Store, step: int, keep: int | None) -> None:
    draft = begin(store, step=step, job=JOB)
    part = draft.write_part("0.bin", [b"0"])
    name = commit(draft, plan=[part.name], parts=[part], record=Record(kind=PERIODIC, saved_at_ns=step))
    settle(store, name, (LastK(keep),), job=JOB, is_live=lambda _: False)
    shutil.rmtree(store.path(name))


# ---- documents ----


def over_documents(documents: int, root: Path) -> Seconds:
    """The packing plan of so many documents: built, opened again as a resume does, and looked up."""
    shard, found = Endless(documents, median=60), dict[str, float]()
    found["first start: plan is built"] = cpu(lambda: opened(shard, root / "cache"), is_repeatable=False)
    found["resume: plan is opened"] = cpu(lambda: opened(shard, root / "cache"))
    found["1,000,000 samples looked up"] = serve(opened(shard, root / "cache"), 20)
    return found


# ---- steps ----


def over_steps(steps: int, root: Path) -> Seconds:
    """The records of a run of so many steps, in jobs of 10,000 steps, each of which lost and repeated the last 100."""
    layout = Layout(root / "run")
    layout.metrics.mkdir(parents=True)
    jobs = max(1, steps // STEPS_OF_A_JOB)
    for job in range(1, jobs + 1):
        begin_at = max(0, (job - 1) * steps // jobs - LOST_STEPS) if job > 1 else 0
        with (layout.metrics / f"job-{job:04}.jsonl").open("w") as lines:
            lines.writelines(_metric_lines(job, begin_at, job * steps // jobs))
        _journal_job(layout, job, begin_at, job * steps // jobs)
    store, found = Store(layout.checkpoints), dict[str, float]()
    store.root.mkdir()
    # By a job after the one that resumes: its steps are not compared.
    writer = MetricsWriter(layout, jobs + 2, start=steps)
    values = {"loss": 1.25, "grad_norm": 0.5, "lr": 1e-4}
    began = time.process_time()
    for _ in range(10_000):
        writer.write(steps, values)
    found["10,000 steps written"] = time.process_time() - began
    writer.close()
    found["resume: steps to compare"] = cpu(lambda: _lost(layout, jobs + 1, steps - LOST_STEPS))
    found["status"] = cpu(lambda: summarize(store, now_s=time.time()))
    if steps <= MOST_IN_MEMORY:
        found["all metrics read"] = cpu(lambda: _stitched(layout, steps), is_repeatable=False)
    return found


def _metric_lines(job: int, start: int, last: int) -> Iterator[str]:
    yield json.dumps({"schema": "unbroken.metrics/1", "job": job, "start": start, "is_comparable": True}) + "\n"
    for step in range(start + 1, last + 1):
        loss = 2.0 + 1.0 / step
        yield (
            f'{{"step": {step}, "loss": {loss!r}, "grad_norm": 0.5, "lr": 0.0001, "bits": '
            f'{{"loss": "{bits_of(loss)}", "grad_norm": "0x1.0000000000000p-1", "lr": "0x1.a36e2eb1c432dp-14"}}}}\n'
        )


def _journal_job(layout: Layout, job: int, start: int, last: int) -> None:
    journal = Journal(layout, job, clock=lambda: 1.7e9 + last)
    journal.write("job-start", durable=False, world=8)
    for step in range(start - start % SAVED_EVERY + SAVED_EVERY, last + 1, SAVED_EVERY):
        journal.write("save", step=step)
        journal.write("commit", durable=False, name=f"checkpoint-{step}", step=step, seconds=7.0, bytes=1 << 34)
    journal.close()


def _lost(layout: Layout, job: int, start: int) -> None:
    assert len(lost_values(layout, job=job, start=start).lost) == LOST_STEPS


def _stitched(layout: Layout, steps: int) -> None:
    assert len(read_metrics(layout).kept) == steps


AXES: dict[str, tuple[Callable[[int, Path], Seconds], tuple[int, ...]]] = {
    "ranks": (over_ranks, (10, 100, 1_000, 10_000)),
    "tensors": (over_tensors, (1_000, 10_000, 100_000, 300_000, 1_000_000)),
    "tensors in a manifest": (over_manifest, (1_000, 10_000, 100_000, 1_000_000)),
    "checkpoints": (over_checkpoints, (10, 100, 1_000, 10_000)),
    "documents": (over_documents, (1_000_000, 10_000_000, 100_000_000, 1_000_000_000)),
    "steps": (over_steps, (10_000, 100_000, 1_000_000, 10_000_000)),
}
