"""Resume a stream from the record in a loader's state.

The settings that decide the order and all recorded shards must be unchanged. Two changes are possible, both from the
current sample on: new shards may join, if the user accepts ``data.grow``, and ``epochs`` or what happens to an
exhausted bucket may change. Any other difference is an error that names all differences.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, cast

from unbroken.data.corpus.compare import Changes, RecordedShard, compare, from_json, recorded, to_json
from unbroken.data.order.bucket_draws import order_key
from unbroken.data.order.epoch_order import BucketOrder, GroupProgress
from unbroken.data.order.schedule import DataGeneration, OnExhausted, Phase, Schedule
from unbroken.data.packing.bucket_plan import BucketPlan, open_plan
from unbroken.data.packing.groups import Offsets
from unbroken.data.stream import Era, Stream, StreamSettings
from unbroken.errors import StreamDiffers
from unbroken.errors.data import ServedShare
from unbroken.quoting.amounts import count, plural
from unbroken.store.fields import Malformed, Table
from unbroken.store.old_names import updated

# ---- what a loader's state keeps ----

SCHEMA: Final = "unbroken.stream/2"


@dataclass(frozen=True)
class RecordedEra:
    """An era as recorded: the shards that joined, and the sequences of each bucket from then on."""

    era: Era
    shards: tuple[RecordedShard, ...]
    sequences: Mapping[str, int]

    @property
    def generation(self) -> DataGeneration:
        """The same for a schedule."""
        return DataGeneration(self.era.at_sample, self.sequences, self.era.epochs, self.era.on_exhausted)


@dataclass(frozen=True)
class StreamRecord:
    """A stream as recorded."""

    settings: StreamSettings
    split: str
    eras: tuple[RecordedEra, ...]

    @property
    def shards(self) -> tuple[RecordedShard, ...]:
        """Every shard that the stream had."""
        return tuple(shard for each in self.eras for shard in each.shards)


# ---- writing ----


def stream_record(stream: Stream) -> dict[str, Any]:
    """The record of a stream, for a loader's state."""
    settings = stream.settings
    record: dict[str, Any] = {
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
        record["phases"] = [_phase_json(phase) for phase in settings.phases]
    return record


def _phase_json(phase: Phase) -> dict[str, Any]:
    return {"samples": phase.samples, "mix": {bucket: str(weight) for bucket, weight in phase.mix}}


def _era_json(stream: Stream, number: int) -> dict[str, Any]:
    era = stream.eras[number]
    joined = [shard for shard in stream.shards if (shard.bucket, shard.name) in era.shards]
    return {
        "at_sample": era.at_sample,
        "epochs": era.epochs or 0,  # 0: without end
        "on_exhausted": era.on_exhausted,
        "sequences": dict(stream.generations[number].sequences),
        "shards": to_json(recorded(joined)),
    }


# ---- reading ----


def read_stream_record(value: object) -> StreamRecord:
    """Decode the record of a stream.

    Raises:
        Malformed: the value is not such a record.
    """
    table = Table(updated(value), "the record of the stream")
    table.one_of("schema", [SCHEMA])
    try:
        seed = int(table.text("seed"))
    except ValueError:
        raise Malformed("the seed in the record of the stream is not a number") from None
    settings = StreamSettings(
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
    return StreamRecord(settings, table.text("split"), eras)


def _phase(row: Table) -> Phase:
    try:
        mix = tuple((bucket, Fraction(weight)) for bucket, weight in row.table("mix").items())
    except (TypeError, ValueError, ZeroDivisionError):
        raise Malformed("a weight in the record of the stream is not a number") from None
    return Phase(row.whole("samples"), mix)


def _era(row: Table) -> RecordedEra:
    shards = from_json(row.table("shards"))
    counts = Table(dict(row.table("sequences")), "the sequences in the record of the stream")
    on_exhausted = cast("OnExhausted", row.one_of("on_exhausted", ["halt", "renormalise"]))
    era = Era(
        row.whole("at_sample"), frozenset(shard.key for shard in shards), row.whole("epochs") or None, on_exhausted
    )
    return RecordedEra(era, shards, {bucket: counts.whole(bucket) for bucket in row.table("sequences")})


# ---- resuming ----

GROW: Final = "data.grow"


@dataclass(frozen=True)
class ResumedStream:
    """The resumed stream, and notices for the log."""

    stream: Stream
    notices: tuple[str, ...]


def resume_stream(record: StreamRecord, stream: Stream, position: int, accepted: Collection[str]) -> ResumedStream:
    """The current stream with the recorded history, for a run at sample ``position``.

    Args:
        record: the record in the loader's state.
        stream: a stream over the data as it is now.
        position: the samples served so far.
        accepted: names the user accepted; ``data.grow`` lets new shards join.

    Raises:
        StreamDiffers: a setting or the number of sequences differs from the record.
        DataChanged: shards are changed or missing, or new shards were not accepted.
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
        eras.append(Era(position, joining, latest.epochs, latest.on_exhausted))
    continued = stream if tuple(eras) == stream.eras else stream.with_eras(eras)
    _require_same_sequences(record, continued)
    return ResumedStream(continued, tuple(notices))


def _notices(changes: Changes, before: Era, now: Era, position: int) -> Iterator[str]:
    if changes.added:
        buckets = sorted({change.bucket for change in changes.added})
        yield f"{plural(len(changes.added), 'shard')} joined {', '.join(buckets)} at sample {position:,}"
    if before.epochs != now.epochs:
        yield f"epochs {_epochs(now.epochs)} from sample {position:,} on, {_epochs(before.epochs)} before"
    if before.on_exhausted != now.on_exhausted:
        effect = {"halt": "ends the run", "renormalise": "leaves its share to the other buckets"}
        yield f"an exhausted bucket {effect[now.on_exhausted]} from sample {position:,} on"


def _epochs(epochs: int | None) -> str:
    return "without limit" if epochs is None else count(epochs)


# ---- what must not differ ----

# What a stream's argument is called, where its record has another name.
_ARGUMENTS: Final = {"overlap": "overlap_size"}


def _require_same_settings(record: StreamRecord, stream: Stream) -> None:
    names = [each.name for each in fields(record.settings)]
    sides = record.settings, stream.settings
    pairs = [(_ARGUMENTS.get(name, name), *(getattr(side, name) for side in sides)) for name in names]
    pairs.append(("split", record.split, stream.corpus.split))
    if differences := tuple((name, _shown(before), _shown(now)) for name, before, now in pairs if before != now):
        raise StreamDiffers(differences=differences)


def _shown(value: Any) -> str:  # noqa: ANN401 - a setting of any type
    if isinstance(value, tuple):
        return "; ".join(
            f"{phase.samples:,} samples of " + ", ".join(f"{bucket} {weight}" for bucket, weight in phase.mix)
            for phase in value
        )
    return str(value)


def _require_same_sequences(record: StreamRecord, stream: Stream) -> None:
    """With another number of sequences, the same sample number would mean another sequence."""
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
    """The plan of the recorded data is not in the cache."""


def _served_of(record: StreamRecord, stream: Stream, position: int) -> Callable[[str, str], ServedShare | None]:
    """A function from a recorded shard to how much of it was served; None if that is no longer known."""
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
    record: StreamRecord, schedule: Schedule, stream: Stream, bucket: str, position: int
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
    if reached == {GroupProgress.ALL}:
        return "all"
    return "none" if reached == {GroupProgress.NONE} else "some"


def _plan_as_it_was(stream: Stream, shards: Sequence[RecordedShard]) -> BucketPlan:
    """The plan of shards as recorded, from the cache only: their indexes may have changed since."""

    def refuse(path: Path) -> Offsets:
        raise _NotInCache

    return open_plan(
        [_AsItWas(shard.entries, shard.tokens, shard.index_digest, Path(shard.name)) for shard in shards],
        max_length=stream.settings.max_length,
        overlap=stream.settings.overlap,
        packing=stream.settings.packing,
        cache=stream.cache_dir,
        index_of=refuse,
    )


@dataclass(frozen=True)
class _AsItWas:
    entries: int
    tokens: int
    index_digest: str
    idx_path: Path
