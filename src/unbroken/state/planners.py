"""Who writes which piece of a checkpoint: the protocol of a save planner, the usual one, and one that learns.

A replicated tensor is held by several ranks, and any of them may write it; a shard has one holder. A planner chooses on
rank 0 alone. Which rank wrote a piece has no effect on what is saved, nor on who can load it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, runtime_checkable

from unbroken.errors import TensorUnsupported
from unbroken.state.index import DTYPES, Box


class Piece(NamedTuple):
    """One box of one tensor, as one rank writes it."""

    name: str
    dtype: str
    box: Box

    @property
    def size_bytes(self) -> int:
        """How many bytes its elements have."""
        return self.box.elements * DTYPES[self.dtype].itemsize


Holders = Mapping[Piece, Sequence[int]]


@runtime_checkable
class SavePlanner(Protocol):
    """Chooses the writer of each piece; passed as ``Settings(planner=...)``, the same kind on every rank.

    Both methods are called on rank 0 alone, and never at the same time.
    """

    def writers(self, holders: Holders, load: Sequence[int]) -> Mapping[Piece, int]:
        """For each piece that several ranks hold, one of them. Called when there is no plan or the state has changed.

        ``load`` has for each rank the bytes that it writes in any case, because no other rank holds them.
        """

    def learn(self, written: Sequence[tuple[int, float]]) -> bool:
        """Take the bytes and the seconds that each rank wrote in a save; returns whether to plan the next one anew."""


@dataclass(frozen=True)
class BalanceBytes:
    """All ranks write about as many bytes: the largest piece first, each to the holder with the least so far."""

    def writers(self, holders: Holders, load: Sequence[int]) -> Mapping[Piece, int]:
        """One holder for each piece."""
        return dict(_least_loaded(holders, load, [1.0] * len(load)))

    def learn(self, written: Sequence[tuple[int, float]]) -> bool:
        """Nothing: bytes are known beforehand."""
        return False


@dataclass
class BalanceTime:
    """All ranks write for about as long: a rank with a slow disk or a slow network gets fewer bytes.

    The speed of each rank is measured in every save. A save whose slowest rank took more than ``tolerance`` times the
    average makes the next one be planned anew. The first save is balanced by bytes.
    """

    tolerance: float = 1.25
    bytes_per_s: list[float] = field(default_factory=list)

    def writers(self, holders: Holders, load: Sequence[int]) -> Mapping[Piece, int]:
        """One holder for each piece, by the measured speeds."""
        speeds = self.bytes_per_s if len(self.bytes_per_s) == len(load) else [1.0] * len(load)
        return dict(_least_loaded(holders, load, speeds))

    def learn(self, written: Sequence[tuple[int, float]]) -> bool:
        """Take the measured speeds; True if the ranks took unequally long."""
        known = [size / seconds for size, seconds in written if size and seconds > 0]
        if not known:
            return False
        # A rank that wrote nothing has not been measured.
        usual = sum(known) / len(known)
        self.bytes_per_s = [size / seconds if size and seconds > 0 else usual for size, seconds in written]
        times = [seconds for _, seconds in written]
        return max(times) > self.tolerance * sum(times) / len(times)


DEFAULT: Final[SavePlanner] = BalanceBytes()


def _least_loaded(holders: Holders, load: Sequence[int], speeds: Sequence[float]) -> Iterator[tuple[Piece, int]]:
    busy_s = [size / speed for size, speed in zip(load, speeds, strict=True)]
    sizes = {piece: piece.size_bytes for piece in holders}
    for piece, ranks in sorted(holders.items(), key=lambda found: -sizes[found[0]]):
        # An empty one has to be written too.
        size = max(sizes[piece], 1)
        chosen = min(ranks, key=lambda rank: (busy_s[rank] + size / speeds[rank], rank))
        busy_s[chosen] += size / speeds[chosen]
        yield piece, chosen


def require_holders(chosen: Mapping[Piece, int], holders: Holders) -> None:
    """Pass if a planner gave every piece to a rank that holds it.

    Raises:
        TensorUnsupported: it did not; names the piece.
    """
    for piece, ranks in holders.items():
        if chosen.get(piece) not in ranks:
            given = f"rank {chosen[piece]}" if piece in chosen else "no rank"
            reason = f"the save planner gave it to {given}; it is held by {', '.join(map(str, ranks))}"
            raise TensorUnsupported(name=piece.name, reason=reason)
