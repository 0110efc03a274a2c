"""The memory of transfers: so many buffers, used again, and none that somebody still holds."""

import threading

import pytest

from tests.patience import PATIENCE_S
from unbroken.mirror.transfer import READ_AHEAD, Limits, PieceBuffers, Stopped
from unbroken.store.digest import BLOCK_BYTES


@pytest.mark.promise("M8")
def test_a_buffer_is_reused_only_when_it_is_free() -> None:
    buffers = PieceBuffers(2, 8)
    first, second = buffers.take(8), buffers.take(5)
    first[:], second[:] = b"a" * 8, b"b" * 5
    kept = memoryview(first)
    taken: list[memoryview] = []
    asking = threading.Thread(target=lambda: taken.append(buffers.take(8)))
    asking.start()
    asking.join(0.3)
    assert asking.is_alive() and not taken
    # What was given out again is the second one: the first is held.
    del second
    asking.join(PATIENCE_S)
    assert bytes(taken[0]) == b"bbbbb\0\0\0"
    assert bytes(kept) == b"a" * 8


def test_who_waits_for_a_buffer_hears_that_the_transfer_is_to_end() -> None:
    is_stopped = threading.Event()
    buffers = PieceBuffers(1, 8, is_stopped.is_set)
    held = buffers.take(8)
    is_stopped.set()
    with pytest.raises(Stopped):
        buffers.take(8)
    assert len(held) == 8


@pytest.mark.parametrize("mebibytes", [48, 64, 128, 256, 1024, 4096])
def test_an_upload_always_makes_progress_with_the_memory_it_has(mebibytes: int) -> None:
    limits = Limits(memory_bytes=mebibytes << 20)
    held = limits.objects() * (READ_AHEAD - 1)
    # Even if every object holds all that it reads ahead, pieces are left that only wait to be sent.
    assert held + limits.objects() * limits.in_flight() <= limits.pieces()
    assert limits.pieces() * BLOCK_BYTES <= limits.memory_bytes
