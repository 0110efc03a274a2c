"""Host memory for what travels: as much as is needed at one time, whatever the sizes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unbroken.exact.sums import SumBuffers

CPU = torch.device("cpu")


def test_pieces_of_many_sizes_share_the_memory_of_the_largest() -> None:
    buffers = SumBuffers()
    for numel in (10, 1000, 30, 999, 500, 1000, 1):
        pair = [buffers.take(numel, torch.float32, CPU) for _ in range(2)]
        assert [each.numel() for each in pair] == [numel, numel]
        pair[0].fill_(1.0)
        assert pair[0].data_ptr() != pair[1].data_ptr()
        buffers.give(*pair)
    assert buffers.held == 2 * 1000 * 4


def test_types_are_kept_apart_and_what_is_lent_is_lent_to_one() -> None:
    buffers = SumBuffers()
    first = buffers.take(8, torch.float32, CPU)
    second = buffers.take(8, torch.float32, CPU)
    narrow = buffers.take(8, torch.bfloat16, CPU)
    assert narrow.dtype == torch.bfloat16 and len({each.data_ptr() for each in (first, second, narrow)}) == 3
    address = first.data_ptr()
    buffers.give(first, narrow)
    assert buffers.take(4, torch.float32, CPU).data_ptr() == address
    buffers.give(torch.empty(3))
    assert buffers.held == 2 * 32 + 16, "what was never lent is not kept"
    buffers.clear()
    assert buffers.held == 0


def test_a_buffer_that_is_still_referenced_is_not_reused() -> None:
    buffers = SumBuffers()
    lent = buffers.take(8, torch.float32, CPU)
    assert not buffers.is_seen(lent)
    view = lent[2:4].view(2, 1)
    assert buffers.is_seen(lent)
    buffers.leave(lent)
    assert buffers.held == 0
    buffers.give(lent)
    assert buffers.take(8, torch.float32, CPU).data_ptr() != lent.data_ptr()
    view.fill_(1.0)


def test_empty_ones_are_not_kept() -> None:
    buffers = SumBuffers()
    buffers.give(buffers.take(8, torch.float32, CPU))
    for _ in range(3):
        buffers.give(buffers.take(0, torch.float32, CPU))
    assert buffers.held == 32


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=30))
def test_no_two_that_are_lent_share_memory_and_no_more_is_kept_than_was_lent_at_one_time(
    moves: list[tuple[int, int, bool]],
) -> None:
    buffers = SumBuffers()
    lent: dict[int, torch.Tensor] = {}
    for slot, numel, is_left in moves:
        if slot in lent:
            used = lent.pop(slot)
            buffers.leave(used) if is_left else buffers.give(used)
            del used  # whoever gives something back holds on to it no longer
        else:
            lent[slot] = buffers.take(numel, torch.float32, CPU).fill_(float(slot))
        assert all(bool((each == float(place)).all()) for place, each in lent.items())
        assert not any(buffers.is_seen(each) for each in lent.values())
        assert buffers.held <= 4 * 40 * 4
