"""How a stream goes on from a recorded one: as it was, grown, or not at all.

The settings that decide the order must be the recorded ones, and so must every shard. Two things may change, each from
the sample on at which the run stands: shards may join, if a person accepts that, and a bucket may be read more often or
left out when it is dry. Everything else is refused, every difference named.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, cast

from unbroken.data.corpus.changed import Changes, RecordedShard, compare, from_json, recorded, to_json
from unbroken.data.order.drawn import order_key
from unbroken.data.order.epoch_order import BucketOrder, Progress
from unbroken.data.order.schedule import Generation, OnDry, Phase, Schedule
from unbroken.data.packing.bucket_plan import BucketPlan, open_plan
from unbroken.data.packing.groups import Offsets
from unbroken.data.stream import Era, Settings, Stream
from unbroken.errors import StreamDiffers
from unbroken.errors.shards import ServedShare
from unbroken.quoting.amounts import plural
from unbroken.store.fields import Malformed, Table
from unbroken.store.old_names import updated

# ---- what a loader's state keeps ----

SCHEMA: Final = "unbroken.stream/2"


@dataclass(frozen=True)
class RecordedEra:
    """An era as it is kept: what joined, and how many sequences each bucket had from then on."""

    era: Era
    shards: tuple[RecordedShard, ...]
    sequences: Mapping[str, int]

    @property
    def generation(self) -> Generation:
        """What a schedule has to know of it."""
        return Generation(self.era.at_sample, self.sequences, self.era.epochs, self.era.on_dry)


@dataclass(frozen=True)
class Record:
    """A stream as it is kept."""

    settings: Settings
    split: str
    eras: tuple[RecordedEra, ...]

    @property
    def shards(self) -> tuple[RecordedShard, ...]:
        """Every shard that the stream had."""
        return tuple(shard for each in self.eras for shard in each.shards)


# ---- writing ----


def record_of(stream: Stream) -> dict[str, Any]:
    """What a state keeps of a stream."""
    settings = stream.settings
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "split": stream.corpus.split,
        "max_length": settings.max_length,
        "overlap": settings.overlap,
        "seed": str(settings.seed),
        "packing": settings.packing,
        "shuffle": settings.shuffle,
        "eras": [_era_json(stream, number) for number in range(len(stream.eras))],
    }
    if settings.phases is not None:
        told["phases"] = [_phase_json(phase) for phase in settings.phases]
    return told


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {"samples": phase.samples, "mix": {bucket: str(weight) for bucket, weight in phase.mix}}


def _era_json(stream: Stream, number: int) -> dict[str, Any]:
    era = stream.eras[number]
    joined = [shard for shard in stream.shards if (shard.bucket, shard.name) in era.shards]
    return {
        "at_sample": era.at_sample,
        "epochs": era.epochs or 0,  # 0: for ever
        "on_exhausted": era.on_dry,
        "sequences": dict(stream.generations[number].sequences),
        "shards": to_json(recorded(joined)),
    }


# ---- reading ----


def read_record(value: object) -> Record:
    """The record of a stream.

    Raises:
        Malformed: it is none.
    """
    table = Table(updated(value), "the record of the stream")
    table.one_of("schema", [SCHEMA])
    try:
        seed = int(table.text("seed"))
    except ValueError:
        raise Malformed("the seed in the record of the stream is no number") from None
    settings = Settings(
        max_length=table.whole("max_length"),
        overlap=table.whole("overlap"),
        seed=seed,
        packing=table.flag("packing"),
        shuffle=table.flag("shuffle"),
        phases=tuple(map(_phase, table.rows("phases"))) if "phases" in table else None,
    )
    eras = tuple(map(_era, table.rows("eras")))
    if not eras:
        raise Malformed("the record of the stream has no era")
    return Record(settings, table.text("split"), eras)


def _phase(row: Table) -> Phase:
    try:
        mix = tuple((bucket, Fraction(weight)) for bucket, weight in row.table("mix").items())
    except (TypeError, ValueError, ZeroDivisionError):
        raise Malformed("a weight in the record of the stream is no number") from None
    return Phase(row.whole("samples"), mix)


def _era(row: Table) -> RecordedEra:
    shards = from_json(row.table("shards"))
    counts = Table(dict(row.table("sequences")), "the sequences in the record of the stream")
    on_dry = cast("OnDry", row.one_of("on_exhausted", ["halt", "renormalise"]))
    era = Era(row.whole("at_sample"), frozenset(shard.key for shard in shards), row.whole("epochs") or None, on_dry)
    return RecordedEra(era, shards, {bucket: counts.whole(bucket) for bucket in row.table("sequences")})


# ---- how a stream goes on ----

GROW: Final = "data.grow"


@dataclass(frozen=True)
class Continued:
    """The stream that goes on, and what is to be told about it."""

    stream: Stream
    notices: tuple[str, ...]


def go_on(record: Record, stream: Stream, position: int, accepted: Collection[str]) -> Continued:
    """The stream at hand with the recorded one's history, for a run that stands at the sample ``position``.

    Args:
        record: what the state keeps.
        stream: the stream at hand, over the data as it is now.
        position: the samples served so far.
        accepted: what a person agreed to; ``data.grow`` lets new shards join.

    Raises:
        StreamDiffers: a setting, or how documents become sequences, is not the recorded one.
        DataChanged: shards are changed or missing, or new ones are there and were not accepted.
    """
    _require_same_settings(record, stream)
    changes = compare(record.shards, stream.corpus, _served_of(record, stream, position))
    if changes and not (changes.is_growth and GROW in accepted):
        raise changes.as_error(stream.corpus.root / stream.corpus.split)
    eras = [each.era for each in record.eras]
    latest = stream.eras[-1]
    joining = frozenset((change.bucket, change.name) for change in changes.added)
    notices = list(_notices(changes, eras[-1], latest, position))
    if notices:
        eras.append(Era(position, joining, latest.epochs, latest.on_dry))
    continued = stream if tuple(eras) == stream.eras else stream.with_eras(eras)
    _require_same_sequences(record, continued)
    return Continued(continued, tuple(notices))


def _notices(changes: Changes, before: Era, now: Era, position: int) -> Iterator[str]:
    if changes.added:
        buckets = sorted({change.bucket for change in changes.added})
        yield f"{plural(len(changes.added), 'shard')} joined {', '.join(buckets)} at sample {position:,}"
    if before.epochs != now.epochs:
        yield f"each bucket is read {_times(now.epochs)} from sample {position:,} on, {_times(before.epochs)} before"
    if before.on_dry != now.on_dry:
        what = {"halt": "ends the run", "renormalise": "leaves its share to the others"}
        yield f"a dry bucket {what[now.on_dry]} from sample {position:,} on"


def _times(epochs: int | None) -> str:
    return "for ever" if epochs is None else plural(epochs, "time")


# ---- what must not differ ----


def _require_same_settings(record: Record, stream: Stream) -> None:
    names = [each.name for each in fields(record.settings)]
    pairs = [(name, getattr(record.settings, name), getattr(stream.settings, name)) for name in names]
    pairs.append(("split", record.split, stream.corpus.split))
    if differences := tuple((name, _told(before), _told(now)) for name, before, now in pairs if before != now):
        raise StreamDiffers(differences=differences)


def _told(value: Any) -> str:  # noqa: ANN401 - a setting of any type
    if isinstance(value, tuple):
        return "; ".join(
            f"{phase.samples:,} samples of " + ", ".join(f"{bucket} {weight}" for bucket, weight in phase.mix)
            for phase in value
        )
    return str(value)


def _require_same_sequences(record: Record, stream: Stream) -> None:
    """The same documents must become as many sequences, or the same numbers would mean others."""
    pairs = [(each.sequences, stream.generations[number].sequences) for number, each in enumerate(record.eras)]
    if differences := tuple(
        (f"sequences of {bucket}", f"{before[bucket]:,}", f"{now.get(bucket, 0):,}")
        for before, now in pairs
        for bucket in before
        if before[bucket] != now.get(bucket)
    ):
        raise StreamDiffers(differences=differences)


# ---- what was served of a shard ----


class _NotInCache(Exception):
    """The plan of the data as it was is not at hand."""


def _served_of(record: Record, stream: Stream, position: int) -> Callable[[str, str], ServedShare | None]:
    """Tells of a shard of the recorded stream how much of it was served; None where that cannot be known any more."""
    schedule = Schedule(record.settings.phases, [each.generation for each in record.eras], seed=record.settings.seed)
    found: dict[str, dict[str, ServedShare]] = {}

    def served(bucket: str, name: str) -> ServedShare | None:
        if not schedule.served(position)[bucket]:
            return "none"
        if bucket not in found:
            found[bucket] = dict(_shares(record, schedule, stream, bucket, position))
        return found[bucket].get(name)

    return served


def _shares(
    record: Record, schedule: Schedule, stream: Stream, bucket: str, position: int
) -> Iterator[tuple[str, ServedShare]]:
    by_era = [[shard for shard in each.shards if shard.bucket == bucket] for each in record.eras]
    shards = [joined for joined in by_era if joined]
    growth = [schedule.growth[number][bucket] for number, joined in enumerate(by_era) if joined]
    try:
        plans = [_plan_as_it_was(stream, each) for each in shards]
    except _NotInCache:
        return
    key = order_key(record.settings.seed, bucket)
    order = BucketOrder([plan.sequences for plan in plans], growth, key, shuffle=record.settings.shuffle)
    progress = order.progress(schedule.served(position)[bucket]).tolist()
    group = 0
    for plan, members in zip(plans, shards, strict=True):
        reached: dict[int, set[int]] = {}
        for inner in range(plan.groups):
            for span in plan.spans_of(inner):
                reached.setdefault(span.shard, set()).add(progress[group + inner])
        group += plan.groups
        yield from ((members[number].name, _share(found)) for number, found in reached.items())


def _share(reached: set[int]) -> ServedShare:
    if reached == {Progress.ALL}:
        return "all"
    return "none" if reached == {Progress.NONE} else "some"


def _plan_as_it_was(stream: Stream, shards: Sequence[RecordedShard]) -> BucketPlan:
    """The plan of shards as a run knew them; their indexes may have changed since, so only the cache is asked."""

    def refuse(path: Path) -> Offsets:
        raise _NotInCache

    return open_plan(
        [_AsItWas(shard.entries, shard.tokens, shard.index_digest, Path(shard.name)) for shard in shards],
        max_length=stream.settings.max_length,
        overlap=stream.settings.overlap,
        packing=stream.settings.packing,
        cache=stream.cache,
        index_of=refuse,
    )


@dataclass(frozen=True)
class _AsItWas:
    entries: int
    tokens: int
    index_digest: str
    idx_path: Path
