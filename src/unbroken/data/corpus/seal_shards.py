"""Write ``shards.json`` for a folder of shards that another tool wrote, so that its bytes can be verified."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from unbroken.data.corpus.folders import ShardFiles, walk
from unbroken.data.corpus.listing import LISTING, Listing, TokenizerIdentity, write_listing
from unbroken.data.corpus.shards import (
    BIN_SUFFIX,
    IDX_SUFFIX,
    ShardRecord,
    bin_complaint,
    open_index,
    read_content,
    token_bytes_for,
)
from unbroken.errors import DataDamaged, DataMissing, Help, PathMissing, ShardDamaged, WouldOverwrite
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files

_THREADS: Final = 8


def seal_shards(
    directory: Path,
    tokenizer: TokenizerIdentity | None,
    files: Files = LOCAL,
    *,
    progress: Callable[[int], None] | None = None,
) -> Listing:
    """Read every byte of the shards in a folder and below it, and list them in a new ``shards.json``.

    Args:
        directory: a bucket's folder, or a split's.
        tokenizer: the tokenizer that made the ids, if known; ids beyond its vocabulary are an error.
        files: the storage of the list.
        progress: called with the bytes of each ``.bin`` that was read.

    Raises:
        PathMissing: the folder does not exist.
        DataMissing: it holds no shards.
        DataDamaged: shards are damaged; all are named.
        WouldOverwrite: it, or a folder in it, already has a list.
        TokenizationUnfinished: a tokenization into this folder is unfinished.
        StorageFailed: an I/O error.
    """
    if not directory.is_dir():
        raise PathMissing(path=directory, purpose="folder of shards")
    found = walk(directory, follows_buckets=False)
    if found.listings:
        listed = directory / found.listings[0]
        remedy = Help(f"unbroken data verify {quoted(listed)}", "verify the shards against the existing list")
        raise WouldOverwrite(path=listed / LISTING, remedy=remedy)
    if not found.stems:
        raise DataMissing(path=directory, lacks=f"no {IDX_SUFFIX} file in it or below it")
    findings = _halves(found)

    def read(name: str) -> ShardRecord | str:
        record = _record(directory, name, tokenizer)
        if progress and isinstance(record, ShardRecord):
            progress(record.bin_bytes)
        return record

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="unbroken-seal") as pool:
        records = list(pool.map(read, sorted(found.pairs)))
    findings += [record for record in records if isinstance(record, str)]
    if findings:
        raise DataDamaged(path=directory, findings=tuple(sorted(findings)))
    _sync(files, directory, found)
    listing = Listing(tuple(record for record in records if isinstance(record, ShardRecord)), tokenizer)
    write_listing(files, directory, listing)
    return listing


def _halves(found: ShardFiles) -> list[str]:
    return [
        *(f"{name}: not a regular file" for name in found.irregular),
        *(f"{name}{IDX_SUFFIX}: its {BIN_SUFFIX} is missing" for name in found.lone_indexes),
        *(f"{name}{BIN_SUFFIX}: its {IDX_SUFFIX} is missing" for name in found.lone_bins),
    ]


def _record(directory: Path, name: str, tokenizer: TokenizerIdentity | None) -> ShardRecord | str:
    """The entry of a shard for the list, or what is wrong with it."""
    try:
        index = open_index(directory / f"{name}{IDX_SUFFIX}")
        index.require_sound()
    except ShardDamaged as damaged:
        return f"{name}{IDX_SUFFIX}: {damaged.complaint}"
    bin_path = directory / f"{name}{BIN_SUFFIX}"
    if complaint := bin_complaint(bin_path, index):
        return f"{name}{BIN_SUFFIX}: {complaint}"
    if tokenizer and index.token_bytes != token_bytes_for(tokenizer.vocab_size):
        return (
            f"{name}{IDX_SUFFIX}: {index.token_bytes} bytes per token do not fit a vocabulary "
            f"of {tokenizer.vocab_size:,}"
        )
    content = read_content(bin_path, index)
    for complaint in content.complaints(None, tokenizer.vocab_size if tokenizer else None):
        return f"{name}{BIN_SUFFIX}: {complaint}"
    return ShardRecord(name, index.entries, index.tokens, index.token_bytes, content.digest, index.digest())


def _sync(files: Files, directory: Path, found: ShardFiles) -> None:
    """Sync the shards before they are listed: another tool may have left them in the page cache."""
    for name in sorted(found.pairs):
        files.sync_existing(directory / f"{name}{BIN_SUFFIX}")
        files.sync_existing(directory / f"{name}{IDX_SUFFIX}")
    for place in sorted({(directory / name).parent for name in found.pairs}):
        files.sync_directory(place)
