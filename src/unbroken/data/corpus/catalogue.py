"""The corpus: buckets of shards under one split of a data folder, all checked before any is used.

``open_corpus`` walks the folder, opens every index, compares sizes and digests with ``shards.json``, and reports all
problems at once. The quick check, made at every start, reads whole indexes but no ``.bin``: it finds a ``.bin`` whose
size changed, not one whose bytes did; the stream verifies those as it reads them. The full check reads every byte.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, get_args

from unbroken.data.corpus.folders import ShardFiles, require_finished, walk
from unbroken.data.corpus.listing import LISTING, Listing, TokenizerIdentity, read_listing
from unbroken.data.corpus.shards import (
    BIN_SUFFIX,
    IDX_SUFFIX,
    ShardIndex,
    ShardRecord,
    bin_complaint,
    open_index,
    read_content,
)
from unbroken.errors import DataDamaged, DataMissing, PathMissing, ShardDamaged, TokenizersDiffer
from unbroken.quoting.amounts import plural
from unbroken.store.digest import digest_of

__all__ = ["Bucket", "Check", "Corpus", "Shard", "TokenizerIdentity", "open_corpus"]

DEFAULT_BUCKET: Final = "default"
Check = Literal["quick", "full"]
_THREADS: Final = 8


@dataclass(frozen=True)
class Shard:
    """One shard of a corpus; ``name`` is its stem inside the bucket's folder, ``bin_digest`` is None if unknown."""

    bucket: str
    name: str
    directory: Path
    entries: int
    tokens: int
    token_bytes: int
    bin_bytes: int
    index_digest: str
    bin_digest: str | None

    @property
    def bin_path(self) -> Path:
        """The file of its tokens."""
        return self.directory / f"{self.name}{BIN_SUFFIX}"

    @property
    def idx_path(self) -> Path:
        """The file of its index."""
        return self.directory / f"{self.name}{IDX_SUFFIX}"

    @property
    def index(self) -> ShardIndex:
        """Its index, as it was when the corpus was opened."""
        return ShardIndex(self.idx_path, self.token_bytes, self.entries, self.tokens)


@dataclass(frozen=True)
class Bucket:
    """A named data source: its shards, sorted by name."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def entries(self) -> int:
        """Entries of all shards together."""
        return sum(shard.entries for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of all shards together."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class Corpus:
    """All buckets of one split, sorted by name; ``tokenizer`` is None if no list names it."""

    root: Path
    split: str
    buckets: tuple[Bucket, ...]
    tokenizer: TokenizerIdentity | None

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Every shard, bucket by bucket."""
        return tuple(shard for bucket in self.buckets for shard in bucket.shards)

    def digest(self) -> str:
        """A digest of what decides the order of samples: names, counts and index digests.

        It depends neither on the path of the folder nor on whether the ``.bin`` files have checksums: a folder that
        gets a ``shards.json`` later keeps its digest.
        """
        rows = (
            f"{shard.bucket}/{shard.name} {shard.entries} {shard.tokens} {shard.token_bytes} {shard.index_digest}\n"
            for shard in self.shards
        )
        return digest_of([f"{self.split}\n".encode(), *(row.encode() for row in rows)]).whole


def open_corpus(
    path: Path | str, split: str = "train", *, check: Check = "quick", vocab_size: int | None = None
) -> Corpus:
    """Open everything under ``path/split``, verified as far as ``check`` says.

    Args:
        path: the data folder.
        split: the folder inside it, ``train`` or ``val``.
        check: ``quick`` compares sizes and index digests; ``full`` also reads every ``.bin``.
        vocab_size: the full check reports ids from here on; by default the vocabulary of the listed tokenizer.

    Raises:
        PathMissing: the folder does not exist.
        DataMissing: the split does not exist or has no entries.
        DataDamaged: files are missing, unlisted, damaged or differ from ``shards.json``; all are listed.
        TokenizationUnfinished: a tokenization into this folder is unfinished.
        TokenizersDiffer: its folders were made with different tokenizers.
        StorageFailed: an I/O error.
        ValueError: ``check`` is unknown.
    """
    if check not in get_args(Check):
        # Treated as the quick one, it would verify less than requested.
        raise ValueError(f"check must be one of {', '.join(get_args(Check))}, is {check!r}")
    path = Path(path)
    folder = path / split
    _require_folder(path, folder)
    require_finished(path)
    found = walk(folder, follows_buckets=True)
    listings, findings = _listings(folder, found)
    claims, disputes = _claims(listings)
    findings += disputes + _layout_findings(found, listings, claims)
    limit = vocab_size if vocab_size is not None else _largest_vocabulary(listings)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="unbroken-shards") as pool:
        looks = list(pool.map(lambda name: _look(folder, name, claims.get(name), check, limit), sorted(found.pairs)))
    findings += [finding for _, problems in looks for finding in problems]
    if findings:
        raise DataDamaged(path=folder, findings=tuple(sorted(findings)))
    buckets = _buckets(shard for shard, _ in looks if shard is not None)
    _require_entries(folder, buckets)
    return Corpus(path, split, buckets, _one_tokenizer(folder, buckets, listings))


def _require_folder(path: Path, folder: Path) -> None:
    if not path.is_dir():
        raise PathMissing(path=path, purpose="data folder")
    if not folder.is_dir():
        require_finished(path)
        has_shards = bool(walk(path, follows_buckets=True).stems)
        raise DataMissing(path=path, lacks=f"it has no folder {folder.name}/", has_shards=has_shards)


def _require_entries(folder: Path, buckets: tuple[Bucket, ...]) -> None:
    if not buckets:
        raise DataMissing(path=folder, lacks=f"no {IDX_SUFFIX} file in it or below it")
    empty = [bucket for bucket in buckets if not bucket.entries]
    if empty:
        findings = (f"{bucket.name}: {plural(len(bucket.shards), 'shard')}, no entries" for bucket in empty)
        raise DataDamaged(path=folder, findings=tuple(findings))


# ---- shards.json ----


def _listings(folder: Path, found: ShardFiles) -> tuple[dict[str, Listing], list[str]]:
    listings, findings = {}, []
    for place in found.listings:
        try:
            listings[place] = read_listing(folder / place / LISTING)
        except ShardDamaged as damaged:
            findings.append(f"{_join(place, LISTING)}: {damaged.complaint}")
    return listings, findings


def _claims(listings: Mapping[str, Listing]) -> tuple[dict[str, ShardRecord], list[str]]:
    """The listed shards by name under the split's folder, and where a list further up differs.

    The nearest list at or above a shard counts.
    """
    listed = [(place, _join(place, record.name), record) for place in listings for record in listings[place].shards]
    claims = {name: record for place, name, record in listed if _nearest(name, listings) == place}
    disputes = [
        f"{name}: {_join(place, LISTING)} differs from {_join(_nearest(name, listings) or '', LISTING)}"
        for place, name, record in listed
        if name not in claims or replace(claims[name], name=record.name) != record
    ]
    return claims, disputes


def _layout_findings(
    found: ShardFiles, listings: Mapping[str, Listing], claims: Mapping[str, ShardRecord]
) -> list[str]:
    return [
        *(f"{name}: not a regular file; only the folder of a bucket may be a link" for name in found.irregular),
        *(f"{name}{IDX_SUFFIX}: its {BIN_SUFFIX} is missing" for name in found.lone_indexes),
        *(f"{name}{BIN_SUFFIX}: its {IDX_SUFFIX} is missing" for name in found.lone_bins),
        *(f"{name}: listed in {LISTING} but missing" for name in sorted(claims.keys() - found.stems)),
        *(
            f"{name}: not listed in {_join(place, LISTING)}"
            for name in sorted(found.stems - claims.keys())
            for place in [_nearest(name, listings)]
            if place is not None
        ),
        *(_two_defaults(found)),
    ]


def _two_defaults(found: ShardFiles) -> Iterator[str]:
    bucket_of_loose = any("/" not in name for name in found.stems)
    if bucket_of_loose and any(name.startswith(f"{DEFAULT_BUCKET}/") for name in found.stems):
        yield f"{DEFAULT_BUCKET}/: a bucket of the same name as that of the shards outside any bucket; move one of them"


def _nearest(name: str, listings: Mapping[str, Listing]) -> str | None:
    above = name
    while "/" in above:
        above = above.rpartition("/")[0]
        if above in listings:
            return above
    return "" if "" in listings else None


def _largest_vocabulary(listings: Mapping[str, Listing]) -> int | None:
    return max((listing.tokenizer.vocab_size for listing in listings.values() if listing.tokenizer), default=None)


# ---- checking shards ----


def _look(
    folder: Path, name: str, record: ShardRecord | None, check: Check, vocab_size: int | None
) -> tuple[Shard | None, list[str]]:
    """One shard, and all its problems."""
    try:
        index = open_index(folder / f"{name}{IDX_SUFFIX}")
        digest = index.digest()
        # It was read whole when it was listed: an index with the listed digest need not be read again.
        if record is None or record.index_digest != digest or check == "full":
            index.require_sound()
    except ShardDamaged as damaged:
        return None, [f"{name}{IDX_SUFFIX}: {damaged.complaint}"]
    shard = _shard(folder, name, index, digest, record)
    problems = [f"{name}{IDX_SUFFIX}: {complaint}" for complaint in _differences(index, digest, record)]
    if complaint := bin_complaint(shard.bin_path, index):
        return shard, [*problems, f"{name}{BIN_SUFFIX}: {complaint}"]
    if check == "full":
        content = read_content(shard.bin_path, index)
        problems += [f"{name}{BIN_SUFFIX}: {complaint}" for complaint in content.complaints(record, vocab_size)]
        shard = replace(shard, bin_digest=content.digest)
    return shard, problems


def _differences(index: ShardIndex, digest: str, record: ShardRecord | None) -> Iterator[str]:
    if record is None:
        return
    pairs = (
        ("entries", index.entries, record.entries),
        ("tokens", index.tokens, record.tokens),
        ("bytes a token", index.token_bytes, record.token_bytes),
    )
    differing = [f"it has {has:,} {what}, {listed:,} are listed" for what, has, listed in pairs if has != listed]
    if not differing and digest != record.index_digest:
        differing = [f"its digest is {digest}, {record.index_digest} is listed"]
    yield from differing


def _shard(folder: Path, name: str, index: ShardIndex, digest: str, record: ShardRecord | None) -> Shard:
    bucket, _, inner = name.partition("/") if "/" in name else ("", "", name)
    return Shard(
        bucket=bucket or DEFAULT_BUCKET,
        name=inner,
        directory=folder / bucket,
        entries=index.entries,
        tokens=index.tokens,
        token_bytes=index.token_bytes,
        bin_bytes=index.bin_bytes,
        index_digest=digest,
        bin_digest=record.bin_digest if record else None,
    )


def _buckets(shards: Iterable[Shard]) -> tuple[Bucket, ...]:
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.bucket, []).append(shard)
    return tuple(Bucket(name, tuple(sorted(by_name[name], key=lambda shard: shard.name))) for name in sorted(by_name))


def _one_tokenizer(
    folder: Path, buckets: tuple[Bucket, ...], listings: Mapping[str, Listing]
) -> TokenizerIdentity | None:
    known = {place: listing.tokenizer for place, listing in sorted(listings.items()) if listing.tokenizer}
    if len({tokenizer.digest for tokenizer in known.values()}) > 1:
        named = ((at or ".", f"{each.name}, {each.vocab_size:,} ids, {each.digest}") for at, each in known.items())
        raise TokenizersDiffer(path=folder, found=tuple(named))
    sizes = sorted({(bucket.name, shard.token_bytes) for bucket in buckets for shard in bucket.shards})
    if len({size for _, size in sizes}) > 1:
        raise TokenizersDiffer(path=folder, found=tuple((name, f"{size} bytes a token") for name, size in sizes))
    return next(iter(known.values()), None)


def _join(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
