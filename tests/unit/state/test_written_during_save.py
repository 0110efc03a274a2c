"""Weights that change while a save copies them never become a checkpoint; one that contradicts itself is set aside."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.state.tiny import bits, job, quietly, tiny
from unbroken import Run
from unbroken.errors import DamagedCheckpoint, WrittenDuringSave
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.state import save
from unbroken.state.fingerprint import fingerprints
from unbroken.state.pieces import plan_save
from unbroken.state.stage import Buffers, Staged, described_by, require_as_fingerprinted, stage, staged_sums
from unbroken.store.directory import Store
from unbroken.store.manifest import Tensor
from unbroken.world import World

ALONE = World(0, 1)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def history(run: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(fact.values) for fact in read_history(Layout(run)).of_kind(kind)]


def test_the_sums_of_staged_bytes_give_the_fingerprints_of_the_live_tensors() -> None:
    torch.manual_seed(0)
    shared = torch.randn(40, 70)
    tensors = {
        "floats": torch.randn(3000),
        "halves": torch.randn(77, 33).bfloat16(),
        "wide": torch.randint(0, 1 << 60, (9, 300)),
        "flags": torch.rand(5000) > 0.5,
        "pairs": torch.randn(600, dtype=torch.complex64),
        "turned": torch.randn(30, 80).t(),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "tied": shared,
        "tied_again": shared,
    }
    plan = plan_save(tensors, ALONE)
    prints = fingerprints(tensors, ALONE)
    described = {name: Tensor(p.dtype, p.shape, prints[name]) for name, p in plan.tensors.items()}
    # The smallest arenas there are: most tensors lie in several stretches.
    staged = stage(plan, tensors, Buffers(arena_bytes=4096))
    require_as_fingerprinted(plan, described, staged_sums(staged, plan), 2)
    assert described_by(plan, staged_sums(staged, plan, with_tied=True)) == described
    for piece in staged.pieces:
        for stretch in piece.stretches[-1:]:
            stretch[-1] ^= 1
            with pytest.raises(WrittenDuringSave) as refused:
                require_as_fingerprinted(plan, described, staged_sums(staged, plan), 2)
            assert refused.value.names == (piece.piece.name,)
            stretch[-1] ^= 1


@contextmanager
def writing(weight: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Another thread, as an averaging thread is; what is given has it write to a weight once, and waits for that."""
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    written: queue.SimpleQueue[None] = queue.SimpleQueue()

    def write() -> None:
        while asked.get():
            weight.add_(1.0)
            written.put(None)

    def ask() -> None:
        asked.put(True)
        written.get()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield ask
    finally:
        asked.put(False)
        thread.join()


def fingerprint_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """As several ranks and GPUs do it; the tests of these run elsewhere."""
    monkeypatch.setattr(save, "_is_alone_in_host_memory", lambda *_: False)


@pytest.mark.promise("U15")
@pytest.mark.parametrize("way", ["checksums", "fingerprints"])
def test_a_save_of_weights_that_another_thread_writes_is_given_up(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(100, 40, bias=False)
    with writing(model.weight.data) as write:
        once = iter([write])
        if way == "fingerprints":
            fingerprint_at_the_edge(monkeypatch)

            def stage_late(*arguments: Any, **options: Any) -> Staged:  # noqa: ANN401
                # After the fingerprints of step 2 were taken, and before the copies.
                next(once, lambda: None)()
                return stage(*arguments, **options)

            monkeypatch.setattr(save, "stage", stage_late)
        else:
            copy = np.copyto

            def copy_and_wait(into: Any, source: Any) -> None:  # noqa: ANN401
                # Between the copy of step 2 and its checksum.
                copy(into, source)
                if source.nbytes == model.weight.nbytes:
                    next(once, lambda: None)()

            monkeypatch.setattr(np, "copyto", copy_and_wait)
        with Run(tmp_path / "run", settings=quietly(save_steps=2), model=model) as run:
            for _ in run.steps(4):
                pass
    assert [(each["step"], each["cause"]) for each in history(tmp_path / "run", "save-failed")] == [
        (2, "written-during-save")
    ]
    assert [each["step"] for each in history(tmp_path / "run", "commit")] == [4]
    assert "model.weight" in caplog.text
    again = nn.Linear(100, 40, bias=False)
    with Run(tmp_path / "run", settings=quietly(), model=again) as run:
        assert run.step == 4
    assert torch.equal(again.weight, model.weight)


def _staged_wrong(*arguments: Any, **options: Any) -> Staged:  # noqa: ANN401
    staged = stage(*arguments, **options)
    for piece in staged.pieces:
        if piece.piece.name == "model.0.weight":
            piece.stretches[0][0] ^= 1
    return staged


@pytest.mark.promise("U15")
@pytest.mark.parametrize("moment", ["copied", "fingerprinted"])
def test_a_bit_of_a_copy_that_flips_at_any_moment_gives_up_the_save(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its fingerprint is taken, or after: what is committed was in the model at the edge."""
    called = "stage" if moment == "copied" else "staged_sums"
    real = getattr(save, called)
    flips = iter([True])

    def flipping(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        found = real(*arguments, **options)
        staged = found if isinstance(found, Staged) else arguments[0]
        for piece in staged.pieces if next(flips, False) else ():
            if piece.piece.name == "model.0.weight":
                piece.stretches[0][0] ^= 1
        return found

    monkeypatch.setattr(save, called, flipping)
    objects = tiny()
    with Run(tmp_path / "run", settings=quietly(save_steps=2), **objects) as run:
        for _ in run.steps(4):
            pass
    failed = history(tmp_path / "run", "save-failed")
    assert [(each["step"], each["cause"]) for each in failed] == [(2, "written-during-save")]
    assert [each["step"] for each in history(tmp_path / "run", "commit")] == [4]


def test_the_fingerprints_of_the_copies_are_those_of_the_live_tensors_tied_ones_included(tmp_path: Path) -> None:
    first = nn.Linear(30, 40)
    model = nn.Sequential(first, nn.Linear(40, 30), first)
    optimizer, other = torch.optim.AdamW(model.parameters()), tiny()["model"].half()
    with Run(tmp_path / "run", settings=quietly(), model=model, optimizer=optimizer, other=other) as run:
        for _ in run.steps(1):
            model[1](first(torch.ones(2, 30))).sum().backward()
            optimizer.step()
    found = Store(tmp_path / "run" / "checkpoints").read_manifest("final")
    live = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    live |= {f"other.{name}": tensor for name, tensor in other.state_dict().items()}
    assert {"model.0.weight", "model.2.weight", "other.0.weight"} <= live.keys()
    assert fingerprints(live, ALONE) == {name: found.tensors[name].digest for name in live}


@pytest.mark.promise("U15")
def test_a_checkpoint_that_contradicts_its_fingerprint_is_quarantined_at_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, objects = tmp_path / "run", tiny()
    torch.manual_seed(3)
    job(run, 2, **objects)
    before = bits(objects["model"])
    # What a version that compared nothing before the commit could leave behind.
    fingerprint_at_the_edge(monkeypatch)
    monkeypatch.setattr(save, "stage", _staged_wrong)
    monkeypatch.setattr(save, "require_as_fingerprinted", lambda *_: None)
    job(run, 4, **tiny())
    monkeypatch.undo()
    with (
        pytest.raises(DamagedCheckpoint, check=lambda each: len(each.findings) == 1) as refused,
        Run(run, settings=quietly(resume="4"), **tiny()),
    ):
        pass
    assert "model.0.weight" in " ".join(refused.value.details())
    found = tiny(1)
    with Run(run, settings=quietly(), **found) as resumed:
        assert resumed.step == 2
    assert bits(found["model"]) == before
    assert len(list((run / "checkpoints" / "quarantine").iterdir())) > 0
    assert "model.0.weight" in caplog.text


@needs_gpu
@pytest.mark.promise("U15")
@pytest.mark.parametrize("way", ["clamp", "copy", "graph"])
@pytest.mark.parametrize("has_room", [False, True])
def test_on_a_gpu_a_write_beside_the_copy_gives_up_that_save_and_no_later_one(
    way: str, has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 GiB takes about 20 ms to reach the host; the write comes less than one after the edge.

    With room for a copy on the GPU no write comes too early, and no save is given up.
    """
    monkeypatch.setattr("unbroken.state.stage._has_room", lambda *_: has_room)
    model = nn.Linear(16384, 16384, bias=False).cuda()
    other = torch.zeros_like(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.data
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        weight.mul_(0.5)
    writes = {"clamp": lambda: weight.clamp_(-1e-6, 1e-6), "copy": lambda: weight.copy_(other), "graph": graph.replay}
    # Loading the kernel for the first time takes longer than the copy.
    writes[way]()
    torch.cuda.synchronize()
    with Run(tmp_path / "run", settings=quietly(), model=model, optimizer=optimizer) as run:
        for step in run.steps(6):
            if step in (2, 4):
                # The first thing after the edges of steps 2 and 4, whose saves are being copied.
                writes[way]()
            with torch.no_grad():
                weight.add_(torch.randn_like(weight))
            torch.cuda.synchronize()
    assert [each["step"] for each in history(tmp_path / "run", "save-failed")] == ([] if has_room else [2])
    assert [each["step"] for each in history(tmp_path / "run", "commit")] == ([2, 4, 6] if has_room else [4, 6])
