"""The gradients of a replicated model in flat buckets, filled from behind while backward is still running.

Parameters are put into buckets in reverse order, which is about the order in which backward reaches them, and buckets
are handed on strictly in their own order: ranks whose graphs finish in another order, or that have no lane, still speak
to each other in the same sequence.
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
    """Some parameters, and the flat tensor of ``dtype`` that has room for their gradients."""

    dtype: torch.dtype
    device: torch.device
    parameters: list[nn.Parameter] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    numel: int = 0
    missing: set[int] = field(default_factory=set)

    def add(self, parameter: nn.Parameter) -> int:
        """Make room for a parameter's gradient; returns its place."""
        self.parameters.append(parameter)
        self.starts.append(self.numel)
        self.numel += parameter.numel()
        return len(self.parameters) - 1

    def view(self, flat: torch.Tensor, place: int) -> torch.Tensor:
        """The part of a flat tensor that belongs to one parameter, in its shape."""
        parameter, start = self.parameters[place], self.starts[place]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def padded(self, pieces: int) -> int:
        """How many elements it has when it can be cut into so many equal pieces."""
        return -(-self.numel // pieces) * pieces


class BucketFiller:
    """Fills the buckets of one lane after the other and tells when the next one is full.

    Args:
        parameters: the trainable ones, each once, in the model's order.
        dtype_of: the type of a parameter's gradient.
        put: takes a bucket's number, a parameter's place in it and its gradient, None where the lane has none.
        full: takes the number of the next bucket that has all its gradients.
        bucket_bytes: how many bytes fill a bucket.
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
        """A lane begins: every gradient is still to come."""
        self._is_open = True
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def close(self) -> None:
        """The lane is over: a gradient that has not come is one of zeros."""
        for number, bucket in enumerate(self.buckets):
            for place in sorted(bucket.missing):
                self._put(number, place, None)
            bucket.missing.clear()
        self._hand_on()
        self._is_open = False

    def hand_out(self, sums: Sequence[LazyBuffer]) -> None:
        """Let every parameter's ``grad`` be its part of the sums, which are as many as the buckets."""
        for bucket, total in zip(self.buckets, sums, strict=True):
            for place, parameter in enumerate(bucket.parameters):
                parameter.grad = bucket.view(total.tensor, place)

    def abandon(self) -> None:
        """Forget a lane that was left in the middle."""
        self._is_open = False

    def release(self) -> None:
        """Take the hooks off the parameters, which otherwise hold on to everything here."""
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
                raise LaneBroken(complaint="a gradient came twice: one backward a lane, and no reentrant checkpointing")
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                raise LaneBroken(complaint="a gradient is sparse; the sum takes dense ones: sparse=False")
            self._put(number, place, gradient)
            bucket.missing.discard(place)
            self._hand_on()

        return take

    def _hand_on(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._full(self._next)
            self._next += 1
