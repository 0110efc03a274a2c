"""Sums in float32 of what comes in any type, and the memory they are kept in."""

from typing import Any

import torch

# ---- memory ----

# torch tells it to nobody else; its own CUDA graphs ask in the same way whether a result is still looked at.
_use_count: Any = torch._C._storage_Use_Count


class Buffers:
    """Flat tensors that were used and wait to be used again."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}

    @property
    def held(self) -> int:
        """How many bytes are kept, lent ones included."""
        return sum(each.nbytes for each in (*self._free, *self._lent.values()))

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor with anything in it."""
        # An empty one has no address by which it could be known when it is given back.
        if device.type != "cpu" or not numel:
            return torch.empty(numel, dtype=dtype, device=device)
        alike = sorted((each for each in self._free if each.dtype == dtype), key=torch.Tensor.numel)
        chosen = next((each for each in alike if each.numel() >= numel), None)
        # One that is too small goes for the one that is made in its place: else every size would have its own for ever.
        spent = chosen if chosen is not None else alike[-1] if alike else None
        self._free = [each for each in self._free if each is not spent]
        if chosen is None:
            del alike, spent
            chosen = torch.empty(numel, dtype=dtype)
        self._lent[chosen.data_ptr()] = chosen
        return chosen[:numel]

    def give(self, *used: torch.Tensor) -> None:
        """Nobody looks at these any more."""
        for each in used:
            if each.is_cpu and (whole := self._lent.pop(each.data_ptr(), None)) is not None:
                self._free.append(whole)

    def leave(self, *used: torch.Tensor) -> None:
        """Somebody may still look at these, or write into them: the memory is theirs."""
        for each in used:
            self._lent.pop(each.data_ptr(), None)

    def is_seen(self, lent: torch.Tensor) -> bool:
        """Whether anybody holds a view of this tensor beside the one it was lent to."""
        # The memory that is kept here, the tensor that was lent, and the object that is asked.
        own = 3
        return lent.data_ptr() in self._lent and _use_count(lent.untyped_storage()._cdata) > own

    def clear(self) -> None:
        """Forget all, those too that were never given back."""
        self._free.clear()
        self._lent.clear()


# ---- sums ----

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
        from unbroken.exact.cuda_sums import put_widened_

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
