"""The loss in chunks: whatever their size, that of all logits at once; and never all logits at once."""

import pytest
import torch
from torch import Tensor

from unbroken.gpt.loss import IGNORED, loss_sum, next_token_targets


def inputs(rows: int = 29, width: int = 8, vocabulary: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, rows, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (1, rows), generator=generator)
    targets[0, 3:9] = IGNORED
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, 28, 29, 30, 1000])
def test_the_size_of_a_chunk_changes_nothing_but_rounding(chunk_rows: int) -> None:
    hidden, weight, targets = inputs()
    expected = torch.nn.functional.cross_entropy(
        (hidden[0] @ weight.t()).double(), targets[0], reduction="sum", ignore_index=IGNORED
    )
    found = loss_sum(hidden, weight, targets, chunk_logits=chunk_rows * len(weight))
    assert int(found.tokens) == 23
    torch.testing.assert_close(found.total.double(), expected)
    for mine, theirs in zip(
        torch.autograd.grad(found.total, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_labels_are_shifted_by_one() -> None:
    assert next_token_targets(torch.tensor([[5, 6, IGNORED, 8]])).tolist() == [[6, IGNORED, 8, IGNORED]]


def test_a_batch_without_a_single_label_has_a_loss_and_gradients_of_zero() -> None:
    hidden, weight, targets = inputs()
    found = loss_sum(hidden, weight, torch.full_like(targets, IGNORED))
    assert float(found.total.detach()) == float(found.tokens) == 0.0
    assert all(not gradient.any() for gradient in torch.autograd.grad(found.total, (hidden, weight)))


def test_two_calls_have_the_same_bits() -> None:
    hidden, weight, targets = inputs(rows=500)
    found = []
    for _ in range(2):
        loss = loss_sum(hidden, weight, targets, chunk_logits=128 * len(weight))
        found.append((loss.total, *torch.autograd.grad(loss.total, (hidden, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_gradients_the_value_is_the_same() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        without = loss_sum(hidden, weight, targets)
    assert torch.equal(without.total, loss_sum(hidden, weight, targets).total)
    assert not without.total.requires_grad


def test_large_logits_neither_overflow_nor_vanish() -> None:
    hidden, weight, targets = inputs()
    loss = loss_sum(hidden * 1e4, weight, targets)
    assert bool(loss.total.isfinite())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(loss.total, (hidden, weight)))


@pytest.mark.parametrize("chunk_rows", [128, 256])
def test_no_tensor_as_large_as_all_logits_is_made(chunk_rows: int) -> None:
    hidden, weight, targets = inputs(rows=2048, vocabulary=1000)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            largest = max(largest, made.numel() if isinstance(made, Tensor) else 0)
            return made

    with Watch():  # type: ignore[no-untyped-call]
        loss_sum(hidden, weight, targets, chunk_logits=chunk_rows * 1000).total.backward()  # type: ignore[no-untyped-call]
    assert largest == chunk_rows * 1000


def test_a_loss_scale_that_fp16_cannot_say_scales_gradients_that_it_can() -> None:
    hidden, weight, targets = (each.detach() for each in inputs())
    rows, matrix = (1e-3 * hidden).half().requires_grad_(), (1e-2 * weight).half().requires_grad_()
    plain = torch.autograd.grad(loss_sum(rows, matrix, targets).total, rows)[0]
    scaled = torch.autograd.grad(loss_sum(rows, matrix, targets).total * 2.0**17, rows)[0]
    assert scaled.isfinite().all()
    torch.testing.assert_close(scaled.double(), plain.double() * 2**17, rtol=1e-3, atol=0)
