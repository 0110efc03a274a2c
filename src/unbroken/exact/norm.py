"""The norm of a gradient, and clipping by it, with the same bits however the parameters are sharded.

The rank that owns a row adds its squares, pairwise or in one program; the sums of all rows, a small list, are gathered
and added pairwise. torch's own norm adds up each shard first, so its bits depend on the sharding.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from unbroken.exact.exchange import RankGroup
from unbroken.torch_private import foreach_mul_


def fold_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The sum of each row of a matrix, which is overwritten; independent of the row's position."""
    width = matrix.shape[1]
    while width > 1:
        kept = (width + 1) // 2
        matrix[:, : width - kept].add_(matrix[:, kept:width])
        width = kept
    return matrix[:, 0]


def fold(numbers: torch.Tensor) -> torch.Tensor:
    """The sum of a list of numbers, in float64."""
    return fold_columns(numbers.to(torch.float64, copy=True).view(1, -1))[0]


# Elements squared at a time: no second copy of the gradients is needed.
_AT_ONCE = 1 << 20
_EPSILON = 1e-6  # as in torch's own clipping


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gradient_norm(gradients: Sequence[torch.Tensor], ranks: RankGroup) -> torch.Tensor:
    """The 2-norm of all gradients together, in float64. Collective where they are sharded, along their rows.

    Args:
        gradients: in the same order on every rank and world size.
        ranks: the ranks that hold the shards.
    """
    heights = [_height(gradient) for gradient in gradients]
    sums = _row_sums([local(gradient) for gradient in gradients])
    if ranks.size == 1 or not any(isinstance(gradient, DTensor) for gradient in gradients):
        return fold(torch.cat(sums)).sqrt()
    return fold(_whole(sums, heights, ranks)).sqrt()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings gradients of this norm down to ``max_norm``."""
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


@torch.no_grad()
def scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply every gradient in place by a factor that is first rounded to float32."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        held = local(gradient)
        if held.numel():
            by_device[held.device].append(held)
    for device, held_there in by_device.items():
        foreach_mul_(held_there, factor.to(device=device, dtype=torch.float32))


def _height(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _row_sums(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of squares of each row that this rank holds, tensor by tensor, on the device of the first."""
    if all(part.is_cuda for part in parts):
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.exact.cuda_sums import row_squares

        return [row_squares(_rows(part)) for part in parts]
    return [_squares_added(_rows(part)).to(parts[0].device) for part in parts]


def _squares_added(rows: torch.Tensor) -> torch.Tensor:
    height = max(1, _AT_ONCE // max(1, rows.shape[1]))
    slabs: tuple[torch.Tensor, ...] = torch.split(rows, height)
    return torch.cat([fold_columns(slab.float().square()) for slab in slabs])


def _width(part: torch.Tensor) -> int:
    return part.shape[1:].numel() if part.ndim else 1


def _rows(part: torch.Tensor) -> torch.Tensor:
    # Explicit: torch cannot infer the width of a shard without rows.
    return part.reshape(_height(part), _width(part))


def _whole(sums: Sequence[torch.Tensor], heights: Sequence[int], ranks: RankGroup) -> torch.Tensor:
    """The sums of all rows of all tensors, in the order of the whole tensors, on every rank."""
    each = [-(-height // ranks.size) for height in heights]
    padded = [torch.nn.functional.pad(mine, (0, most - mine.shape[0])) for mine, most in zip(sums, each, strict=True)]
    gathered = ranks.gathered(torch.cat(padded))
    columns = torch.split(gathered, each, dim=1)
    return torch.cat([column.reshape(-1)[:height] for column, height in zip(columns, heights, strict=True)])
