"""The norm's bits do not depend on how rows are dealt out, and its value is the norm."""

import pytest
import torch

from unbroken.exact import norm as norms
from unbroken.exact.exchange import RankGroup
from unbroken.exact.norm import clip_factor, fold, fold_columns, gradient_norm, scale

ALONE = RankGroup(0, 1)


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((37, 12), (12,), (19, 12), (5, 3, 2), (), (1, 700))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_it_is_the_norm() -> None:
    found = gradients()
    exact = torch.cat([each.double().flatten() for each in found]).norm()
    assert float(gradient_norm(found, ALONE)) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 5, 40])
def test_a_rows_sum_is_the_same_wherever_the_row_stands(size: int) -> None:
    matrix = gradients()[0].square()
    whole = fold_columns(matrix.clone())
    pieces = [fold_columns(piece.clone()) for piece in matrix.chunk(size)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 38])
def test_row_sums_of_shards_gathered_are_those_of_the_whole(size: int) -> None:
    whole = gradients()
    mine = [norms._row_sums([torch.chunk(each, size)[rank] if each.ndim and rank < len(torch.chunk(each, size))
            else each[:0] if each.ndim else each for each in whole if each.ndim]) for rank in range(size)]  # fmt: skip
    sharded = [each for each in whole if each.ndim]
    padded = [
        torch.cat(
            [
                torch.nn.functional.pad(sums, (0, -(-each.shape[0] // size) - sums.shape[0]))
                for sums, each in zip(rank, sharded, strict=True)
            ]
        )
        for rank in mine
    ]

    class Told(RankGroup):
        def gathered(self, part: torch.Tensor) -> torch.Tensor:
            return torch.stack(padded)

    heights = [each.shape[0] for each in sharded]
    found = norms._whole(mine[0], heights, Told(0, size))
    assert torch.equal(found, torch.cat(norms._row_sums(sharded)))


def test_how_much_is_added_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradient_norm(gradients(), ALONE)
    monkeypatch.setattr(norms, "_AT_ONCE", 1)
    assert torch.equal(gradient_norm(gradients(), ALONE), expected)


def test_a_norm_above_the_limit_is_clipped_to_it_and_one_below_is_left() -> None:
    found = gradients()
    before = [each.clone() for each in found]
    scale(found, clip_factor(gradient_norm(found, ALONE), 1e9))
    assert all(torch.equal(one, two) for one, two in zip(found, before, strict=True))
    scale(found, clip_factor(gradient_norm(found, ALONE), 0.5))
    assert float(gradient_norm(found, ALONE)) == pytest.approx(0.5, rel=1e-5)


def test_a_list_is_added_in_double_precision() -> None:
    assert float(fold(torch.tensor([2.0**30, 1.0, -(2.0**30)]))) == 1.0
    assert float(fold(torch.tensor([5.0]))) == 5.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [1, 12, 2_047, 2_048, 5_000])
def test_on_a_gpu_a_rows_sum_is_the_same_wherever_the_row_stands(width: int) -> None:
    matrix = torch.randn(301, width, generator=torch.Generator().manual_seed(4)).cuda()
    whole = norms._row_sums([matrix])[0]
    assert torch.equal(torch.cat([norms._row_sums([piece])[0] for piece in torch.split(matrix, 7)]), whole)
    torch.testing.assert_close(whole, matrix.double().square().sum(1), rtol=1e-12, atol=0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [16, 2_048, 4_096])
def test_on_a_gpu_a_rows_sum_is_the_same_wherever_its_shard_begins(width: int) -> None:
    aligned = torch.randn(64, width, generator=torch.Generator().manual_seed(4)).cuda()
    shifted = torch.empty(aligned.numel() + 1, device="cuda")[1:].view_as(aligned).copy_(aligned)
    assert torch.equal(norms._row_sums([aligned])[0], norms._row_sums([shifted])[0])
