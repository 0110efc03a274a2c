"""Cross-entropy over a large vocabulary without ever holding all logits.

The rows of hidden states are taken a chunk at a time: its logits are made, turned into their own gradient and used up
at once for the gradients of hidden states and output weights, in the forward pass. What the backward pass keeps is two
tensors of the size of those inputs. Chunks are added in order into one fp32 accumulator, so the bits repeat. The result
is a sum with its count of tokens, not a mean, so that lanes can be folded exactly and divided once.
"""

from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody knows
from torch import Tensor
from torch.autograd.function import FunctionCtx

IGNORED: Final = -100
# Logits in one chunk: on a GPU enough to fill it and to need few sums of weight gradients; on a CPU less, for each
# operation makes a tensor of its own.
CUDA_CHUNK_LOGITS: Final = 1 << 29
CHUNK_LOGITS: Final = 1 << 25


class LossSum(NamedTuple):
    """The summed loss of the tokens that have a label, and how many those are; both fp32, without dimensions."""

    total: Tensor
    tokens: Tensor


def next_token_targets(labels: Tensor) -> Tensor:
    """For each token the label of the one after it; the last has none. Labels come unshifted."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_logits: int | None = None) -> LossSum:
    """The cross-entropy of ``hidden @ weight.T`` against ``targets``, summed over those that are not ``IGNORED``.

    Args:
        hidden: (batch, time, width), in the dtype of the products.
        weight: (vocabulary, width), of any dtype; its gradient is accumulated in fp32 and has its dtype.
        targets: (batch, time).
        chunk_logits: how many logits may exist at once; None chooses by the device.
    """
    if chunk_logits is None:
        chunk_logits = CUDA_CHUNK_LOGITS if hidden.is_cuda else CHUNK_LOGITS
    rows, flat_targets = hidden.flatten(0, 1), targets.flatten()
    wants_gradient = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    chunk_rows = _chunk_rows(len(rows), max(1, chunk_logits // len(weight)))
    # The products below are in the dtype of the hidden states already; autocast would only cast once more.
    with torch.autocast(rows.device.type, enabled=False):
        total: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            rows, weight, flat_targets, chunk_rows, wants_gradient
        )
    return LossSum(total, (flat_targets != IGNORED).sum().float())


def _chunk_rows(rows: int, most: int) -> int:
    """Rows per chunk: at most ``most``, all chunks nearly equal, a multiple of 128 where there are so many."""
    chunks = -(-rows // most)
    even = -(-rows // chunks)
    return even if even <= 128 else min(-(-even // 128) * 128, max(most // 128, 1) * 128)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Loss and both gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int, wants_gradient: bool
    ) -> Tensor:
        matrix = weight.to(rows.dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        row_gradients: list[Tensor] = []
        weight_gradient: Tensor | None = None
        for chunk, labels in zip(torch.split(rows, chunk_rows), torch.split(targets, chunk_rows), strict=True):
            loss, slope = _loss_and_slope(chunk @ matrix.t(), labels)
            total = total + loss
            if wants_gradient:
                row_gradients.append(slope @ matrix)
                share = slope.t() @ chunk
                weight_gradient = share.float() if weight_gradient is None else weight_gradient + share
        if wants_gradient and weight_gradient is not None:
            ctx.save_for_backward(torch.cat(row_gradients), weight_gradient)
            ctx.weight_dtype = weight.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- what forward left on it
        rows, weight = ctx.saved_tensors
        scale = gradients[0].float()
        # The loss scale may overflow fp16 while its products with small gradients do not: multiply in fp32. A 0-dim
        # tensor would not promote by itself.
        wide = rows.float() if rows.dtype is torch.float16 else rows
        return (wide * scale).to(rows.dtype), (weight * scale).to(ctx.weight_dtype), None, None, None


def _loss_and_slope(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of one chunk, and its gradient by the logits, in their dtype and perhaps in their place."""
    if logits.is_cuda:
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.gpt.kernels import loss_and_slope_

        return loss_and_slope_(logits, labels).sum(), logits
    is_counted = labels != IGNORED
    wide = logits.float()
    normalizer = torch.logsumexp(wide, dim=-1)
    safe_labels = labels.clamp(min=0)
    chosen = wide.gather(1, safe_labels[:, None])[:, 0]
    loss = torch.where(is_counted, normalizer - chosen, 0.0).sum()
    probabilities = torch.exp(wide - normalizer[:, None])
    # A comparison in place of a scatter: it fuses, and needs no promise about the order of writes.
    is_label = torch.arange(logits.shape[1], device=logits.device) == safe_labels[:, None]
    slope = torch.where(is_counted[:, None], probabilities - is_label.float(), 0.0)
    return loss, slope.to(logits.dtype)
