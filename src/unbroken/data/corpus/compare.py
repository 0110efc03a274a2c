"""Compare a corpus with the shards a run was trained on.

A run keeps a compact record of every shard. ``compare`` names each shard that is changed, missing or new, says what is
different and, if known, whether its documents were already served. It sees what the corpus was opened with: after the
quick check, a ``.bin`` whose bytes changed under the same size and list looks unchanged; after the full check it does
not.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unbroken.data.corpus.catalogue import Corpus, Shard
from unbroken.errors import DataChanged, ShardChange
from unbroken.errors.data import ServedShare
from unbroken.quoting.amounts import plural
from unbroken.store.fields import Malformed

ServedOf = Callable[[str, str], ServedShare | None]
Key = tuple[str, str]


@dataclass(frozen=True)
class RecordedShard:
    """The record of a shard; ``bin_digest`` is None if it had no checksum."""

    bucket: str
    name: str
    entries: int
    tokens: int
    token_bytes: int
    index_digest: str
    bin_digest: str | None

    @property
    def key(self) -> Key:
        """What identifies a shard within a corpus."""
        return self.bucket, self.name


def recorded(shards: Iterable[Shard]) -> tuple[RecordedShard, ...]:
    """The records of some shards."""
    return tuple(
        RecordedShard(
            shard.bucket,
            shard.name,
            shard.entries,
            shard.tokens,
            shard.token_bytes,
            shard.index_digest,
            shard.bin_digest,
        )
        for shard in shards
    )


def to_json(shards: Iterable[RecordedShard]) -> dict[str, list[list[Any]]]:
    """The records as JSON: for each bucket, a short list per shard."""
    found: dict[str, list[list[Any]]] = {}
    for shard in shards:
        row = [shard.name, shard.entries, shard.tokens, shard.token_bytes, shard.index_digest, shard.bin_digest]
        found.setdefault(shard.bucket, []).append(row)
    return found


def from_json(value: object) -> tuple[RecordedShard, ...]:
    """The records from the JSON of ``to_json``.

    Raises:
        Malformed: it is something else.
    """
    if not isinstance(value, Mapping):
        raise Malformed("the record of the data is not an object")
    return tuple(_from_row(bucket, row) for bucket, rows in value.items() for row in _rows(bucket, rows))


def _rows(bucket: object, rows: object) -> Sequence[object]:
    if not isinstance(bucket, str) or not isinstance(rows, (list, tuple)):
        raise Malformed(f"the record of bucket {bucket!r} is not a list")
    return rows


def _from_row(bucket: str, row: object) -> RecordedShard:
    match row:
        case [str(name), int(entries), int(tokens), int(token_bytes), str(index_digest), (str() | None) as bin_digest]:
            return RecordedShard(bucket, name, entries, tokens, token_bytes, index_digest, bin_digest)
    raise Malformed(f"the record of a shard of bucket {bucket!r} is not [name, entries, tokens, bytes, digest, digest]")


@dataclass(frozen=True)
class Changes:
    """How a corpus differs from the record; false if it does not."""

    changed: tuple[ShardChange, ...] = ()
    missing: tuple[ShardChange, ...] = ()
    added: tuple[ShardChange, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changed or self.missing or self.added)

    @property
    def is_growth(self) -> bool:
        """Whether shards were added and nothing else is different."""
        return bool(self.added) and not self.changed and not self.missing

    def as_error(self, path: Path) -> DataChanged:
        """The error that names them all."""
        return DataChanged(path=path, changed=self.changed, missing=self.missing, added=self.added)


def compare(known: Iterable[RecordedShard], corpus: Corpus, served: ServedOf | None = None) -> Changes:
    """Every shard that differs from the record.

    Args:
        known: the recorded shards.
        corpus: the data as it is now.
        served: from bucket and name of a shard to how much of it the run has served.
    """
    before = {shard.key: shard for shard in known}
    after = {shard.key: shard for shard in recorded(corpus.shards)}
    names_before, names_after = _names_by_bytes(before.values()), _names_by_bytes(after.values())

    def change(key: Key, difference: str) -> ShardChange:
        return ShardChange(*key, difference, served(*key) if served and key in before else None)

    return Changes(
        changed=tuple(
            change(key, difference)
            for key in sorted(before.keys() & after.keys())
            if (difference := _difference(before[key], after[key], names_before))
        ),
        missing=tuple(
            change(key, _absence(before[key], names_after, after)) for key in sorted(before.keys() - after.keys())
        ),
        added=tuple(change(key, f"is new, {_size(after[key])}") for key in sorted(after.keys() - before.keys())),
    )


def _difference(before: RecordedShard, after: RecordedShard, names_before: Mapping[Key, Key]) -> str | None:
    """How a shard that still exists differs; None if it does not."""
    are_proven = before.bin_digest is not None and after.bin_digest is not None
    if before.index_digest == after.index_digest and (not are_proven or before.bin_digest == after.bin_digest):
        return None
    other = names_before.get(_bytes_key(after))
    if other is not None and other != before.key:
        return f"holds what was {'/'.join(other)}"
    if before.token_bytes != after.token_bytes:
        return f"has ids of {after.token_bytes} bytes, had ids of {before.token_bytes}"
    if before.tokens != after.tokens:
        return f"has {_size(after)}, had {_size(before)}"
    if before.index_digest != after.index_digest:
        return (
            f"has other boundaries: {plural(after.entries, 'document')}, {before.entries:,} before, in as many tokens"
        )
    return "has other tokens under the same index"


def _absence(before: RecordedShard, names_after: Mapping[Key, Key], after: Mapping[Key, RecordedShard]) -> str:
    other = names_after.get(_bytes_key(before))
    return (
        "is missing"
        if other is None or other not in after
        else f"is missing; the same shard exists as {'/'.join(other)}"
    )


def _bytes_key(shard: RecordedShard) -> Key:
    return shard.index_digest, shard.bin_digest or ""


def _names_by_bytes(shards: Iterable[RecordedShard]) -> dict[Key, Key]:
    """The name of each content that occurs once."""
    shards = list(shards)
    counts = Counter(_bytes_key(shard) for shard in shards)
    return {_bytes_key(shard): shard.key for shard in shards if counts[_bytes_key(shard)] == 1}


def _size(shard: RecordedShard) -> str:
    return f"{plural(shard.entries, 'document')} in {plural(shard.tokens, 'token')}"
