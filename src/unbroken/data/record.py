"""What a loader's state keeps of its stream: all that decides which sample has which number.

That is the settings, and era by era the shards that joined and how many sequences each bucket had. It is JSON, a short
list for each shard. Reading treats it as something anybody may have written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, cast

from unbroken.data.changed import RecordedShard, from_json, recorded, to_json
from unbroken.data.schedule import Generation, OnDry, Phase
from unbroken.data.stream import Era, Settings, Stream
from unbroken.store.fields import Malformed, Table

SCHEMA: Final = "unbroken.stream/1"


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
        "on_dry": era.on_dry,
        "sequences": dict(stream.generations[number].sequences),
        "shards": to_json(recorded(joined)),
    }


# ---- reading ----


def read_record(value: object) -> Record:
    """The record of a stream.

    Raises:
        Malformed: it is none.
    """
    table = Table(value, "the record of the stream")
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
    on_dry = cast("OnDry", row.one_of("on_dry", ["halt", "renormalise"]))
    era = Era(row.whole("at_sample"), frozenset(shard.key for shard in shards), row.whole("epochs") or None, on_dry)
    return RecordedEra(era, shards, {bucket: counts.whole(bucket) for bucket in row.table("sequences")})
