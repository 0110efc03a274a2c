"""Float32 sums of gradients of any dtype, and the reused memory they are kept in."""

import torch

from unbroken import torch_private

# ---- memory ----


class SumBuffers:
    """A pool of flat tensors for reuse."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}
        self._lone_holders = torch_private.lone_holders()

    @property
    def held(self) -> int:
        """Bytes held, including those in use."""
        return sum(each.nbytes for each in (*self._free, *self._lent.values()))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor."""
        # An empty tensor has no address to identify it when it is returned.
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        alike = sorted((each for each in self._free if each.dtype == dtype), key=torch.Tensor.numel)
        chosen = next((each for each in alike if each.numel() >= numel), None)
        # A free one that is too small is dropped for the new one: otherwise every size would be kept forever.
        spent = chosen if chosen is not None else alike[-1] if alike else None
        self._free = [each for each in self._free if each is not spent]
        if chosen is None:
            del alike, spent
            chosen = torch.empty(numel, dtype=dtype)
        self._lent[chosen.data_ptr()] = chosen
        return chosen[:numel]

    def give(self, *used: torch.Tensor) -> None:
        """Return tensors that are no longer referenced."""
        for each in used:
            if each.is_cpu and (whole := self._lent.pop(each.data_ptr(), None)) is not None:
                self._free.append(whole)

    def leave(self, *used: torch.Tensor) -> None:
        """Give tensors away: they may still be read or written."""
        for each in used:
            self._lent.pop(each.data_ptr(), None)

    def is_seen(self, lent: torch.Tensor) -> bool:
        """Whether somebody holds the memory of this tensor besides the pool and the borrower, or may do so."""
        if lent.data_ptr() not in self._lent:
            return False
        # If this torch does not count holders reliably, a gradient could be overwritten that somebody still reads.
        return self._lone_holders is None or torch_private.holders(lent) > self._lone_holders

    def clear(self) -> None:
        """Drop all, including those not returned."""
        self._free.clear()
        self._lent.clear()


# ---- sums ----

# Elements widened at a time.
_AT_ONCE = 1 << 18


@torch.no_grad()
def put(total: torch.Tensor, part: torch.Tensor | None, *, is_first: bool) -> None:
    """Add a part of any type to a float32 sum, None being zeros.

    The first one is copied, because 0.0 + -0.0 is +0.0.
    """
    if part is None:
        total.zero_() if is_first else total.add_(0.0)
    elif part.dtype == total.dtype:
        total.copy_(part) if is_first else total.add_(part)
    elif part.is_cuda:
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.exact.cuda_sums import put_widened_

        put_widened_(total, part, is_first=is_first)
    elif is_first:
        total.copy_(part)
    else:
        # torch would widen the whole part before adding: a copy twice its size.
        pieces = (torch.split(each.view(-1), _AT_ONCE) for each in (total, part.contiguous()))
        for into, narrow in zip(*pieces, strict=True):
            into.add_(narrow)


class LazyBuffer:
    """A flat float32 tensor that is allocated on first use and freed at the end of the step.

    Gradients appear when backward has freed activations. If they outlived their step, they would add to the activations
    of the next one, at the peak of memory.
    """

    def __init__(self, numel: int, device: torch.device, buffers: SumBuffers) -> None:
        self.numel, self._device, self._buffers = numel, device, buffers
        self._tensor: torch.Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether it is allocated."""
        return self._tensor is not None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor; uninitialised when it is new."""
        if self._tensor is None:
            self._tensor = self._buffers.take(self.numel, torch.float32, self._device)
        return self._tensor

    def give_up(self) -> None:
        """End the step: the memory is reused, unless a gradient in it is still referenced."""
        if self._tensor is not None:
            if self._buffers.is_seen(self._tensor):
                self._buffers.leave(self._tensor)
            self._buffers.give(self._tensor)
            self._tensor = None

    def abandon(self) -> None:
        """Drop an interrupted step: the memory is not reused, since transfers in flight may write to it."""
        if self._tensor is not None:
            self._buffers.leave(self._tensor)
        self.give_up()


class Accumulator(LazyBuffer):
    """A sum of which this rank adds up one piece, lane by lane in order; other ranks add the others."""

    def __init__(
        self, numel: int, device: torch.device, buffers: SumBuffers, *, pieces: int = 1, piece: int = 0
    ) -> None:
        super().__init__(numel, device, buffers)
        self._pieces, self._piece = pieces, piece
        self._is_fresh = True

    @property
    def mine(self) -> torch.Tensor:
        """The piece of this rank."""
        return self.tensor.view(self._pieces, -1)[self._piece]

    def give_up(self) -> None:
        """End the step."""
        super().give_up()
        self._is_fresh = True

    def add(self, part: torch.Tensor) -> None:
        """Add the next lane's part, of any type."""
        put(self.mine, part, is_first=self._is_fresh)
        self._is_fresh = False
