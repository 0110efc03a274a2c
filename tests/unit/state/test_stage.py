"""Staging: copies that no later change reaches, in one set of buffers that is used over and over."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.unit.state.payloads import ALONE, random_bits, tensors_of_every_kind
from tests.unit.state.tiny import learn, quietly, tiny
from unbroken import Run
from unbroken.errors import NoMemory
from unbroken.state import save
from unbroken.state.host_copy import as_bits
from unbroken.state.host_memory import Arena
from unbroken.state.pieces import plan_save
from unbroken.state.stage import Buffers, Staged, room, stage

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def staged_bytes(staged: Staged) -> dict[str, bytes]:
    staged.wait()
    return {one.piece.name: b"".join(bytes(view) for view in one.views()) for one in staged.pieces}


def live_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: as_bits(tensor.detach().cpu().contiguous()).reshape(-1).numpy().tobytes()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("arena_bytes", [1 << 12, 1 << 26])
def test_a_copy_has_the_elements_row_by_row_whatever_the_layout(arena_bytes: int) -> None:
    tensors = tensors_of_every_kind()
    staged = stage(plan_save(tensors, ALONE), tensors, Buffers(arena_bytes=arena_bytes))
    assert staged_bytes(staged) == live_bytes(tensors)


def test_what_changes_after_staging_is_staged_as_it_was() -> None:
    tensors = {"a": torch.randn(1000), "b": torch.randn(10, 10).t()}
    before = live_bytes(tensors)
    staged = stage(plan_save(tensors, ALONE), tensors, Buffers())
    for tensor in tensors.values():
        tensor.zero_()
    assert staged_bytes(staged) == before


def test_the_second_save_uses_the_memory_of_the_first() -> None:
    tensors = {"a": torch.randn(100_000), "b": torch.randn(7)}
    buffers = Buffers(arena_bytes=1 << 17)
    plan = plan_save(tensors, ALONE)
    stage(plan, tensors, buffers).release()
    first = buffers.addresses
    assert len(first) > 1
    for _ in range(3):
        stage(plan, tensors, buffers).release()
        assert buffers.addresses == first


def all_made_ready(buffers: Buffers) -> None:
    assert buffers._preparing is not None
    buffers._preparing.join()


def test_memory_that_was_made_ready_is_that_of_the_first_save() -> None:
    tensors = {"a": torch.randn(100_000), "b": torch.randn(7)}
    buffers, plan = Buffers(arena_bytes=1 << 17), plan_save(tensors, ALONE)
    buffers.prepare(room(plan.pieces), None)
    all_made_ready(buffers)
    ready = buffers.addresses
    staged = stage(plan, tensors, buffers)
    assert buffers.addresses == ready
    assert staged_bytes(staged) == live_bytes(tensors)


def test_without_a_gpu_memory_is_made_ready_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it, gradients and optimizer state are still to come into the same memory."""
    monkeypatch.setattr(save, "_WORTH_PREPARING_BYTES", 1)
    # Large enough that the estimate ends in the same power of two as the save.
    objects, ready = tiny(width=40_000), []
    with Run(tmp_path / "run", settings=quietly(save_steps=3), **objects) as run:
        buffers: Buffers = run._open.opened.saver._buffers
        for step in run.steps(4):
            if step == 0:
                assert buffers._preparing is None
            elif step == 1:
                all_made_ready(buffers)
            ready.append(buffers.addresses)
            learn(objects)
    assert ready[1]
    assert ready[3] == ready[1]


def test_a_save_makes_the_memory_that_is_not_ready_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(100_000)}
    buffers, plan = Buffers(arena_bytes=1 << 17), plan_save(tensors, ALONE)
    began, go_on = threading.Event(), threading.Event()

    def slowly(arena: Arena) -> float:
        began.set()
        go_on.wait()
        return 0.0

    monkeypatch.setattr(Arena, "make_ready", slowly)
    buffers.prepare(room(plan.pieces), None)
    began.wait()
    threading.Timer(0.1, go_on.set).start()
    assert staged_bytes(stage(plan, tensors, buffers)) == live_bytes(tensors)


def test_no_more_than_half_of_the_free_memory_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.state.stage.available_bytes", lambda: 10 << 17)
    buffers = Buffers(arena_bytes=1 << 17)
    buffers.prepare(100 << 17, None)
    buffers.close()
    assert not buffers.size_bytes
    buffers = Buffers(arena_bytes=1 << 17)
    buffers.prepare(100 << 17, None)
    all_made_ready(buffers)
    assert buffers.size_bytes == 5 << 17


def test_the_memory_is_bounded_by_what_is_staged_and_follows_it_down() -> None:
    buffers = Buffers(arena_bytes=1 << 16)
    for elements in (100_000, 5_000, 200_000, 10):
        tensors = {"a": torch.randn(elements)}
        stage(plan_save(tensors, ALONE), tensors, buffers).release()
        assert buffers.size_bytes <= max(4096, 4 * elements + (1 << 16))


def test_a_second_save_while_one_is_in_flight_is_refused() -> None:
    tensors = {"a": torch.randn(10)}
    buffers = Buffers()
    plan = plan_save(tensors, ALONE)
    staged = stage(plan, tensors, buffers)
    with pytest.raises(RuntimeError, match="still in flight"):
        stage(plan, tensors, buffers)
    staged.release()
    stage(plan, tensors, buffers).release()


def test_a_stage_that_fails_leaves_the_buffers_free() -> None:
    tensors = {"a": torch.randn(10), "b": torch.randn(4)}
    buffers = Buffers()
    plan = plan_save(tensors, ALONE)
    with pytest.raises(KeyError):
        stage(plan, {"a": tensors["a"]}, buffers)
    with pytest.raises(RuntimeError):
        stage(plan, {"a": tensors["a"], "b": torch.randn(5)}, buffers)
    stage(plan, tensors, buffers).release()


@pytest.mark.parametrize("arena_bytes", [0, 1000, 5000])
def test_an_arena_that_is_no_power_of_two_is_refused(arena_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Buffers(arena_bytes=arena_bytes)


@needs_gpu
def test_on_a_gpu_a_step_waits_for_what_is_not_copied_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.state.stage._has_room", lambda *_: False)
    parameter = torch.nn.Parameter(torch.zeros(64 << 20, device="cuda"))
    changed_by_forward = torch.zeros(1 << 20, device="cuda")
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    tensors = {"p": parameter, "b": changed_by_forward}
    buffers, plan = Buffers(arena_bytes=1 << 26), plan_save(tensors, ALONE)
    first = []
    for step in range(6):
        staged = stage(plan, tensors, buffers, until_step={"p"})
        staged.guard([optimizer])
        first.append(buffers.addresses)
        changed_by_forward.add_(1.0)
        parameter.grad = torch.full_like(parameter, -1.0)
        optimizer.step()
        found = staged_bytes(staged)
        assert torch.frombuffer(bytearray(found["p"]), dtype=torch.float32).eq(step).all()
        assert torch.frombuffer(bytearray(found["b"]), dtype=torch.float32).eq(step).all()
        staged.release()
    assert all(addresses == first[0] for addresses in first)
    assert all(arena.tensor.is_pinned() for arena in buffers._arenas)


@needs_gpu
def test_on_a_gpu_memory_that_is_freed_early_is_not_returned_while_it_is_copied() -> None:
    buffers = Buffers()
    for seed in range(5):
        tensors = {"a": random_bits((32 << 20,), torch.int32, seed).cuda(), "t": torch.randn(4096, 4096).cuda().t()}
        expected = live_bytes(tensors)
        staged = stage(plan_save(tensors, ALONE), tensors, buffers, until_step={"a", "t"})
        tensors.clear()
        torch.zeros(64 << 20, device="cuda").add_(7)
        assert staged_bytes(staged) == expected
        staged.release()


def test_memory_that_the_host_has_not_leaves_the_buffers_free(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(10)}
    buffers = Buffers()
    plan = plan_save(tensors, ALONE)

    with monkeypatch.context() as patched:
        patched.setattr("unbroken.state.stage.available_bytes", lambda: 100)
        with pytest.raises(NoMemory):
            stage(plan, tensors, buffers)
    stage(plan, tensors, buffers).release()
