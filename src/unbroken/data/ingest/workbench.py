"""The records of a tokenization: what was begun, which units are done, what was finished.

``.tokenize/`` stands beside the shards while the work goes on: a plan, the tokenizer, one record for each unit that is
published. ``tokenization.json`` stays when it is over, so that the same command can say that nothing is left to do.
Every record carries a digest of itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from unbroken.data.corpus.folders import COMMAND, UNFINISHED
from unbroken.data.corpus.listing import TokenizerIdentity, identity_from_json, identity_to_json
from unbroken.data.corpus.shards import ShardRecord
from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.sources import Source
from unbroken.data.ingest.units import Unit
from unbroken.errors import ShardDamaged, UnsafeName
from unbroken.files import Files
from unbroken.store.digest import digest_bytes
from unbroken.store.envelope import opened_bare, sealed_bare
from unbroken.store.fields import Malformed

FINISHED: Final = "tokenization.json"
PLAN: Final = "plan.json"
_DROPPED: Final = "reference-only.json"
_LIMIT_BYTES: Final = 1 << 30


T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What decides the bytes of the shards, beside the documents and the tokenizer."""

    text_field: str = "text"
    min_text_length: int = 0
    shard_tokens: int = 1 << 25
    val_fraction: str | None = None
    max_length: int | None = None
    overlap_size: int | None = None
    overlap_probability: str | None = None


@dataclass(frozen=True)
class Plan:
    """A tokenization that was begun: how, from which files, in which units."""

    options: Options
    tokenizer: TokenizerIdentity
    eod_token: str | None
    sources: tuple[Source, ...]
    units: tuple[Unit, ...]

    @property
    def digest(self) -> str:
        """What tells this plan's records from another's."""
        return digest_bytes(_encoded(_plan_to_json(self))).hex()[:16]


@dataclass
class SourceShare:
    """What a unit took from one stretch, by target folder, and the digests of the stretch's blocks."""

    stretch: Stretch
    blocks: tuple[str, ...] = ()
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitRecord:
    """A unit that is published: its shards by target folder, and what it took from each stretch."""

    engine: str
    shards: Mapping[str, Sequence[ShardRecord]]
    shares: Sequence[SourceShare]


@dataclass(frozen=True)
class Totals:
    """What is in the shards of an output folder, and what was left out."""

    documents: int = 0
    tokens: int = 0
    shards: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A tokenization that is over: how, from which files with which digests, with how many units a folder."""

    options: Options
    tokenizer: TokenizerIdentity
    sources: Mapping[str, tuple[int, str]]
    units: Mapping[str, int]
    totals: Totals


@dataclass(frozen=True)
class Workbench:
    """Where the records of one output folder lie, and the moves that change them."""

    files: Files
    output: Path

    @property
    def folder(self) -> Path:
        """The folder that is there while the work goes on."""
        return self.output / UNFINISHED

    @property
    def plan_path(self) -> Path:
        """What was begun."""
        return self.folder / PLAN

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer as it was when the work began; not there for the built-in one."""
        return self.folder / "tokenizer.json"

    @property
    def finished_path(self) -> Path:
        """What was finished."""
        return self.output / FINISHED

    def units_path(self, plan: Plan) -> Path:
        """The records of one plan's units; those of another plan are never taken for them."""
        return self.folder / f"units-{plan.digest}"

    # ---- the plan ----

    def begin(self, plan: Plan, *, tokenizer: bytes | None, command: str, scratch: str) -> None:
        """Put a plan down, unless one is there; from now on readers of the folder know that shards are missing.

        ``scratch`` is a name that no other process uses.

        Raises:
            StorageFailed: the system refused.
        """
        self.files.make_directory(self.folder, durable=True)
        # crash here: a folder without a plan; no shard was written, and the next start puts its own plan there.
        self.files.replace(self.folder / COMMAND, f"{command}\n".encode(), scratch=scratch)
        if tokenizer is not None:
            # crash here: as before, with the command that goes on.
            self.files.replace(self.tokenizer_path, tokenizer, scratch=scratch)
        # crash here: as before, with the tokenizer beside it.
        self.files.create_once(self.plan_path, sealed_bare(_encoded(_plan_to_json(plan))), scratch=scratch)

    def plan(self) -> Plan | None:
        """What was begun and is not finished; None if nothing is.

        Raises:
            ShardDamaged: the plan does not prove itself, is of another version, or names what leads out of the folders.
            StorageFailed: the system refused.
        """
        found = self._read(self.plan_path)
        return None if found is None else _understood(self.plan_path, _plan, found)

    def replace_plan(self, plan: Plan) -> None:
        """Put another plan in the place of the one there is.

        Raises:
            StorageFailed: the system refused.
        """
        self._write(self.plan_path, _plan_to_json(plan), scratch=".writing-plan")

    # ---- units ----

    def record(self, plan: Plan, number: int, record: UnitRecord) -> None:
        """A unit is published: the restart after a kill does not do it again.

        Raises:
            StorageFailed: the system refused.
        """
        self.files.make_directory(self.units_path(plan), durable=True)
        # crash here: shards that no record speaks of; the next start does their unit again.
        self._write(self._unit_path(plan, number), _unit_to_json(record), scratch=f".writing-{number}")

    def unit(self, plan: Plan, number: int) -> UnitRecord | None:
        """What is recorded of a unit; None if it is to be done.

        Raises:
            StorageFailed: the system refused.
        """
        try:
            path = self._unit_path(plan, number)
            found = self._read(path)
            return None if found is None else _understood(path, _unit, found)
        except ShardDamaged:
            # Doing it again gives the same shards.
            return None

    def forget(self, plan: Plan, number: int) -> None:
        """A unit is to be done again.

        Raises:
            StorageFailed: the system refused.
        """
        if self.unit(plan, number) is not None:
            self.files.remove_file(self._unit_path(plan, number))
            self.files.sync_directory(self.units_path(plan))

    def _unit_path(self, plan: Plan, number: int) -> Path:
        return self.units_path(plan) / f"{number:06d}.json"

    # ---- the dropped engine ----

    def drop_engine(self, plan: Plan, reason: str) -> None:
        """Nothing of this tokenization may come from the faster engine any more.

        Raises:
            StorageFailed: the system refused.
        """
        self.files.make_directory(self.units_path(plan), durable=True)
        # crash here: the engine is tried once more, and differs once more.
        self._write(self.units_path(plan) / _DROPPED, {"reason": reason}, scratch=".writing-dropped")

    def dropped_engine(self, plan: Plan) -> str | None:
        """Why the faster engine was dropped; None if it was not.

        Raises:
            ShardDamaged: the record does not prove itself.
            StorageFailed: the system refused.
        """
        found = self._read(self.units_path(plan) / _DROPPED)
        return None if found is None else str(found["reason"])

    # ---- the end ----

    def finish(self, finished: Finished) -> None:
        """Everything is published and listed: say so, and take the plan away.

        Raises:
            StorageFailed: the system refused.
        """
        body = {
            "options": _options_to_json(finished.options),
            "tokenizer": identity_to_json(finished.tokenizer),
            "sources": [[name, *finished.sources[name]] for name in sorted(finished.sources)],
            "totals": asdict(finished.totals),
            "units": dict(finished.units),
        }
        self._write(self.finished_path, body, scratch=".writing-tokenization")
        # crash here: finished, and a plan of which every unit is done; the next start takes it away.
        self.clear()

    def clear(self) -> None:
        """Remove what only the work in progress needs, the plan first: without it nothing is in progress.

        Raises:
            StorageFailed: the system refused.
        """
        if self.files.find(self.folder) is None:
            return
        self.files.remove_file(self.plan_path)
        self.files.sync_directory(self.folder)
        # crash here: a folder without a plan, which the next start removes.
        self.files.remove_tree(self.folder)
        self.files.sync_directory(self.output)

    def finished(self) -> Finished | None:
        """What was finished in this folder; None if nothing was.

        Raises:
            ShardDamaged: the record does not prove itself.
            StorageFailed: the system refused.
        """
        found = self._read(self.finished_path)
        return None if found is None else _understood(self.finished_path, _finished, found)

    # ---- bytes ----

    def _write(self, path: Path, body: Mapping[str, Any], scratch: str) -> None:
        self.files.replace(path, sealed_bare(_encoded(body)), scratch=scratch)

    def _read(self, path: Path) -> dict[str, Any] | None:
        if self.files.find(path) is None:
            return None
        body = opened_bare(self.files.read_bytes(path, limit_bytes=_LIMIT_BYTES))
        if body is None:
            raise ShardDamaged(path=path, complaint="its bytes do not match its own digest")
        found: dict[str, Any] = json.loads(body)
        return found


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _understood(path: Path, make: Callable[[dict[str, Any]], T], found: dict[str, Any]) -> T:
    try:
        return make(found)
    except (KeyError, TypeError, ValueError, Malformed) as wrong:
        complaint = f"it is of another version: {' '.join(str(wrong).split())[:120]}"
        raise ShardDamaged(path=path, complaint=complaint) from wrong
    except UnsafeName as refused:
        complaint = f"the name {refused.name!r} is refused: {refused.reason}"
        raise ShardDamaged(path=path, complaint=complaint) from refused


def _options_to_json(options: Options) -> dict[str, Any]:
    # Left out where it says nothing: folders that were made before it existed keep their records, byte for byte.
    return {name: value for name, value in asdict(options).items() if (name, value) != ("overlap_probability", None)}


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    return {
        "options": _options_to_json(plan.options),
        "tokenizer": identity_to_json(plan.tokenizer),
        "eod_token": plan.eod_token,
        "sources": [[source.name, source.size_bytes] for source in plan.sources],
        "units": [[u.folder, u.number, [[s.name, s.first, s.last] for s in u.stretches]] for u in plan.units],
    }


def _finished(found: dict[str, Any]) -> Finished:
    return Finished(
        options=Options(**found["options"]),
        tokenizer=identity_from_json(found["tokenizer"]),
        sources={_inside(name): (size, digest) for name, size, digest in found["sources"]},
        units=found["units"],
        totals=Totals(**found["totals"]),
    )


def _inside(name: object) -> str:
    """A name that was read back, if it leads to nothing outside the folder it is relative to.

    Whoever hands on a folder may have written it: files are read, written and removed under these names.
    """
    if not isinstance(name, str) or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise UnsafeName(name=str(name)[:200], reason="it leads out of the folder")
    return name


def _plan(found: dict[str, Any]) -> Plan:
    return Plan(
        options=Options(**found["options"]),
        tokenizer=identity_from_json(found["tokenizer"]),
        eod_token=found["eod_token"],
        sources=tuple(Source(_inside(name), size) for name, size in found["sources"]),
        units=tuple(
            Unit(_inside(folder), number, tuple(Stretch(_inside(name), *ends) for name, *ends in stretches))
            for folder, number, stretches in found["units"]
        ),
    )


def _unit_to_json(record: UnitRecord) -> dict[str, Any]:
    return {
        "engine": record.engine,
        "shards": {folder: [asdict(shard) for shard in shards] for folder, shards in record.shards.items()},
        "shares": [asdict(share) for share in record.shares],
    }


def _unit(found: dict[str, Any]) -> UnitRecord:
    return UnitRecord(
        engine=found["engine"],
        shards={
            _inside(folder): [ShardRecord(**shard) for shard in shards] for folder, shards in found["shards"].items()
        },
        shares=[
            SourceShare(**{**share, "stretch": Stretch(**share["stretch"]), "blocks": tuple(share["blocks"])})
            for share in found["shares"]
        ],
    )
