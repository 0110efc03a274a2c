"""``shards.json``: the list of shards in a folder, with a checksum of itself, in the envelope of a manifest.

It lists every shard with counts and digests, the tokenizer and the sources, and is written after the shards. Decoding
treats the file as hostile: nothing in it is executed, and a name in it can only lead to a file below its own folder.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.data.corpus.shards import MOST_ENTRIES, ShardRecord
from unbroken.errors import ShardDamaged, UnsafeName
from unbroken.files import LOCAL, Files
from unbroken.store.digest import ALGORITHM
from unbroken.store.envelope import canonical, from_canonical, opened, sealed
from unbroken.store.fields import Malformed, Table
from unbroken.store.names import require_safe

LISTING: Final = "shards.json"
FORMAT: Final = "unbroken.shards/1"
LIMIT_BYTES: Final = 1 << 30
_SCRATCH: Final = ".writing-shards.json"
_HEX: Final = re.compile(r"[0-9a-f]{32}")
_DIGEST: Final = re.compile(r"[0-9A-Za-z:._-]{1,256}")
_MOST_TOKENS: Final = 1 << 62
_BODY: Final = frozenset({"digest", "options", "shards", "sources", "tokenizer"})
_SHARD: Final = frozenset(
    {"bin_bytes", "bin_digest", "entries", "idx_bytes", "index_digest", "name", "token_bytes", "tokens"}
)
_TOKENIZER: Final = frozenset({"digest", "eod_id", "name", "vocab_size"})
_OPTIONS: Final = frozenset({"max_length", "overlap_size"})
_SOURCE: Final = frozenset({"digest", "documents", "name", "size_bytes", "skipped", "tokens"})


@dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer that made the ids: a name for display, a digest for comparison."""

    name: str
    digest: str
    vocab_size: int
    eod_id: int


@dataclass(frozen=True)
class BakedWindows:
    """The lengths of windows, if they were cut when the shards were written."""

    max_length: int
    overlap_size: int


@dataclass(frozen=True)
class SourceRecord:
    """One source file of the shards; ``skipped`` counts documents by reason."""

    name: str
    size_bytes: int
    digest: str
    documents: int
    tokens: int
    skipped: Mapping[str, int]


@dataclass(frozen=True)
class Listing:
    """The shards of one folder, sorted by name, and their origin."""

    shards: tuple[ShardRecord, ...]
    tokenizer: TokenizerIdentity | None
    baked: BakedWindows | None = None
    sources: tuple[SourceRecord, ...] = ()


def encode_listing(listing: Listing) -> bytes:
    """The bytes of ``shards.json``; equal listings give equal bytes."""
    tokenizer, baked = listing.tokenizer, listing.baked
    body = canonical(
        {
            "digest": ALGORITHM,
            "options": baked and {"max_length": baked.max_length, "overlap_size": baked.overlap_size},
            "shards": [_shard_to_json(shard) for shard in sorted(listing.shards, key=lambda shard: shard.name)],
            "sources": [_source_to_json(source) for source in sorted(listing.sources, key=lambda source: source.name)],
            "tokenizer": tokenizer and identity_to_json(tokenizer),
        }
    )
    return sealed(body, FORMAT)


def write_listing(files: Files, directory: Path, listing: Listing, *, by: str = "") -> None:
    """Write ``shards.json`` into a folder atomically and durably; an existing one is replaced.

    ``by`` is the name of this process, where several may write it.

    Raises:
        StorageFailed: an I/O error; the list is the old one or the new one, whole.
    """
    # crash here: the old list or the new one; a scratch file may be left, which the next writer removes.
    files.replace(directory / LISTING, encode_listing(listing), scratch=_SCRATCH + by)


def read_listing(path: Path, files: Files = LOCAL) -> Listing:
    """Read a ``shards.json`` and verify its checksum.

    Raises:
        ShardDamaged: it is damaged, of another version, or a name in it leads out of the folder.
        StorageFailed: an I/O error, or the file does not exist.
    """
    try:
        return decode_listing(files.read_bytes(path, limit_bytes=LIMIT_BYTES))
    except UnsafeName as refused:
        complaint = f"unsafe name {refused.name!r}: {refused.reason}"
        raise ShardDamaged(path=path, complaint=complaint) from refused
    except (ValueError, OverflowError, RecursionError, Malformed) as wrong:
        raise ShardDamaged(path=path, complaint=" ".join(str(wrong).split())[:160]) from wrong


def decode_listing(data: bytes) -> Listing:
    """The listing in the bytes of a ``shards.json``.

    Raises:
        Malformed: the bytes are damaged.
        ValueError: the body is not JSON.
        UnsafeName: a shard's name leads out of the folder.
    """
    found = from_canonical(_proven_body(data))
    table = Table(found, "the list")
    table.only(_BODY)
    table.one_of("digest", (ALGORITHM,))
    return Listing(
        shards=_shards(table.rows("shards")),
        tokenizer=None if found.get("tokenizer") is None else identity_from_json(table.table("tokenizer")),
        baked=None if found.get("options") is None else _baked(Table(table.table("options"), "options")),
        sources=tuple(_source(row) for row in table.rows("sources")),
    )


def identity_to_json(tokenizer: TokenizerIdentity) -> dict[str, Any]:
    """A tokenizer's identity as JSON."""
    return {
        "digest": tokenizer.digest,
        "eod_id": tokenizer.eod_id,
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
    }


def identity_from_json(value: Mapping[str, Any]) -> TokenizerIdentity:
    """A tokenizer's identity from JSON.

    Raises:
        Malformed: it is not one.
    """
    table = Table(value, "tokenizer")
    table.only(_TOKENIZER)
    vocab_size = table.whole("vocab_size", below=1 << 32)
    return TokenizerIdentity(
        name=table.text("name"),
        digest=table.matching("digest", _DIGEST),
        vocab_size=vocab_size,
        eod_id=table.whole("eod_id", below=vocab_size),
    )


def _proven_body(data: bytes) -> bytes:
    found = opened(data)
    if found is None:
        raise Malformed(f"its {len(data):,} bytes are not a list of shards")
    if found.form != FORMAT:
        raise Malformed(f"its format is {found.form}; this version reads {FORMAT}")
    if found.algorithm != ALGORITHM or not found.is_verified:
        raise Malformed("its bytes do not match its own checksum")
    return found.body


def _shard_to_json(shard: ShardRecord) -> dict[str, Any]:
    return {
        "bin_bytes": shard.bin_bytes,
        "bin_digest": shard.bin_digest,
        "entries": shard.entries,
        "idx_bytes": shard.idx_bytes,
        "index_digest": shard.index_digest,
        "name": shard.name,
        "token_bytes": shard.token_bytes,
        "tokens": shard.tokens,
    }


def _shards(rows: Sequence[Table]) -> tuple[ShardRecord, ...]:
    shards = tuple(_shard(row) for row in rows)
    names = [shard.name for shard in shards]
    if names != sorted(set(names)):
        raise Malformed("its shards are not sorted by name, each once")
    return shards


def _shard(row: Table) -> ShardRecord:
    row.only(_SHARD)
    name = require_safe(row.text("name"))
    if any(piece.startswith(".") for piece in name.split("/")):
        raise Malformed(f"the name {name!r} is hidden")
    token_bytes = row.whole("token_bytes")
    if token_bytes not in (2, 4):
        raise Malformed(f"shard {name!r} has {token_bytes} bytes per token")
    shard = ShardRecord(
        name=name,
        entries=row.whole("entries", below=MOST_ENTRIES + 1),
        tokens=row.whole("tokens", below=_MOST_TOKENS),
        token_bytes=token_bytes,
        bin_digest=row.matching("bin_digest", _HEX),
        index_digest=row.matching("index_digest", _HEX),
    )
    if (row.whole("bin_bytes"), row.whole("idx_bytes")) != (shard.bin_bytes, shard.idx_bytes):
        raise Malformed(f"shard {name!r} has counts and sizes that do not agree")
    return shard


def _baked(options: Table) -> BakedWindows:
    options.only(_OPTIONS)
    return BakedWindows(options.whole("max_length"), options.whole("overlap_size"))


def _source_to_json(source: SourceRecord) -> dict[str, Any]:
    return {
        "digest": source.digest,
        "documents": source.documents,
        "name": source.name,
        "size_bytes": source.size_bytes,
        "skipped": dict(source.skipped),
        "tokens": source.tokens,
    }


def _source(row: Table) -> SourceRecord:
    row.only(_SOURCE)
    skipped = Table(row.table("skipped"), "skipped")
    return SourceRecord(
        name=row.text("name"),
        size_bytes=row.whole("size_bytes"),
        digest=row.matching("digest", _DIGEST),
        documents=row.whole("documents"),
        tokens=row.whole("tokens"),
        skipped={reason: skipped.whole(reason) for reason in row.table("skipped")},
    )
