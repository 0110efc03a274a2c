"""Exactly-once accounting: a sum that only the right samples, each served once, can give.

Every sample has an identity, 128 bits mixed from its number, its bucket, the group it stands in and its sequence there.
A loader adds up the identities of what it handed out; ranks add up theirs. The stream can say at any time what the sum
over samples 0 to k must be. A sample left out, served twice, or drawn from other data makes the two differ; the order
within the sum does not matter, so the sum is the same on any number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from unbroken.data.order.keyed import mix64

_WORD: Final = 1 << 64
_HEX: Final = 16
_STARTS: Final = np.array([[0x5851F42D4C957F2D], [0x14057B7EF767814F]], np.uint64)
_BLOCK: Final = 1 << 14

Identities = Callable[[NDArray[np.int64]], NDArray[np.uint64]]


@dataclass(frozen=True)
class Served:
    """How many samples were served, and the sum of their identities in two words."""

    samples: int = 0
    low: int = 0
    high: int = 0

    def __add__(self, other: "Served") -> "Served":
        return Served(self.samples + other.samples, (self.low + other.low) % _WORD, (self.high + other.high) % _WORD)

    @property
    def digest(self) -> str:
        """The sum, in hex."""
        return f"{self.high:0{_HEX}x}{self.low:0{_HEX}x}"

    def as_json(self) -> dict[str, Any]:
        """For a state or a record."""
        return {"samples": self.samples, "digest": self.digest}

    @classmethod
    def from_json(cls, value: Any) -> "Served":  # noqa: ANN401 - whatever a record held
        """The same, read back.

        Raises:
            ValueError: it is no such record.
        """
        try:
            samples, digest = value["samples"], value["digest"]
            words = int(digest[:_HEX], 16), int(digest[_HEX:], 16)
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"no account of served samples: {value!r}") from None
        if type(samples) is not int or samples < 0 or len(digest) != 2 * _HEX:
            raise ValueError(f"no account of served samples: {value!r}")
        return cls(samples, words[1], words[0])


def identify(
    samples: NDArray[np.int64], group_keys: NDArray[np.uint64], sequences: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The identities of samples as ``[samples, 2]``; the key of a group stands for its bucket too."""
    mixed = mix64(samples.astype(np.uint64) + _STARTS)
    mixed = mix64(mixed ^ group_keys)
    return mix64(mixed ^ sequences.astype(np.uint64)).T


def add_up(identities: NDArray[np.uint64]) -> Served:
    """The account of some samples."""
    low, high = identities.sum(axis=0, dtype=np.uint64).tolist()
    return Served(len(identities), low, high)


def expected(identities: Identities, first: int, last: int) -> Served:
    """What serving the samples ``first`` to ``last`` once each must add up to, as ``Stream.identities`` says."""
    total = Served()
    for start in range(first, last, _BLOCK):
        total += add_up(identities(np.arange(start, min(start + _BLOCK, last), dtype=np.int64)))
    return total


class Proof:
    """Holds an account to what the stream says, from the account of a job's start on: each sample is looked up once.

    Args:
        identities: ``Stream.identities_apart()``, which nobody else asks.
        position: the samples served when the job began.
        served: the account of them, which the checkpoint it goes on from has kept.
    """

    def __init__(self, identities: Identities, position: int, served: Served) -> None:
        self._identities = identities
        self._position = position
        self._expected = served
        self._agrees = served.samples == position

    def holds(self, served: Served, position: int) -> bool:
        """Whether an account is that of each sample up to a position, once; after a no it is never yes again."""
        self._expected += expected(self._identities, self._position, position)
        self._position = position
        self._agrees = self._agrees and served == self._expected
        return self._agrees
