"""The stream: sample k of a run as a pure function of the seed, the data and k.

Nothing here knows of ranks, workers or batches, and nothing is kept from one read to the next but caches. A schedule
says which bucket a sample is drawn from, the bucket's order which sequence it is, a plan where its windows lie, and the
maps of the shards hold their tokens. Look-ups are made for many samples at once; then a row costs a few slice copies.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from unbroken.data.corpus.catalogue import Corpus, Shard
from unbroken.data.order.drawn import DrawnBucket, Planned
from unbroken.data.order.schedule import Dry, Generation, OnDry, Phase, Schedule
from unbroken.data.packing.assemble import Pieces, Rows, TokenMaps, cut_pieces, in_order
from unbroken.data.packing.bucket_plan import MAPPED_GROUPS, BucketPlan, open_plan
from unbroken.data.packing.sequence_digests import SequenceDigests, digest_rows
from unbroken.data.served import Identities, identify
from unbroken.errors import SequenceDamaged
from unbroken.files import LOCAL, Files

CACHE: Final = ".unbroken"
# The first token of a window has no token before it: without a shared one it would never be trained.
LEAST_OVERLAP: Final = 1
# Every map holds a file open, those of the tokens too: the plans of all buckets together stay within this.
_MOST_MAPPED_GROUPS: Final = 512


@dataclass(frozen=True)
class Era:
    """What holds from a sample on: which shards joined there, how often a bucket is read, what happens when one is dry.

    ``shards`` are pairs of bucket and name. The first era begins at sample 0; each further one is a change that a
    person asked for, and leaves every sample before it as it was.
    """

    at_sample: int
    shards: frozenset[tuple[str, str]]
    epochs: int | None = 1
    on_dry: OnDry = "halt"


@dataclass(frozen=True)
class Settings:
    """What decides, beside the data and the eras, which sample has which number."""

    max_length: int
    overlap: int
    seed: int
    packing: bool
    shuffle: bool
    phases: tuple[Phase, ...] | None


@dataclass(frozen=True)
class Looked:
    """Samples that were looked up: their identities, their pieces, and where they come from."""

    samples: NDArray[np.int64]
    identities: NDArray[np.uint64]
    pieces: Pieces
    digests: NDArray[np.uint64] | None


class Stream:
    """The samples of a run, each a sequence of ``max_length`` tokens.

    Args:
        corpus: the data, as ``open_corpus`` found it.
        max_length: tokens of a sequence.
        overlap: tokens that the windows of a long document share; at most half of ``max_length``. 0 is taken as 1: one
            shared token, from which the next is predicted, so that every token is trained once.
        seed: another seed is another order.
        packing: several documents share a sequence.
        phases: a curriculum; without one, every epoch is one pass over all buckets.
        epochs: how often a bucket is read before it is dry; None: for ever.
        on_dry: end where a bucket is dry, or go on with the others in proportion.
        cache: where plans are kept; by default ``.unbroken`` in the data folder.
        eras: the history of a stream that grew; by default one era with all shards.
        shuffle: without it, the sequences of a bucket come in the order of its plan.
        check_reads: verify every sequence against a checksum as it is read; False trains on whatever the files hold.
        files: how the cache is written.
        progress: told how many entries were planned, while plans are made.

    Raises:
        BadMix: the phases do not fit the buckets.
        DataDamaged: reads are checked, and a shard does not match ``shards.json``.
        ShardDamaged: an index is not in order.
        StorageFailed: the system refused to read an index or to write the cache.
        ValueError: a length, ``epochs`` or ``on_dry`` cannot be, or the eras are not those of this corpus.
        TypeError: ``seed`` is no whole number.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        max_length: int,
        overlap: int = 0,
        seed: int = 0,
        packing: bool = True,
        phases: Sequence[Phase] | None = None,
        epochs: int | None = 1,
        on_dry: OnDry = "halt",
        cache: Path | str | None = None,
        eras: Sequence[Era] = (),
        shuffle: bool = True,
        check_reads: bool = True,
        files: Files = LOCAL,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        _require_known(seed, epochs, on_dry)
        self.corpus = corpus
        self.settings = Settings(max_length, overlap or LEAST_OVERLAP, seed, packing, shuffle, _in_one_spelling(phases))
        self.cache = corpus.root / CACHE if cache is None else Path(cache)
        self.eras = tuple(eras) or (Era(0, _keys(corpus.shards), epochs, on_dry),)
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
            digests = SequenceDigests(self.buckets, self._shards, max_length, cache=self.cache, files=files)
            digests.prepare()
            self._digests = digests

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker that was not forked opens the plans anew, from the cache: maps cannot be handed over.
        return _reopened, (self.corpus, self.settings, self.cache, self.eras, self._digests is not None)

    # ---- opening ----

    def _plan(self, progress: Callable[[int], None] | None) -> dict[str, list[tuple[int, Planned]]]:
        """For each bucket, the eras in which shards joined it, with their plans."""
        planned: dict[str, list[tuple[int, Planned]]] = {}
        first_shard = 0
        for number, era in enumerate(self.eras):
            for bucket in sorted({bucket for bucket, _ in era.shards}):
                shards = [shard for shard in self._shards[first_shard:] if (shard.bucket, shard.name) in era.shards]
                shards = [shard for shard in shards if shard.bucket == bucket]
                before = planned.setdefault(bucket, [])
                first_group = sum(each.plan.groups for _, each in before)
                before.append((number, Planned(self._open(shards, progress), first_shard, first_group)))
                first_shard += len(shards)
        return planned

    def _open(self, shards: Sequence[Shard], progress: Callable[[int], None] | None) -> BucketPlan:
        settings = self.settings
        return open_plan(
            shards,
            max_length=settings.max_length,
            overlap=settings.overlap,
            packing=settings.packing,
            cache=self.cache,
            files=self._files,
            progress=progress,
            mapped_groups=max(min(MAPPED_GROUPS, _MOST_MAPPED_GROUPS // self._plans), 1),
        )

    def _drawn(self, name: str, planned: Sequence[tuple[int, Planned]]) -> DrawnBucket:
        growth = [self.schedule.growth[number][name] for number, _ in planned]
        return DrawnBucket(
            name, [each for _, each in planned], growth, seed=self.settings.seed, shuffle=self.settings.shuffle
        )

    def with_eras(self, eras: Sequence[Era], corpus: Corpus | None = None) -> "Stream":
        """The same stream with another history, perhaps over a corpus that grew.

        Raises:
            As the constructor does.
        """
        return _reopened(corpus or self.corpus, self.settings, self.cache, tuple(eras), self._digests is not None)

    # ---- what it is ----

    @property
    def max_length(self) -> int:
        """Tokens of a sequence."""
        return self.settings.max_length

    @property
    def end(self) -> int | None:
        """How many samples can be served; None: there is no end."""
        return self.schedule.end

    @property
    def dry(self) -> tuple[Dry, ...]:
        """Which buckets run dry, and at which sample, in order."""
        return self.schedule.dry

    @property
    def checks_reads(self) -> bool:
        """Whether every sequence is verified against its checksum as it is read."""
        return self._digests is not None

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards by number, in the order in which they joined."""
        return self._shards

    def __len__(self) -> int:
        if self.end is None:
            raise TypeError("a stream without an end has no length")
        return self.end

    # ---- looking up ----

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The bucket, the group in it and the sequence in that, of each sample.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        bucket, ordinal = self.schedule.locate(samples)
        group, sequence = np.empty_like(bucket), np.empty_like(bucket)
        for drawn, here in self._by_bucket(bucket):
            group[here], sequence[here] = drawn.order.locate(ordinal[here])
        return bucket, group, sequence

    def _by_bucket(self, bucket: NDArray[np.int64]) -> Iterator[tuple[DrawnBucket, NDArray[np.int64]]]:
        """Each bucket that is among these, and where."""
        for number in np.flatnonzero(np.bincount(bucket)).tolist():
            yield self.buckets[number], np.flatnonzero(bucket == number)

    def identities(self, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The identity of each sample, two words; see ``unbroken.data.served``.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
        """
        return self._identify(samples, *self.locate(samples))

    def identities_apart(self) -> Identities:
        """``identities`` with caches of its own: it may be asked in another thread while this stream is read."""
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

    def look_up(self, samples: NDArray[np.int64]) -> Looked:
        """Where the tokens of samples are, for all of them at once.

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
        return Looked(samples, identities, pieces, digests if self._digests else None)

    # ---- reading ----

    def rows(self, looked: Looked, first: int, last: int) -> Rows:
        """The rows ``first`` to ``last`` of what was looked up.

        Raises:
            SequenceDamaged: ``check_reads`` is on, and a row's bytes are not those it had.
            ShardDamaged: a ``.bin`` is not there or has not its size.
        """
        raw = looked.pieces.raw(first, last, self._maps)
        if looked.digests is not None:
            self._require_whole(looked, first, last, raw)
        return looked.pieces.rows(first, last, raw)

    def _require_whole(self, looked: Looked, first: int, last: int, raw: bytes) -> None:
        assert looked.digests is not None
        found = digest_rows(raw, last - first)
        bad = np.flatnonzero(found != looked.digests[first:last])
        if not bad.size:
            return
        row = first + int(bad[0])
        pieces = looked.pieces
        numbers = sorted(set(pieces.shards[pieces.bounds[row] : pieces.bounds[row + 1]]))
        shards = tuple(f"{self._shards[n].bucket}/{self._shards[n].name}" for n in numbers if n >= 0)
        raise SequenceDamaged(root=self.corpus.root, sample=int(looked.samples[row]), shards=shards)

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Rows:
        """The rows of some samples, in the order asked for.

        Raises:
            IndexError: a sample is negative or lies beyond the end.
            SequenceDamaged, ShardDamaged: as ``rows`` does.
        """
        looked = self.look_up(np.asarray(samples, np.int64))
        return self.rows(looked, 0, len(looked.samples))

    def verify_known(self, sample: int) -> bool:
        """Verify one sample against its checksum, if an earlier reader has kept one; returns whether it has.

        For a stream without ``check_reads``: nothing is computed for other samples.

        Raises:
            IndexError: it is negative or lies beyond the end.
            SequenceDamaged, ShardDamaged: as ``rows`` does.
            StorageFailed: the system refused to read.
        """
        asked = np.array([sample], np.int64)
        bucket, group, sequence = self.locate(asked)
        digests = SequenceDigests(self.buckets, self._shards, self.max_length, cache=self.cache, files=self._files)
        known = digests.known(self.buckets[int(bucket[0])], int(group[0]), sequence)
        if known is None:
            return False
        self.rows(replace(self.look_up(asked), digests=known), 0, 1)
        return True

    def __getitem__(self, sample: int) -> Rows:
        return self.read([sample])


def _require_known(seed: int, epochs: int | None, on_dry: OnDry) -> None:
    # Each of these would be taken without a word and give another order, or no sample at all.
    if not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {seed!r}; it is a whole number")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is {epochs}; it is at least 1, or None for no end")
    if on_dry not in get_args(OnDry):
        raise ValueError(f"on_dry is {on_dry!r}; it is one of {', '.join(get_args(OnDry))}")


def _reopened(corpus: Corpus, settings: Settings, cache: Path, eras: tuple[Era, ...], check_reads: bool) -> Stream:
    return Stream(
        corpus,
        max_length=settings.max_length,
        overlap=settings.overlap,
        seed=settings.seed,
        packing=settings.packing,
        shuffle=settings.shuffle,
        phases=settings.phases,
        cache=cache,
        eras=eras,
        check_reads=check_reads,
    )


def _in_one_spelling(phases: Sequence[Phase] | None) -> tuple[Phase, ...] | None:
    """Phases whose buckets come by name: in which order a person wrote them decides nothing."""
    return None if phases is None else tuple(replace(phase, mix=tuple(sorted(phase.mix))) for phase in phases)


def _keys(shards: Sequence[Shard]) -> frozenset[tuple[str, str]]:
    return frozenset((shard.bucket, shard.name) for shard in shards)


def _in_eras(corpus: Corpus, eras: Sequence[Era]) -> tuple[Shard, ...]:
    """All shards, era by era, and in each in the corpus's order."""
    shards = tuple(shard for era in eras for shard in corpus.shards if (shard.bucket, shard.name) in era.shards)
    if len(shards) != len(corpus.shards) or _keys(shards) != _keys(corpus.shards) or eras[0].at_sample:
        raise ValueError("the eras do not hold each shard of the corpus once, from sample 0 on")
    return shards


def _generations(eras: Sequence[Era], planned: dict[str, list[tuple[int, Planned]]]) -> list[Generation]:
    """What the schedule has to know: how many sequences each bucket has in each era."""
    generations = []
    for number, era in enumerate(eras):
        held = {
            bucket: sum(each.plan.total_sequences for since, each in joined if since <= number)
            for bucket, joined in planned.items()
            if joined[0][0] <= number
        }
        generations.append(Generation(era.at_sample, held, era.epochs, era.on_dry))
    return generations
