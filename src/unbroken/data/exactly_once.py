"""Exactly-once accounting: a sum over served samples that is right only if each sample was served once.

Every sample has a 128-bit identity, mixed from its number, its bucket, its group and its sequence in the group. Loaders
add up the identities of the samples they serve, over all ranks. The expected sum over samples 0 to k can be computed
from the stream at any time. A sample left out, served twice, or drawn from other data makes the two differ; the order
does not matter, so the sum is the same on any number of ranks.
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
    """The number of served samples, and the sum of their identities in two words."""

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
        """As JSON, for a state."""
        return {"samples": self.samples, "digest": self.digest}

    @classmethod
    def from_json(cls, value: Any) -> "Served":  # noqa: ANN401 - whatever a record held
        """From the JSON of ``as_json``.

        Raises:
            ValueError: it is something else.
        """
        try:
            samples, digest = value["samples"], value["digest"]
            words = int(digest[:_HEX], 16), int(digest[_HEX:], 16)
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"not a sum of served samples: {value!r}") from None
        if type(samples) is not int or samples < 0 or len(digest) != 2 * _HEX:
            raise ValueError(f"not a sum of served samples: {value!r}")
        return cls(samples, words[1], words[0])


def identify(
    samples: NDArray[np.int64], group_keys: NDArray[np.uint64], sequences: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """The identities of samples as ``[samples, 2]``; the key of a group includes its bucket."""
    mixed = mix64(samples.astype(np.uint64) + _STARTS)
    mixed = mix64(mixed ^ group_keys)
    return mix64(mixed ^ sequences.astype(np.uint64)).T


def add_up(identities: NDArray[np.uint64]) -> Served:
    """The sum over some samples."""
    low, high = identities.sum(axis=0, dtype=np.uint64).tolist()
    return Served(len(identities), low, high)


def expected(identities: Identities, first: int, last: int) -> Served:
    """The sum over the samples ``first`` to ``last``, each once; ``identities`` as of ``Stream.identities``."""
    total = Served()
    for start in range(first, last, _BLOCK):
        total += add_up(identities(np.arange(start, min(start + _BLOCK, last), dtype=np.int64)))
    return total


class ServedCheck:
    """Checks served sums against the stream, from the start of a job on; each sample is looked up once.

    Args:
        identities: ``Stream.identities_apart()``, used only here.
        position: the samples served when the job started.
        served: their sum, from the checkpoint it resumes from.
    """

    def __init__(self, identities: Identities, position: int, served: Served) -> None:
        self._identities = identities
        self._position = position
        self._expected = served
        self._agrees = served.samples == position

    def holds(self, served: Served, position: int) -> bool:
        """Whether a sum is that of each sample up to a position, once; after a mismatch it is always False."""
        self._expected += expected(self._identities, self._position, position)
        self._position = position
        self._agrees = self._agrees and served == self._expected
        return self._agrees
