"""The stream: sample k of a run as a pure function of the seed, the data and k.

It knows nothing of ranks, workers or batches, and keeps nothing between reads but caches. The schedule gives the bucket
of a sample, the bucket's order the sequence, the packing plan its windows, and the memory-mapped shards their tokens.
Look-ups are made for many samples at once; then a row costs a few slice copies.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.catalogue import Corpus, Shard
from unbroken.data.exactly_once import Identities, identify
from unbroken.data.order.bucket_draws import BucketDraws, PlannedBucket
from unbroken.data.order.schedule import DataGeneration, Exhausted, OnExhausted, Phase, Schedule
from unbroken.data.packing.bucket_plan import MAPPED_GROUPS, BucketPlan, open_plan
from unbroken.data.packing.rows import Pieces, Rows, TokenMaps, cut_pieces, in_order
from unbroken.data.packing.sequence_digests import SequenceDigests, digest_rows
from unbroken.errors import SequenceDamaged
from unbroken.files import LOCAL, Files

CACHE: Final = ".unbroken"
# The first token of a window is predicted from nothing: without a shared token it would never be trained.
LEAST_OVERLAP: Final = 1
# Every map holds a file open, and so do those of the tokens: a bound for the plans of all buckets together.
_MOST_MAPPED_GROUPS: Final = 512


@dataclass(frozen=True)
class Era:
    """The data from a sample on: the shards that joined there, ``epochs``, and what happens to an exhausted bucket.

    ``shards`` are pairs of bucket and name. The first era starts at sample 0; each later one is a change that the user
    made, and leaves every earlier sample as it was.
    """

    at_sample: int
    shards: frozenset[tuple[str, str]]
    epochs: int | None = 1
    on_exhausted: OnExhausted = "halt"


@dataclass(frozen=True)
class StreamSettings:
    """What decides the order of samples, besides the data and the eras."""

    max_length: int
    overlap: int
    seed: int
    packing: bool
    shuffle: bool
    phases: tuple[Phase, ...] | None


@dataclass(frozen=True)
class Lookup:
    """The result of a look-up: identities and pieces of samples, and their checksums if reads are checked."""

    samples: NDArray[np.int64]
    identities: NDArray[np.uint64]
    pieces: Pieces
    digests: NDArray[np.uint64] | None


class Stream:
    """The samples of a run, each a sequence of ``max_length`` tokens.

    Args:
        corpus: the data, as ``open_corpus`` found it.
        max_length: tokens of a sequence.
        overlap_size: tokens that the windows of a long document share; at most half of ``max_length``. 0 is taken as 1:
            one shared token, from which the next is predicted, so that every token is trained once.
        seed: decides the order.
        packing: whether several documents share a sequence.
        phases: a curriculum; without one, every epoch is one pass over all buckets.
        epochs: passes over a bucket before it is exhausted; None: no limit.
        on_exhausted: ``halt`` ends the stream at an exhausted bucket; ``renormalise`` continues with the others.
        cache_dir: the directory of packing plans; by default ``.unbroken`` in the data folder.
        eras: the history of a stream that grew; by default one era with all shards.
        shuffle: if False, the sequences of a bucket come in the order of its plan.
        check_reads: verify every sequence against a checksum as it is read; False trains on whatever the files hold.
        files: the storage of the cache.
        progress: called with the number of entries planned, while plans are built.

    Raises:
        BadMix: the phases do not fit the buckets.
        DataDamaged: reads are checked, and a shard does not match ``shards.json``.
        ShardDamaged: an index is damaged.
        StorageFailed: an I/O error while reading an index or writing the cache.
        ValueError: a length, ``epochs`` or ``on_exhausted`` is out of range, or the eras are not of this corpus.
        TypeError: ``seed`` is not a whole number.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        max_length: int,
        overlap_size: int = 0,
        seed: int = 0,
        packing: bool = True,
        phases: Sequence[Phase] | None = None,
        epochs: int | None = 1,
        on_exhausted: OnExhausted = "halt",
        cache_dir: Path | str | None = None,
        eras: Sequence[Era] = (),
        shuffle: bool = True,
        check_reads: bool = True,
        files: Files = LOCAL,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        _require_known(seed, epochs, on_exhausted)
        self.corpus = corpus
        self.settings = StreamSettings(
            max_length, overlap_size or LEAST_OVERLAP, seed, packing, shuffle, _in_one_spelling(phases)
        )
        self.cache_dir = corpus.root / CACHE if cache_dir is None else Path(cache_dir)
        self.eras = tuple(eras) or (Era(0, _keys(corpus.shards), epochs, on_exhausted),)
        self._files = files
        self._shards = _in_eras(corpus, self.eras)
        self._token_bytes = max(shard.token_bytes for shard in self._shards)
        self._plans = sum(len({bucket for bucket, _ in era.shards}) for era in self.eras)
        planned = self._plan(progress)
        self.generations = tuple(_generations(self.eras, planned))
        self.schedule = Schedule(phases, self.generations, seed=seed)
        self.buckets = tuple(self._drawn(name, planned[name]) for name in self.schedule.buckets)
        self._maps = TokenMaps(self._shards, max_length)
        self._digests: SequenceDigests | None = None
        if check_reads:
            digests = SequenceDigests(self.buckets, self._shards, max_length, cache=self.cache_dir, files=files)
            digests.prepare()
            self._digests = digests

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker opens the plans again, from the cache: memory maps cannot be pickled.
        return _reopened, (self.corpus, self.settings, self.cache_dir, self.eras, self._digests is not None)

    # ---- opening ----

    def _plan(self, progress: Callable[[int], None] | None) -> dict[str, list[tuple[int, PlannedBucket]]]:
        """For each bucket, the eras in which shards joined, with their plans."""
        planned: dict[str, list[tuple[int, PlannedBucket]]] = {}
        first_shard = 0
        for number, era in enumerate(self.eras):
            for bucket in sorted({bucket for bucket, _ in era.shards}):
                shards = [shard for shard in self._shards[first_shard:] if (shard.bucket, shard.name) in era.shards]
                shards = [shard for shard in shards if shard.bucket == bucket]
                before = planned.setdefault(bucket, [])
                first_group = sum(each.plan.groups for _, each in before)
                before.append((number, PlannedBucket(self._open(shards, progress), first_shard, first_group)))
                first_shard += len(shards)
        return planned

    def _open(self, shards: Sequence[Shard], progress: Callable[[int], None] | None) -> BucketPlan:
        settings = self.settings
        return open_plan(
            shards,
            max_length=settings.max_length,
            overlap=settings.overlap,
            packing=settings.packing,
            cache=self.cache_dir,
            files=self._files,
            progress=progress,
            mapped_groups=max(min(MAPPED_GROUPS, _MOST_MAPPED_GROUPS // self._plans), 1),
        )

    def _drawn(self, name: str, planned: Sequence[tuple[int, PlannedBucket]]) -> BucketDraws:
        growth = [self.schedule.growth[number][name] for number, _ in planned]
        return BucketDraws(
            name, [each for _, each in planned], growth, seed=self.settings.seed, shuffle=self.settings.shuffle
        )

    def with_eras(self, eras: Sequence[Era], corpus: Corpus | None = None) -> "Stream":
        """The same stream with other eras, perhaps over a corpus that grew.

        Raises:
            As the constructor does.
        """
        return _reopened(corpus or self.corpus, self.settings, self.cache_dir, tuple(eras), self._digests is not None)

    # ---- properties ----

    @property
    def max_length(self) -> int:
        """Tokens of a sequence."""
        return self.settings.max_length

    @property
    def end(self) -> int | None:
        """The number of samples; None: no end."""
        return self.schedule.end

    @property
    def exhausted(self) -> tuple[Exhausted, ...]:
        """The buckets that are exhausted, each with the sample, in order."""
        return self.schedule.exhausted

    @property
    def checks_reads(self) -> bool:
        """Whether every sequence is verified against its checksum as it is read."""
        return self._digests is not None

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards, in the order in which they joined."""
        return self._shards

    def __len__(self) -> int:
        if self.end is None:
            raise TypeError("a stream without an end has no length")
        return self.end

    # ---- looking up ----

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Bucket, group in the bucket, and sequence in the group of each sample.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        bucket, ordinal = self.schedule.locate(samples)
        group, sequence = np.empty_like(bucket), np.empty_like(bucket)
        for drawn, here in self._by_bucket(bucket):
            group[here], sequence[here] = drawn.order.locate(ordinal[here])
        return bucket, group, sequence

    def _by_bucket(self, bucket: NDArray[np.int64]) -> Iterator[tuple[BucketDraws, NDArray[np.int64]]]:
        """Each bucket that occurs, with the indexes where it does."""
        for number in np.flatnonzero(np.bincount(bucket)).tolist():
            yield self.buckets[number], np.flatnonzero(bucket == number)

    def identities(self, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The identity of each sample, two words; see ``unbroken.data.exactly_once``.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        return self._identify(samples, *self.locate(samples))

    def identities_apart(self) -> Identities:
        """``identities`` with caches of its own, for use in another thread while this stream is read."""
        apart = object.__new__(Stream)
        apart.__dict__.update(self.__dict__)
        apart.schedule = deepcopy(self.schedule)
        apart.buckets = tuple(bucket.apart() for bucket in self.buckets)
        return apart.identities

    def _identify(
        self,
        samples: NDArray[np.int64],
        bucket: NDArray[np.int64],
        group: NDArray[np.int64],
        sequence: NDArray[np.int64],
    ) -> NDArray[np.uint64]:
        keys = np.empty(len(samples), np.uint64)
        for drawn, here in self._by_bucket(bucket):
            keys[here] = drawn.group_keys[group[here]]
        return identify(samples, keys, sequence)

    def look_up(self, samples: NDArray[np.int64]) -> Lookup:
        """Look up where the tokens of samples are, for all of them at once.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        bucket, group, sequence = self.locate(samples)
        parts, digests = [], np.empty(len(samples), np.uint64)
        for drawn, here in self._by_bucket(bucket):
            for one, members, slots in drawn.windows(group[here], sequence[here]):
                rows = here[members]
                parts.append((rows, slots))
                if self._digests:
                    digests[rows] = self._digests.of(drawn, one, sequence[rows])
        pieces = cut_pieces(in_order(parts, len(samples)), max_length=self.max_length, token_bytes=self._token_bytes)
        identities = self._identify(samples, bucket, group, sequence)
        return Lookup(samples, identities, pieces, digests if self._digests else None)

    # ---- reading ----

    def rows(self, lookup: Lookup, first: int, last: int) -> Rows:
        """The rows ``first`` to ``last`` of what was lookup up.

        Raises:
            SequenceDamaged: ``check_reads`` is on, and the bytes of a row do not match its checksum.
            ShardDamaged: a ``.bin`` is missing or has another size.
        """
        raw = lookup.pieces.raw(first, last, self._maps)
        if lookup.digests is not None:
            self._require_whole(lookup, first, last, raw)
        return lookup.pieces.rows(first, last, raw)

    def _require_whole(self, lookup: Lookup, first: int, last: int, raw: bytes) -> None:
        assert lookup.digests is not None
        found = digest_rows(raw, last - first)
        bad = np.flatnonzero(found != lookup.digests[first:last])
        if not bad.size:
            return
        row = first + int(bad[0])
        pieces = lookup.pieces
        numbers = sorted(set(pieces.shards[pieces.bounds[row] : pieces.bounds[row + 1]]))
        shards = tuple(f"{self._shards[n].bucket}/{self._shards[n].name}" for n in numbers if n >= 0)
        raise SequenceDamaged(root=self.corpus.root, sample=int(lookup.samples[row]), shards=shards)

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Rows:
        """The rows of some samples, in the given order.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
            SequenceDamaged, ShardDamaged: as ``rows`` does.
        """
        lookup = self.look_up(np.asarray(samples, np.int64))
        return self.rows(lookup, 0, len(lookup.samples))

    def verify_known(self, sample: int) -> bool:
        """Verify one sample against its checksum, if the cache has one; returns whether it has.

        For a stream without ``check_reads``; no other checksum is computed.

        Raises:
            IndexError: the sample is negative or beyond the end.
            SequenceDamaged, ShardDamaged: as ``rows`` does.
            StorageFailed: an I/O error.
        """
        asked = np.array([sample], np.int64)
        bucket, group, sequence = self.locate(asked)
        digests = SequenceDigests(self.buckets, self._shards, self.max_length, cache=self.cache_dir, files=self._files)
        known = digests.known(self.buckets[int(bucket[0])], int(group[0]), sequence)
        if known is None:
            return False
        self.rows(replace(self.look_up(asked), digests=known), 0, 1)
        return True

    def __getitem__(self, sample: int) -> Rows:
        return self.read([sample])


def _require_known(seed: int, epochs: int | None, on_exhausted: OnExhausted) -> None:
    # Any of these would silently give another order, or no samples.
    if not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed must be a whole number, is {seed!r}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs must be at least 1, or None for no end; is {epochs}")
    if on_exhausted not in get_args(OnExhausted):
        raise ValueError(f"on_exhausted must be one of {', '.join(get_args(OnExhausted))}, is {on_exhausted!r}")


def _reopened(
    corpus: Corpus, settings: StreamSettings, cache: Path, eras: tuple[Era, ...], check_reads: bool
) -> Stream:
    return Stream(
        corpus,
        max_length=settings.max_length,
        overlap_size=settings.overlap,
        seed=settings.seed,
        packing=settings.packing,
        shuffle=settings.shuffle,
        phases=settings.phases,
        cache_dir=cache,
        eras=eras,
        check_reads=check_reads,
    )


def _in_one_spelling(phases: Sequence[Phase] | None) -> tuple[Phase, ...] | None:
    """Phases with buckets sorted by name: the order in which they were written must not matter."""
    return None if phases is None else tuple(replace(phase, mix=tuple(sorted(phase.mix))) for phase in phases)


def _keys(shards: Sequence[Shard]) -> frozenset[tuple[str, str]]:
    return frozenset((shard.bucket, shard.name) for shard in shards)


def _in_eras(corpus: Corpus, eras: Sequence[Era]) -> tuple[Shard, ...]:
    """All shards by era, and within an era in the order of the corpus."""
    shards = tuple(shard for era in eras for shard in corpus.shards if (shard.bucket, shard.name) in era.shards)
    if len(shards) != len(corpus.shards) or _keys(shards) != _keys(corpus.shards) or eras[0].at_sample:
        raise ValueError("the eras must hold each shard of the corpus once and start at sample 0")
    return shards


def _generations(eras: Sequence[Era], planned: dict[str, list[tuple[int, PlannedBucket]]]) -> list[DataGeneration]:
    """For the schedule: how many sequences each bucket has in each era."""
    generations = []
    for number, era in enumerate(eras):
        held = {
            bucket: sum(each.plan.total_sequences for since, each in joined if since <= number)
            for bucket, joined in planned.items()
            if joined[0][0] <= number
        }
        generations.append(DataGeneration(era.at_sample, held, era.epochs, era.on_exhausted))
    return generations
