"""Sums whose order is fixed by the length alone: halving, by elementwise additions.

``tensor.sum()`` splits its work by how much there is and by what runs it, so that the last bits of a row's sum can
depend on how many rows stand beside it. An elementwise addition has no such freedom, on any device.
"""

import torch


def fold_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The sum of each row of a matrix, which is used up; the same for a row wherever it stands."""
    width = matrix.shape[1]
    while width > 1:
        kept = (width + 1) // 2
        matrix[:, : width - kept].add_(matrix[:, kept:width])
        width = kept
    return matrix[:, 0]


def fold(numbers: torch.Tensor) -> torch.Tensor:
    """The sum of a list of numbers, in float64."""
    return fold_columns(numbers.to(torch.float64, copy=True).view(1, -1))[0]
