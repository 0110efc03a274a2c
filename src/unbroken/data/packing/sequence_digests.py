"""A checksum for every sequence, so that changed bytes are detected as they are read.

Checksums are computed once, when data is first opened for reading, after the shards were verified against
``shards.json``. Shards without a list (another tool's) are taken as they are: earlier damage cannot be seen, later
damage is. The cache holds one file per group, named by a digest of its inputs. Processes that open the same data at the
same time share the work. A damaged file is recomputed.
"""

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from unbroken.data.corpus.catalogue import Shard
from unbroken.data.corpus.listing import LISTING
from unbroken.data.corpus.shards import digest_file
from unbroken.data.order.bucket_draws import BucketDraws
from unbroken.data.packing.rows import TokenMaps, cut_pieces
from unbroken.errors import DataDamaged, StorageFailed
from unbroken.errors.tree import quoted
from unbroken.files import Files
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.store.digest import DIGEST_BYTES, digest_bytes

FOLDER: Final = "reads"
_WORD: Final[np.dtype[Any]] = np.dtype("<u8")
_AT_ONCE: Final = 1024
# A shuffle draws from 16 groups of every bucket at once: all must fit, or each look-up would read them again.
_HELD_BYTES: Final = 256 << 20
_LARGEST_BYTES: Final = 1 << 30
_log = logger(__name__)

Digests = NDArray[np.uint64]


def digest_rows(raw: bytes, rows: int) -> Digests:
    """The digest of each row of equal size."""
    size, view = len(raw) // rows, memoryview(raw)
    found = [xxhash.xxh3_64_intdigest(view[row * size : (row + 1) * size]) for row in range(rows)]
    return np.array(found, np.uint64)


class SequenceDigests:
    """The digests of a stream's sequences, by bucket and group.

    Args:
        buckets: the stream's buckets.
        shards: its shards, by number.
        max_length: tokens of a sequence.
        cache: the directory of the checksums.
        files: its storage.
        token: unique to this process, random by default; used in the names of scratch files.
    """

    def __init__(
        self,
        buckets: Sequence[BucketDraws],
        shards: Sequence[Shard],
        max_length: int,
        *,
        cache: Path,
        files: Files,
        token: str | None = None,
    ) -> None:
        self._buckets = buckets
        self._shards = shards
        self._max_length = max_length
        self._folder = cache / FOLDER
        self._files = files
        self._token = token or secrets.token_hex(8)
        self._held: OrderedDict[tuple[str, int], Digests] = OrderedDict()
        self._held_bytes = 0
        self._proven: set[int] = set()

    def prepare(self) -> None:
        """Compute the checksums that are not in the cache.

        Raises:
            DataDamaged: a shard whose sequences have no checksums yet does not match ``shards.json``.
            StorageFailed: an I/O error while reading, or writing the cache.
        """
        self._files.make_directory(self._folder)
        groups = [(bucket, group) for bucket in self._buckets for group in range(len(bucket.group_digests))]
        names = {self._path(bucket, group).name for bucket, group in groups}
        kept = {node.name for node in self._files.list_directory(self._folder)}
        missing = [each for each in groups if self._path(*each).name not in kept]
        if missing:
            self._say_first_reading({number for bucket, group in missing for number in bucket.shards_of(group)})
        # Each process starts elsewhere and skips what another has finished: ranks share the reading.
        begin = int.from_bytes(digest_bytes(self._token.encode())) % max(len(missing), 1)
        for bucket, group in missing[begin:] + missing[:begin]:
            path = self._path(bucket, group)
            if self._files.find(path) is None:
                self._keep(path, self._take(bucket, group))
        self._clear_scratch(names)

    def _say_first_reading(self, numbers: Collection[int]) -> None:
        shards = [self._shards[number] for number in sorted(numbers)]
        size = amounts.size(sum(shard.bin_bytes for shard in shards))
        counted = amounts.plural(len(shards), "shard")
        _log.info("data: computing checksums of %s (%s), once; kept in %s", counted, size, self._folder)
        unlisted = [shard for shard in shards if shard.bin_digest is None]
        if unlisted:
            folders = sorted({quoted(shard.directory) for shard in unlisted})
            _log.warning(
                "data: %s without %s: checksums are taken from the bytes as they are now, so earlier damage cannot be "
                "seen; to list them: unbroken data seal %s",
                amounts.plural(len(unlisted), "shard"),
                LISTING,
                folders[0],
            )

    def of(self, bucket: BucketDraws, group: int, sequences: NDArray[np.int64]) -> Digests:
        """The digests of some sequences of a group.

        Raises:
            DataDamaged, StorageFailed: as ``prepare`` does, if checksums have to be computed again.
        """
        key = bucket.name, group
        if key in self._held:
            self._held.move_to_end(key)
        else:
            self._held[key] = self._read(bucket, group)
            self._held_bytes += self._held[key].nbytes
            while self._held_bytes > _HELD_BYTES and len(self._held) > 1:
                self._held_bytes -= self._held.popitem(last=False)[1].nbytes
        return self._held[key][sequences]

    def known(self, bucket: BucketDraws, group: int, sequences: NDArray[np.int64]) -> Digests | None:
        """The same from the cache only; None if it has none for this group.

        Raises:
            StorageFailed: an I/O error.
        """
        kept = self._kept(bucket, group)
        return None if kept is None else kept[sequences]

    def _path(self, bucket: BucketDraws, group: int) -> Path:
        # The name includes the listed contents: other bytes under the same index have other checksums.
        listed = [self._shards[number].bin_digest or "" for number in bucket.shards_of(group)]
        content = digest_bytes("\n".join(listed).encode()).hex()
        return self._folder / f"{bucket.group_digests[group]}-{content}.reads"

    def _read(self, bucket: BucketDraws, group: int) -> Digests:
        if (kept := self._kept(bucket, group)) is not None:
            return kept
        path = self._path(bucket, group)
        _log.warning("data: checksums in %s are damaged or missing: computing them again", path)
        taken = self._take(bucket, group)
        self._keep(path, taken)
        return taken

    def _kept(self, bucket: BucketDraws, group: int) -> Digests | None:
        path = self._path(bucket, group)
        data = self._files.read_bytes(path, limit_bytes=_LARGEST_BYTES) if self._files.find(path) else b""
        is_whole = data[:DIGEST_BYTES] == digest_bytes(memoryview(data)[DIGEST_BYTES:])
        return np.frombuffer(data, _WORD, offset=DIGEST_BYTES) if is_whole else None

    def _keep(self, path: Path, digests: Digests) -> None:
        body = digests.astype(_WORD, copy=False).tobytes()
        data = digest_bytes(body) + body
        # The cache may have been deleted since it was prepared.
        self._files.make_directory(self._folder)
        try:
            # crash here: the whole file, or a scratch file, which readers ignore.
            self._files.replace(path, data, scratch=f".{path.name}-{self._token}", durable=False)
        except StorageFailed:
            # Another process that computed the same checksums may have removed our scratch file: then the file exists.
            if self._files.find(path) is None or self._files.read_bytes(path, limit_bytes=len(data)) != data:
                raise

    def _clear_scratch(self, names: Collection[str]) -> None:
        """Remove scratch files that killed processes left; the final files exist by now."""
        for node in self._files.list_directory(self._folder):
            if node.name.startswith(".") and node.name[1:].rpartition("-")[0] in names:
                # crash here: fewer scratch files, which readers ignore.
                self._files.remove_file(self._folder / node.name)

    def _take(self, bucket: BucketDraws, group: int) -> Digests:
        numbers = bucket.shards_of(group)
        self._require_listed([number for number in numbers if number not in self._proven])
        self._proven.update(numbers)
        return np.concatenate([np.empty(0, np.uint64), *self._taken(bucket, group)])

    def _taken(self, bucket: BucketDraws, group: int) -> Iterator[Digests]:
        planned, inner = bucket.find(group)
        sequences, maps = int(planned.plan.sequences[inner]), TokenMaps(self._shards, self._max_length)
        for first in range(0, sequences, _AT_ONCE):
            asked = np.arange(first, min(first + _AT_ONCE, sequences), dtype=np.int64)
            for _, _, slots in bucket.windows(np.full_like(asked, group), asked):
                size = self._shards[0].token_bytes
                pieces = cut_pieces(slots, max_length=self._max_length, token_bytes=size)
                yield digest_rows(pieces.raw(0, len(asked), maps), len(asked))

    def _require_listed(self, numbers: Sequence[int]) -> None:
        shards = [self._shards[number] for number in numbers]
        findings = [
            f"{shard.bucket}/{shard.name}.bin: its checksum is {found}, {LISTING} lists {shard.bin_digest}"
            for shard in shards
            if shard.bin_digest is not None and (found := digest_file(shard.bin_path).whole) != shard.bin_digest
        ]
        if findings:
            raise DataDamaged(path=shards[0].directory.parent, findings=tuple(findings))
