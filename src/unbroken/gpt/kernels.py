"""Fused CUDA kernels, for what the compiler does in more passes over memory than are needed.

``loss_and_slope_`` reads a row of logits, and leaves its loss and, in place of the logits, their gradient.
``gated_backward`` reads gate, up and the gradient of their product once, and leaves both gradients and the product
itself. ``adamw_step_`` scales a gradient, and moves both moments and the weights. Each program owns whole rows or
elements of its own and adds in a fixed order: the bits repeat. This module needs Triton; it is only imported with a
CUDA device.
"""

from typing import Final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from unbroken.gpt.loss import IGNORED

# The fastest of eight and of six pairs on an H200.
LOSS_BLOCK: Final = 4096
LOSS_WARPS: Final = 8
GATED_BLOCK: Final = 2048
GATED_WARPS: Final = 4
STEP_BLOCK: Final = 1024
STEP_WARPS: Final = 4
KINDS: Final = {"swish": 0, "gelu": 1, "relu": 2}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _loss_and_slope(  # type: ignore[no-untyped-def]  # noqa: ANN202
    logits,  # noqa: ANN001 -- Triton reads these as pointers and numbers
    labels,  # noqa: ANN001
    losses,  # noqa: ANN001
    columns,  # noqa: ANN001
    IGNORE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * columns
    label = tl.load(labels + row)
    highest = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(start_of_row + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(values, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher), axis=0)
        highest = higher
    normalizer = highest + tl.log(total)
    is_counted = label != IGNORE
    chosen = tl.load(start_of_row + tl.where(is_counted, label, 0)).to(tl.float32)
    # Every thread must have read the label's logit before one of them puts a gradient in its place.
    tl.debug_barrier()
    tl.store(losses + row, tl.where(is_counted, normalizer - chosen, 0.0))
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(start_of_row + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        slope = tl.exp(values - normalizer) - tl.where(places == label, 1.0, 0.0)
        slope = tl.where(is_counted, slope, 0.0)
        tl.store(start_of_row + places, slope.to(logits.dtype.element_ty), mask=places < columns)


def loss_and_slope_(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each row, in fp32; the logits, contiguous, become the gradient of the summed loss by them."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    _loss_and_slope[(len(labels),)](
        logits, labels, losses, logits.shape[1], IGNORE=IGNORED, BLOCK=LOSS_BLOCK, num_warps=LOSS_WARPS
    )
    return losses


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gated_backward(  # type: ignore[no-untyped-def]  # noqa: ANN202
    gate_up,  # noqa: ANN001
    product_slope,  # noqa: ANN001
    gate_up_slope,  # noqa: ANN001
    product,  # noqa: ANN001
    width,  # noqa: ANN001
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < width
    gate = tl.load(gate_up + row * 2 * width + places, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + places, mask=is_inside, other=0.0).to(tl.float32)
    slope = tl.load(product_slope + row * width + places, mask=is_inside, other=0.0).to(tl.float32)
    if KIND == 0:
        share = tl.sigmoid(gate)
        active = gate * share
        derivative = share * (1.0 + gate * (1.0 - share))
    elif KIND == 1:
        share = 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476))
        active = gate * share
        derivative = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        share = tl.where(gate > 0, 1.0, 0.0)
        active = gate * share
        derivative = share
    element = product.dtype.element_ty
    tl.store(product + row * width + places, (active * up).to(element), mask=is_inside)
    tl.store(gate_up_slope + row * 2 * width + places, (slope * up * derivative).to(element), mask=is_inside)
    tl.store(gate_up_slope + row * 2 * width + width + places, (slope * active).to(element), mask=is_inside)


def gated_backward(gate_up: Tensor, product_slope: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of ``gate_up``, and ``activation(gate) * up``, from the gradient of that product; all contiguous."""
    gate_up_slope, product = torch.empty_like(gate_up), torch.empty_like(product_slope)
    rows, width = product_slope.shape
    _gated_backward[(rows, triton.cdiv(width, GATED_BLOCK))](
        gate_up,
        product_slope,
        gate_up_slope,
        product,
        width,
        KIND=KINDS[activation],
        BLOCK=GATED_BLOCK,
        num_warps=GATED_WARPS,
    )
    return gate_up_slope, product


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _adamw_step(  # type: ignore[no-untyped-def]  # noqa: ANN202
    weights,  # noqa: ANN001
    gradients,  # noqa: ANN001
    means,  # noqa: ANN001
    squares,  # noqa: ANN001
    factor,  # noqa: ANN001
    count,  # noqa: ANN001
    shrink,  # noqa: ANN001
    rate,  # noqa: ANN001
    share1,  # noqa: ANN001
    beta2,  # noqa: ANN001
    share2,  # noqa: ANN001
    root,  # noqa: ANN001
    epsilon,  # noqa: ANN001
    HAS_FACTOR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < count
    weight = tl.load(weights + places, mask=is_inside)
    gradient = tl.load(gradients + places, mask=is_inside)
    mean = tl.load(means + places, mask=is_inside)
    square = tl.load(squares + places, mask=is_inside)
    if HAS_FACTOR:
        gradient = gradient * tl.load(factor).to(tl.float32)
    mean = mean + (gradient - mean) * share1
    square = square * beta2 + gradient * gradient * share2
    moved = tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + epsilon)
    tl.store(means + places, mean, mask=is_inside)
    tl.store(squares + places, square, mask=is_inside)
    tl.store(weights + places, weight * shrink - moved * rate, mask=is_inside)


def adamw_step_(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    factor: Tensor | None,
    *,
    rate: float,
    betas: tuple[float, float],
    corrections: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """One step of AdamW on a tensor, in place; all are fp32 and laid out alike.

    The gradient is multiplied by ``factor`` first, one number on the device. Both moments began at zero, which
    ``corrections`` make up for.
    """
    count = weight.numel()
    if not count:
        return
    _adamw_step[(triton.cdiv(count, STEP_BLOCK),)](
        weight,
        gradient.contiguous(),
        mean,
        square,
        factor,
        count,
        1.0 - rate * decay,
        rate / corrections[0],
        1.0 - betas[0],
        betas[1],
        1.0 - betas[1],
        corrections[1] ** 0.5,
        epsilon,
        HAS_FACTOR=factor is not None,
        BLOCK=STEP_BLOCK,
        num_warps=STEP_WARPS,
        # Which products are fused into sums is the compiler's choice, made anew for each way the kernel is called: an
        # element's bits would follow from its neighbours' number.
        enable_fp_fusion=False,
    )
