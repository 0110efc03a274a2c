"""The shards' tokens as views of bytes, mapped when they are first asked for, a bounded number at a time."""

from collections.abc import Sequence
from typing import Final

from unbroken.data.assemble import PADDING
from unbroken.data.catalogue import Shard
from unbroken.data.shards import map_tokens

# A map holds a file open, and many systems allow a process no more than 1,024.
MOST: Final = 256


class TokenMaps(dict[int, memoryview]):
    """A view of each shard's bytes by its number; a missing one is mapped, and the one mapped first goes.

    A hit is the look-up of a plain dict. Whoever holds a slice of a view keeps its map alive.
    """

    def __init__(self, shards: Sequence[Shard], max_length: int) -> None:
        super().__init__()
        self._shards = shards
        self._zeros = memoryview(bytes(max_length * max((shard.token_bytes for shard in shards), default=0)))

    def __missing__(self, number: int) -> memoryview:
        if number == PADDING:
            view = self._zeros
        else:
            shard = self._shards[number]
            view = map_tokens(shard.bin_path, shard.index).data.cast("B")
        while len(self) >= MOST:
            del self[next(iter(self))]
        self[number] = view
        return view
