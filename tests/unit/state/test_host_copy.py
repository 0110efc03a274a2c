"""Copies in host memory: what their checksums are of, and when they are taken."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tests.unit.state.payloads import ALONE, tensors_of_every_kind
from unbroken.state import host_copy
from unbroken.state.host_copy import Bytes, Checksums, others_may_write
from unbroken.state.pieces import plan_save
from unbroken.state.stage import Buffers, stage


@contextmanager
def another_thread(name: str) -> Iterator[None]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No threads but those that a test starts."""
    others = set(threading.enumerate()) - {threading.current_thread()}
    real = threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in real() if each not in others])


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("arena_bytes", [1 << 12, 1 << 26])
def test_one_flipped_bit_of_any_copy_names_its_tensor(
    is_watched: bool, threads: int, arena_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "others_may_write", lambda _: is_watched)
    monkeypatch.setattr(host_copy, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = {**tensors_of_every_kind(), "large": torch.randn(3, host_copy.AT_A_TIME_BYTES // 4)}
    staged = stage(plan_save(tensors, ALONE), tensors, Buffers(arena_bytes=arena_bytes), is_checked=True)
    assert staged.checksums.changed() == ()
    for one in staged.pieces:
        for stretch in (one.stretches[0], one.stretches[-1]) if one.stretches else ():
            stretch[-1] ^= 64
            assert staged.checksums.changed() == (one.piece.name,)
            stretch[-1] ^= 64
    assert {name for name, tensor in tensors.items() if tensor.numel()} == set(staged.checksums.names)


@pytest.mark.promise("U15")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.usefixtures("_alone")
def test_where_another_thread_runs_a_write_between_two_copies_is_found(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes the first tensor after it was copied and before the last one is: such copies are of no moment."""
    first, last = torch.randn(30, 40), torch.randn(7)
    tensors = {"first": first.t() if turned else first, "last": last}
    plan, copies = plan_save(tensors, ALONE), np.copyto

    def writing(copy: Bytes, source: Bytes) -> None:
        if len(source) == last.nbytes:
            first.add_(1.0)
        copies(copy, source)

    monkeypatch.setattr(np, "copyto", writing)
    with another_thread("writer"):
        staged = stage(plan, tensors, Buffers(), is_checked=True)
    assert staged.checksums.changed() == ("first",)


@pytest.mark.usefixtures("_alone")
def test_only_other_threads_and_processes_may_write() -> None:
    tensor = torch.zeros(3)
    assert not others_may_write([tensor])
    with another_thread("unbroken-lease"):
        assert not others_may_write([tensor])
    with another_thread("averaging"):
        assert others_may_write([tensor])
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    assert others_may_write([torch.ones(2), tensor])


def test_nothing_copied_is_nothing_changed() -> None:
    assert Checksums().changed() == ()
