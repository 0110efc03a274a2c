"""One rank's lanes, turn by turn, with what comes next looked up in blocks.

A reader that takes every n-th turn looks up just those: n workers share the work of looking up, none does it twice. The
first block is one lane, so that a restart costs one lane's look-up wherever it stands; later ones grow.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from unbroken.data.assemble import Rows
from unbroken.data.lanes import Lanes
from unbroken.data.stream import Looked, Stream

# What a look-up costs beside its samples is small at this size, and what it holds stays small too: windows are counted
# by tokens, so long sequences come in smaller blocks.
BLOCK_TOKENS: Final = 1 << 22
_GROWTH: Final = 8


@dataclass(frozen=True)
class _Block:
    """Turns ``first``, ``first + stride`` … as they were looked up."""

    first: int
    stride: int
    turns: int
    looked: Looked
    accounts: list[list[int]]

    def place(self, turn: int) -> int | None:
        """Which of the block's turns a turn is."""
        nth, rest = divmod(turn - self.first, self.stride)
        return nth if rest == 0 and 0 <= nth < self.turns else None


class LaneReader:
    """Reads the turns of some lanes; turn 0 is the first lane of the step that begins at sample ``start``.

    Args:
        stream: what is read.
        lanes: whose lanes.
        start: the first sample of the step that turn 0 belongs to.
        turns: how many turns there are; None: no end.
    """

    def __init__(self, stream: Stream, lanes: Lanes, start: int, turns: int | None) -> None:
        self.stream = stream
        self.lanes = lanes
        self.start = start
        self.turns = turns
        self._block: _Block | None = None

    def read(self, turn: int, *, stride: int = 1) -> tuple[Rows, int, int]:
        """One lane, and the two words of its account; ``stride`` says which turn is likely to be asked for next.

        Raises:
            IndexError: there is no such turn.
            SequenceDamaged, ShardDamaged: as ``Stream.rows`` does.
        """
        block, place = self._block, None
        if block is not None and block.stride == stride:
            place = block.place(turn)
        if block is None or place is None:
            block, place = self._next_block(turn, stride), 0
        first, last = place * self.lanes.size, (place + 1) * self.lanes.size
        low, high = block.accounts[place]
        return self.stream.rows(block.looked, first, last), low, high

    def _next_block(self, turn: int, stride: int) -> _Block:
        before = self._block
        follows = before is not None and before.stride == stride and turn == before.first + before.turns * stride
        wanted = before.turns * _GROWTH if before is not None and follows else 1
        largest = BLOCK_TOKENS // (self.lanes.size * self.stream.max_length)
        turns = max(min(wanted, largest), 1)
        if self.turns is not None:
            if not 0 <= turn < self.turns:
                raise IndexError(f"turns are 0 to {self.turns - 1}, not {turn}")
            turns = min(turns, -(-(self.turns - turn) // stride))
        samples = self.lanes.samples(turn + stride * np.arange(turns, dtype=np.int64), self.start)
        looked = self.stream.look_up(samples)
        accounts = looked.identities.reshape(turns, self.lanes.size, 2).sum(axis=1, dtype=np.uint64).tolist()
        self._block = _Block(turn, stride, turns, looked, accounts)
        return self._block
