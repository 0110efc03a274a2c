"""Sums on CUDA in one pass over memory.

``put_widened_`` adds a lane's gradient to its sum; torch's own add reaches half of the memory bandwidth.
``row_squares`` is the sum of squares of each row, with bits that follow from the row alone:
torch's own sum over a dimension may cut a row in another way when there are more rows, as on another sharding. Here one
program adds one row, in blocks from left to right, each by a fixed tree. This module needs Triton; it is only
imported with a CUDA device.
"""

from typing import Final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK: Final = 2048
WARPS: Final = 4
PUT_BLOCK: Final = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _put_widened(  # type: ignore[no-untyped-def]  # noqa: ANN202
    total,  # noqa: ANN001 -- Triton reads these as pointers and numbers
    part,  # noqa: ANN001
    count,  # noqa: ANN001
    IS_FIRST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < count
    values = tl.load(part + places, mask=is_inside).to(tl.float32)
    if not IS_FIRST:
        values = tl.load(total + places, mask=is_inside) + values
    tl.store(total + places, values, mask=is_inside)


def put_widened_(total: Tensor, part: Tensor, *, is_first: bool) -> None:
    """Add a part of a narrower type to a contiguous float32 sum; the first one is copied."""
    if count := total.numel():
        blocks = (triton.cdiv(count, PUT_BLOCK),)
        _put_widened[blocks](total, part.contiguous(), count, IS_FIRST=is_first, BLOCK=PUT_BLOCK, num_warps=WARPS)


# Without specialisation on alignment: a kernel compiled for aligned shards would add in another order.
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _row_squares(  # type: ignore[no-untyped-def]  # noqa: ANN202
    rows,  # noqa: ANN001
    sums,  # noqa: ANN001
    width,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for first in range(0, width, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(rows + row * width + places, mask=places < width, other=0.0).to(tl.float64)
        total += values * values
    tl.store(sums + row, tl.sum(total, axis=0))


def row_squares(rows: Tensor) -> Tensor:
    """The sum of squares of each row of a matrix, in float64."""
    rows = rows.contiguous()
    sums = torch.empty(rows.shape[0], dtype=torch.float64, device=rows.device)
    if rows.shape[0]:
        _row_squares[(rows.shape[0],)](rows, sums, rows.shape[1], BLOCK=BLOCK, num_warps=WARPS)
    return sums
