"""Host memory for what travels: as much as is needed at one time, whatever the sizes."""

import torch

from unbroken.exact.buffers import Buffers

CPU = torch.device("cpu")


def test_pieces_of_many_sizes_share_the_memory_of_the_largest() -> None:
    buffers = Buffers()
    for numel in (10, 1000, 30, 999, 500, 1000, 1):
        pair = [buffers.take(numel, torch.float32, CPU) for _ in range(2)]
        assert [each.numel() for each in pair] == [numel, numel]
        pair[0].fill_(1.0)
        assert pair[0].data_ptr() != pair[1].data_ptr()
        buffers.give(*pair)
    assert buffers.held == 2 * 1000 * 4


def test_types_are_kept_apart_and_what_is_lent_is_lent_to_one() -> None:
    buffers = Buffers()
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
