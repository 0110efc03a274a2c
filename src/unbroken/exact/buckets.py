"""The gradients of a replicated model in flat buckets, filled while backward is running.

Parameters are assigned to buckets in reverse order, which is roughly the order in which backward reaches them. Buckets
are reduced strictly in order: ranks whose graphs finish in another order, or that have no lane, still issue the same
sequence of collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from unbroken.errors import LaneBroken
from unbroken.exact.sums import LazyBuffer

BUCKET_BYTES = 25 << 20  # as DDP


@dataclass
class GradientBucket:
    """Some parameters, and the layout of their gradients in a flat tensor of ``dtype``."""

    dtype: torch.dtype
    device: torch.device
    parameters: list[nn.Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    numel: int = 0
    missing: set[int] = field(default_factory=set)

    def add(self, parameter: nn.Parameter) -> int:
        """Add a parameter; returns its index in the bucket."""
        self.parameters.append(parameter)
        self.starts.append(self.numel)
        self.numel += parameter.numel()
        return len(self.parameters) - 1

    def view(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        parameter, start = self.parameters[place], self.starts[place]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def padded(self, pieces: int) -> int:
        """The number of elements, rounded up to a multiple of ``pieces``."""
        return -(-self.numel // pieces) * pieces


class BucketFiller:
    """Fills the buckets lane by lane, and calls ``full`` for each full bucket, in order.

    Args:
        parameters: the trainable ones, each once, in the model's order.
        dtype_of: the type of a parameter's gradient.
        put: called with a bucket's number, a parameter's index in it and its gradient; None if the lane has none.
        full: called with the number of the next bucket that has all its gradients.
        bucket_bytes: the size of a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype_of: Callable[[nn.Parameter], torch.dtype],
        put: Callable[[int, int, torch.Tensor | None], None],
        full: Callable[[int], None],
        bucket_bytes: int,
    ) -> None:
        self.buckets: list[GradientBucket] = []
        self._put, self._full = put, full
        self._next = 0
        self._is_open = False
        self._hooks: list[RemovableHandle] = []
        size = 0
        for parameter in reversed(parameters):
            dtype = dtype_of(parameter)
            bucket = self.buckets[-1] if self.buckets else None
            if bucket is None or size >= bucket_bytes or (bucket.dtype, bucket.device) != (dtype, parameter.device):
                bucket, size = GradientBucket(dtype, parameter.device), 0
                self.buckets.append(bucket)
            place = bucket.add(parameter)
            size += parameter.numel() * dtype.itemsize
            hook = self._hook(len(self.buckets) - 1, place)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Start a lane: no gradient has arrived."""
        self._is_open = True
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def close(self) -> None:
        """End the lane: a gradient that did not arrive counts as zeros."""
        for number, bucket in enumerate(self.buckets):
            for place in sorted(bucket.missing):
                self._put(number, place, None)
            bucket.missing.clear()
        self._hand_on()
        self._is_open = False

    def hand_out(self, sums: Sequence[LazyBuffer]) -> None:
        """Set every parameter's ``grad`` to its view of the sums, one per bucket."""
        for bucket, total in zip(self.buckets, sums, strict=True):
            for place, parameter in enumerate(bucket.parameters):
                parameter.grad = bucket.view(total.tensor, place)

    def abandon(self) -> None:
        """Drop a lane that was interrupted."""
        self._is_open = False

    def release(self) -> None:
        """Remove the hooks from the parameters; they would keep this object alive."""
        self._is_open = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, number: int, place: int) -> Callable[[torch.Tensor], None]:
        bucket = self.buckets[number]

        def take(parameter: torch.Tensor) -> None:
            if not self._is_open:
                return  # a backward of the user's own, outside the lanes
            if place not in bucket.missing:
                raise LaneBroken(complaint="a gradient arrived twice: one backward per lane, no reentrant checkpoints")
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                raise LaneBroken(complaint="a gradient is sparse; use sparse=False")
            self._put(number, place, gradient)
            bucket.missing.discard(place)
            self._hand_on()

        return take

    def _hand_on(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._full(self._next)
            self._next += 1
