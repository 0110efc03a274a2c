"""Sums in float32 of what comes in any type, and the memory they are kept in."""

import torch

from unbroken.exact.buffers import Buffers

# Elements that are widened at a time.
_AT_ONCE = 1 << 18


@torch.no_grad()
def put(total: torch.Tensor, part: torch.Tensor | None, *, is_first: bool) -> None:
    """Add a part of any type to a float32 sum, None being zeros.

    The first one is copied, for -0.0 added to zero would become +0.0.
    """
    if part is None:
        total.zero_() if is_first else total.add_(0.0)
    elif part.dtype == total.dtype:
        total.copy_(part) if is_first else total.add_(part)
    elif part.is_cuda:
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.exact.kernels import put_widened_

        put_widened_(total, part, is_first=is_first)
    elif is_first:
        total.copy_(part)
    else:
        # torch widens the whole part before it adds: a copy twice as large as what has travelled.
        pieces = (torch.split(each.view(-1), _AT_ONCE) for each in (total, part.contiguous()))
        for into, narrow in zip(*pieces, strict=True):
            into.add_(narrow)


class Room:
    """A flat float32 tensor that is there from when it is first asked for until it is given up.

    A gradient comes when backward has freed activations. One that outlived its step would stand beside the activations
    of the next, where memory is scarcest.
    """

    def __init__(self, numel: int, device: torch.device, buffers: Buffers) -> None:
        self.numel, self._device, self._buffers = numel, device, buffers
        self._tensor: torch.Tensor | None = None

    @property
    def is_made(self) -> bool:
        """Whether it is there."""
        return self._tensor is not None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself; when it is new, with anything in it."""
        if self._tensor is None:
            self._tensor = self._buffers.take(self.numel, torch.float32, self._device)
        return self._tensor

    def give_up(self) -> None:
        """The step is over. The memory is used again, unless somebody still holds a gradient that lies in it."""
        if self._tensor is not None:
            if self._buffers.is_seen(self._tensor):
                self._buffers.leave(self._tensor)
            self._buffers.give(self._tensor)
            self._tensor = None

    def abandon(self) -> None:
        """The step was left in the middle. What is still under way may write into the memory: it is not used again."""
        if self._tensor is not None:
            self._buffers.leave(self._tensor)
        self.give_up()


class Accumulator(Room):
    """A sum of which one piece is added up here, fed with lanes in increasing order; others come from elsewhere."""

    def __init__(self, numel: int, device: torch.device, buffers: Buffers, *, pieces: int = 1, piece: int = 0) -> None:
        super().__init__(numel, device, buffers)
        self._pieces, self._piece = pieces, piece
        self._is_fresh = True

    @property
    def mine(self) -> torch.Tensor:
        """The piece that is added up here."""
        return self.tensor.view(self._pieces, -1)[self._piece]

    def give_up(self) -> None:
        """Forget the step."""
        super().give_up()
        self._is_fresh = True

    def add(self, part: torch.Tensor) -> None:
        """Add the next lane's part, of any type."""
        put(self.mine, part, is_first=self._is_fresh)
        self._is_fresh = False
