"""The records of a tokenization: its plan, the finished units, and the final record.

``.tokenize/`` is next to the shards while the work is in progress: the plan, the tokenizer, one record per finished
unit, and the processes that take part with their claims (``claims.py``). ``tokenization.json`` stays afterwards, so
that the same command can see that nothing is left to do. Every record has a checksum of itself.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from unbroken.data.corpus.folders import COMMAND, UNFINISHED
from unbroken.data.corpus.listing import TokenizerIdentity, identity_from_json, identity_to_json
from unbroken.data.corpus.shards import ShardRecord
from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.request import TokenizeOptions
from unbroken.data.ingest.sources import TextSource
from unbroken.data.ingest.units import Unit
from unbroken.errors import ShardDamaged, StorageFailed, UnsafeName
from unbroken.files import Files
from unbroken.store.digest import digest_bytes
from unbroken.store.envelope import opened_bare, sealed_bare
from unbroken.store.fields import Malformed

FINISHED: Final = "tokenization.json"
PLAN: Final = "plan.json"
_LIMIT_BYTES: Final = 1 << 30
_ATTEMPT: Final = re.compile(r"[0-9a-z-]{0,80}")
_CLEARINGS: Final = 20


T = TypeVar("T")


@dataclass(frozen=True)
class TokenizePlan:
    """The plan of a tokenization: options, files and units.

    ``engine_dropped`` is why the fast engine must not be used any more; None while it may be.
    """

    options: TokenizeOptions
    tokenizer: TokenizerIdentity
    eod_token: str | None
    sources: tuple[TextSource, ...]
    units: tuple[Unit, ...]
    engine_dropped: str | None = None

    @property
    def digest(self) -> str:
        """A digest that separates this plan's records from those of another."""
        # Two processes may drop the engine at once, each for its own reason: their plan is the same.
        said = self if self.engine_dropped is None else replace(self, engine_dropped="")
        return digest_bytes(_encoded(_plan_to_json(said))).hex()[:16]


@dataclass
class SourceShare:
    """What a unit took from one byte range, by target folder, and the digests of its blocks."""

    stretch: Stretch
    blocks: tuple[str, ...] = ()
    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit: its shards by target folder, and what it took from each byte range.

    ``attempt`` is in the names of its shards until they are published.
    """

    engine: str
    shards: Mapping[str, Sequence[ShardRecord]]
    shares: Sequence[SourceShare]
    attempt: str = ""

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(sum(share.tokens.values()) for share in self.shares)


@dataclass(frozen=True)
class Totals:
    """Totals of the shards of an output folder, and of skipped documents."""

    documents: int = 0
    tokens: int = 0
    shards: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A finished tokenization: options, files with their digests, and units per folder."""

    options: TokenizeOptions
    tokenizer: TokenizerIdentity
    sources: Mapping[str, tuple[int, str]]
    units: Mapping[str, int]
    totals: Totals


@dataclass(frozen=True)
class WorkFolder:
    """The records of one output folder, and the operations that change them."""

    files: Files
    output: Path

    @property
    def folder(self) -> Path:
        """The folder that exists while the work is in progress."""
        return self.output / UNFINISHED

    @property
    def plan_path(self) -> Path:
        """The file of the plan."""
        return self.folder / PLAN

    def tokenizer_path(self, plan: TokenizePlan) -> Path:
        """A copy of the tokenizer; none for the built-in one.

        Its digest is in the name: a process with another tokenizer, which is going to fail, does not overwrite it.
        """
        return self.folder / f"tokenizer-{digest_bytes(plan.tokenizer.digest.encode()).hex()[:16]}.json"

    @property
    def finished_path(self) -> Path:
        """The file of the final record."""
        return self.output / FINISHED

    @property
    def processes_path(self) -> Path:
        """The folder with a lease for each process that takes part."""
        return self.folder / "processes"

    def units_path(self, plan: TokenizePlan) -> Path:
        """The folder of one plan's unit records and claims."""
        return self.folder / f"units-{plan.digest}"

    # ---- the plan ----

    def begin(self, plan: TokenizePlan, *, tokenizer: bytes | None, command: str, scratch: str) -> None:
        """Write a plan unless there is one; from now on readers of the folder see that it is unfinished.

        ``scratch`` is a name unique to this process.

        Raises:
            StorageFailed: an I/O error.
        """
        # crash here: a folder without a plan; no shard was written, and the next start writes its own plan.
        for folder in (self.units_path(plan), self.processes_path):
            self.files.make_directory(folder, durable=True)
        # crash here: as before.
        self.files.replace(self.folder / COMMAND, f"{command}\n".encode(), scratch=scratch)
        if tokenizer is not None:
            # crash here: as before, with the command that resumes.
            self.files.replace(self.tokenizer_path(plan), tokenizer, scratch=scratch)
        # crash here: as before, with the tokenizer beside it.
        self.files.create_once(self.plan_path, sealed_bare(_encoded(_plan_to_json(plan))), scratch=scratch)

    def plan(self) -> TokenizePlan | None:
        """The plan in progress; None if there is none.

        Raises:
            ShardDamaged: the plan is damaged, of another version, or a name in it leads out of the folders.
            StorageFailed: an I/O error.
        """
        found = self._read(self.plan_path)
        return None if found is None else _understood(self.plan_path, _plan, found)

    def replace_plan(self, plan: TokenizePlan, *, by: str) -> None:
        """Replace the plan; ``by`` is the name of this process.

        Raises:
            StorageFailed: an I/O error.
        """
        self._write(self.plan_path, _plan_to_json(plan), scratch=f".writing-plan-{by}")

    # ---- units ----

    def record(self, plan: TokenizePlan, number: int, record: UnitRecord) -> bool:
        """Record a finished unit; says whether it is this record that counts, because there was none.

        Raises:
            StorageFailed: an I/O error; also if the plan was finished meanwhile.
        """
        content = sealed_bare(_encoded(_unit_to_json(record)))
        # crash here: drafts of shards without a record; another process or the next start does their unit again.
        return self.files.create_once(self._unit_path(plan, number), content, scratch=f".{number}-{record.attempt}")

    def has_record(self, plan: TokenizePlan, number: int) -> bool:
        """Whether a unit has a record, sound or not.

        Raises:
            StorageFailed: an I/O error.
        """
        return self.files.find(self._unit_path(plan, number)) is not None

    def unit(self, plan: TokenizePlan, number: int) -> UnitRecord | None:
        """The record of a unit; None if it has to be done.

        Raises:
            StorageFailed: an I/O error.
        """
        try:
            path = self._unit_path(plan, number)
            found = self._read(path)
            return None if found is None else _understood(path, _unit, found)
        except ShardDamaged:
            # Doing it again gives the same shards.
            return None

    def forget(self, plan: TokenizePlan, number: int) -> None:
        """Remove the record of a unit, so that it is done again.

        Raises:
            StorageFailed: an I/O error.
        """
        # crash here: drafts of shards without a record.
        self.files.remove_file(self._unit_path(plan, number))
        self.files.sync_directory(self.units_path(plan))

    def _unit_path(self, plan: TokenizePlan, number: int) -> Path:
        return self.units_path(plan) / f"{number:06d}.json"

    # ---- the end ----

    def finish(self, finished: Finished, *, by: str) -> None:
        """Write the final record; ``by`` is the name of this process.

        Raises:
            StorageFailed: an I/O error.
        """
        body = {
            "options": _options_to_json(finished.options),
            "tokenizer": identity_to_json(finished.tokenizer),
            "sources": [[name, *finished.sources[name]] for name in sorted(finished.sources)],
            "totals": asdict(finished.totals),
            "units": dict(finished.units),
        }
        # crash here: a plan with every unit done; the next process or start finishes it.
        self._write(self.finished_path, body, scratch=f".writing-tokenization-{by}")

    def clear(self) -> None:
        """Remove the work folder, the plan first: without it nothing is in progress.

        Raises:
            StorageFailed: an I/O error.
        """
        if self.files.find(self.folder) is None:
            return
        self.files.remove_file(self.plan_path)
        self.files.sync_directory(self.folder)
        self.tidy()

    def tidy(self) -> None:
        """Remove a work folder without a plan.

        Raises:
            StorageFailed: an I/O error.
        """
        for attempt in range(_CLEARINGS):
            if self.files.find(self.folder) is None or self.files.find(self.plan_path) is not None:
                return
            try:
                # crash here: a folder without a plan, which the next start removes.
                self.files.remove_tree(self.folder)
            except StorageFailed:
                # Another process renewed its lease in it meanwhile; it will see that the plan is gone.
                if attempt == _CLEARINGS - 1:
                    raise
        self.files.sync_directory(self.output)

    def finished(self) -> Finished | None:
        """The final record of this folder; None if there is none.

        Raises:
            ShardDamaged: the record is damaged.
            StorageFailed: an I/O error.
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
            raise ShardDamaged(path=path, complaint="its bytes do not match its own checksum")
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
        complaint = f"unsafe name {refused.name!r}: {refused.reason}"
        raise ShardDamaged(path=path, complaint=complaint) from refused


def _options_to_json(options: TokenizeOptions) -> dict[str, Any]:
    # Left out if not set, so that the records of older folders keep their bytes.
    return {name: value for name, value in asdict(options).items() if (name, value) != ("overlap_probability", None)}


def _plan_to_json(plan: TokenizePlan) -> dict[str, Any]:
    # Left out if it was not: plans of older versions keep their digest.
    dropped = {} if plan.engine_dropped is None else {"engine_dropped": plan.engine_dropped}
    return {
        **dropped,
        "options": _options_to_json(plan.options),
        "tokenizer": identity_to_json(plan.tokenizer),
        "eod_token": plan.eod_token,
        "sources": [[source.name, source.size_bytes] for source in plan.sources],
        "units": [[u.folder, u.number, [[s.name, s.first, s.last] for s in u.stretches]] for u in plan.units],
    }


def _finished(found: dict[str, Any]) -> Finished:
    return Finished(
        options=TokenizeOptions(**found["options"]),
        tokenizer=identity_from_json(found["tokenizer"]),
        sources={_inside(name): (size, digest) for name, size, digest in found["sources"]},
        units=found["units"],
        totals=Totals(**found["totals"]),
    )


def _inside(name: object) -> str:
    """A name from a record, if it stays inside its folder.

    The record may be hostile: files are read, written and removed under these names.
    """
    if not isinstance(name, str) or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise UnsafeName(name=str(name)[:200], reason="it leads out of the folder")
    return name


def _plan(found: dict[str, Any]) -> TokenizePlan:
    return TokenizePlan(
        options=TokenizeOptions(**found["options"]),
        tokenizer=identity_from_json(found["tokenizer"]),
        eod_token=found["eod_token"],
        sources=tuple(TextSource(_inside(name), size) for name, size in found["sources"]),
        units=tuple(
            Unit(_inside(folder), number, tuple(Stretch(_inside(name), *ends) for name, *ends in stretches))
            for folder, number, stretches in found["units"]
        ),
        engine_dropped=found.get("engine_dropped"),
    )


def _unit_to_json(record: UnitRecord) -> dict[str, Any]:
    return {
        **({"attempt": record.attempt} if record.attempt else {}),
        "engine": record.engine,
        "shards": {folder: [asdict(shard) for shard in shards] for folder, shards in record.shards.items()},
        "shares": [asdict(share) for share in record.shares],
    }


def _unit(found: dict[str, Any]) -> UnitRecord:
    return UnitRecord(
        engine=found["engine"],
        shards={
            _inside(folder): [ShardRecord(**{**shard, "name": _inside(shard["name"])}) for shard in shards]
            for folder, shards in found["shards"].items()
        },
        shares=[
            SourceShare(**{**share, "stretch": Stretch(**share["stretch"]), "blocks": tuple(share["blocks"])})
            for share in found["shares"]
        ],
        attempt=_attempt(found.get("attempt", "")),
    )


def _attempt(name: str) -> str:
    if not _ATTEMPT.fullmatch(name):
        raise Malformed("an attempt has an invalid name")
    return name
