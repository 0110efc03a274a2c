"""A faster tokenizer engine, checked against the reference on samples.

Uses ``gigatoken`` if it is installed and supports the tokenizer. The first documents of every shard and a keyed sample
of the others are encoded by both. A document that contains the text of a control token always goes to the reference,
because the engine would encode it as the token. After one difference the caller drops the engine for everything.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from unbroken.data.ingest.documents import DocumentBatch
from unbroken.data.ingest.encoders import Encoded, Encoder, ReferenceEncoder
from unbroken.store.digest import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

ENGINE: Final = "gigatoken"
# The reference is some 35 times slower: one document in 1,024 costs the engine 4 % of its speed.
_ONE_IN: Final = 1024
_SAMPLE_CHARACTERS: Final = 1 << 14
_HARD_TEXTS: Final = (
    "It's 12,345.67 don't  \t\n\n  you'LL\r\n",
    "naïve café — 東京タワー 🙂👩‍👩‍👧 Ω≈ç√ \u00a0\u200b\ufeff",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # ok\n\n\n\n\t\tend",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!????????______====//////\x00\x7f",
    "مرحبا שלום हिन्दी ไทย e\u0301 \u1100\u1161\u11a8 Ⅷ ² ½ ﬁ",
)


class EnginesDiffer(Exception):
    """The engine and the reference gave different ids for a document; ``str`` says which."""


class FastEngine:
    """The engine; documents with control text go to the reference, and ``check`` compares the two."""

    def __init__(self, reference: ReferenceEncoder, content: bytes) -> None:
        import gigatoken

        self.identity = reference.identity
        self.control = reference.control
        self._reference = reference
        self._control_texts = tuple(text.encode() for text in reference.control_texts)
        self._control_ids = np.array(sorted(reference.control), np.uint32)
        self._engine = gigatoken.Tokenizer.from_json(content)

    def encode(self, batch: DocumentBatch) -> Encoded:
        """The ids of each document."""
        found = self._by_engine(batch.encoded)
        numbers = sorted(self._with_control_text(batch.encoded) | self._with_control_id(found))
        if not numbers:
            return found
        return _merged(found, numbers, self._reference.encode_texts([batch.texts[n] for n in numbers]))

    def check(self, batch: DocumentBatch, found: Encoded, firsts: "Iterable[int]") -> None:
        """Compare with the reference on ``firsts`` and on a sample of the documents, drawn by their bytes.

        Raises:
            EnginesDiffer: the ids differ.
        """
        drawn = (number for number, document in enumerate(batch.encoded) if _is_drawn(document))
        numbers = sorted({*firsts, *drawn})
        whole = [number for number in numbers if len(batch.texts[number]) <= _SAMPLE_CHARACTERS]
        self._require_same([found.of(number) for number in whole], [batch.texts[number] for number in whole])
        # Of a long document only the beginning is compared, encoded again by both.
        heads = [batch.texts[n][:_SAMPLE_CHARACTERS] for n in numbers if len(batch.texts[n]) > _SAMPLE_CHARACTERS]
        heads = [head for head in heads if not any(text.decode() in head for text in self._control_texts)]
        if heads:
            again = self._by_engine([head.encode() for head in heads])
            self._require_same([again.of(number) for number in range(len(heads))], heads)

    def _require_same(self, rows: "Sequence[NDArray[np.uint32]]", texts: list[str]) -> None:
        if not texts:
            return
        right = self._reference.encode_texts(texts)
        for number, row in enumerate(rows):
            if not np.array_equal(row, right.of(number)):
                raise EnginesDiffer(f"{ENGINE} gives other ids for the text that begins with {texts[number][:40]!r}")

    def _by_engine(self, encoded: "Sequence[bytes]") -> Encoded:
        layout: Any = self._engine.encode_batch(list(encoded), parallel=False).layout
        offsets: NDArray[np.int64] = np.asarray(layout.offsets.data, np.int64)
        return Encoded(np.asarray(layout.content.data, np.uint32)[offsets[0] : offsets[-1]], offsets - offsets[0])

    def _with_control_text(self, encoded: "Sequence[bytes]") -> set[int]:
        found = set[int]()
        everything = b"\0".join(encoded)
        for text in self._control_texts:
            if text in everything:
                found.update(number for number, document in enumerate(encoded) if text in document)
        return found

    def _with_control_id(self, found: Encoded) -> set[int]:
        # After normalisation, a tokenizer may find a control token in text that is spelled differently.
        places = np.flatnonzero(np.isin(found.ids, self._control_ids))
        return set((np.searchsorted(found.offsets, places, side="right") - 1).tolist())


def _is_drawn(document: bytes) -> bool:
    # Drawn by its own bytes: independent of batch, worker and order.
    return int.from_bytes(digest_bytes(document)[:4], "little") % _ONE_IN == 0


def _merged(found: Encoded, numbers: "Sequence[int]", instead: Encoded) -> Encoded:
    """The ids with those of some documents replaced."""
    rows: list[NDArray[np.uint32]] = []
    before = 0
    for place, number in enumerate(numbers):
        rows += [found.ids[found.offsets[before] : found.offsets[number]], instead.of(place)]
        before = number + 1
    rows.append(found.ids[found.offsets[before] :])
    lengths = found.lengths
    lengths[list(numbers)] = instead.lengths
    return Encoded(np.concatenate(rows), np.concatenate([[0], np.cumsum(lengths)]))


def with_fast_engine(encoder: Encoder, content: bytes | None) -> Encoder:
    """The fast engine for an encoder, or the encoder itself if there is none."""
    if content is None or not isinstance(encoder, ReferenceEncoder):
        return encoder
    return find_fast_engine(encoder, content).accelerator or encoder


@dataclass(frozen=True)
class EngineChoice:
    """The fast engine for a tokenizer, or None, and why."""

    accelerator: FastEngine | None
    reason: str


def find_fast_engine(reference: ReferenceEncoder, content: bytes) -> EngineChoice:
    """Find an engine that gives the reference's ids for a few hard texts."""
    batch = DocumentBatch()
    for text in _HARD_TEXTS:
        batch.add(text, 0)
    try:
        engine = FastEngine(reference, content)
        engine.check(batch, engine.encode(batch), range(len(_HARD_TEXTS)))
    except ImportError:
        return EngineChoice(None, f"{ENGINE} is not installed")
    except EnginesDiffer as difference:
        return EngineChoice(None, f"{ENGINE} differs from the reference: {difference}")
    # The engine raises exceptions of any type for a tokenizer it does not support.
    except Exception as refusal:  # noqa: BLE001
        return EngineChoice(None, f"{ENGINE} does not support this tokenizer: {' '.join(str(refusal).split())[:120]}")
    return EngineChoice(engine, f"{ENGINE} gives the same ids as the reference")
