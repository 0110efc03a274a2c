"""Emergency dumps on disk: where they are, which of them form a checkpoint, and why the others do not.

In an emergency every rank writes its state into a directory of its own on fast local disk, without the other ranks.
One such dump is not a checkpoint. A dump set is complete if every rank of its world left a whole dump of the same step
by the same job, and usable if this job can read all of them: a dump in the local area is used on the host that wrote
it, a copy in the persistent area on any host. This is decided at resume, from the files alone. Knows no tensors.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.store.check import Level, verify
from unbroken.store.directory import Store
from unbroken.store.fields import MOST_RANKS, Malformed, Table, parsed
from unbroken.store.manifest import Manifest
from unbroken.store.names import EMERGENCY, machine_of, same_host, scratch
from unbroken.store.old_names import updated
from unbroken.store.scan import scan

FOLDER: Final = "emergency"
# The key under which a dump, and a checkpoint made of dumps, says so in its manifest.
METADATA: Final = "emergency"
_AREA: Final = "area.json"
_AREA_SCHEMA: Final = "unbroken.emergency-area/1"
_POINTER_SCHEMA: Final = "unbroken.emergency-pointer/2"
_LIMIT_BYTES: Final = 1 << 20
RANK: Final = "rank-"


@dataclass(frozen=True)
class Area:
    """Where the dumps of one run are: below ``key`` in a directory of this host, and in one that all hosts see.

    ``takes_dumps`` is False where some host cannot write there; existing dumps are still used.
    """

    key: str
    local: Path | None = None
    persistent: Path | None = None
    before: tuple[str, ...] = ()
    takes_dumps: bool = True

    def roots(self) -> list[tuple[Path, bool]]:
        """The directories to search, each with whether all hosts see it."""
        if self.local == self.persistent:
            return [] if self.persistent is None else [(self.persistent, True)]
        return [(root, root == self.persistent) for root in (self.local, self.persistent) if root is not None]

    def store(self, root: Path, rank: int, files: Files = LOCAL) -> Store:
        """The store of one rank's dumps."""
        return Store(root / self.key / f"{RANK}{rank:05}", files)


@dataclass(frozen=True)
class Dump:
    """One rank's dump: whose it is, and where."""

    rank: int
    world_size: int
    step: int
    job: str
    host: str
    id: str
    saved_at_ns: int
    root: str
    name: str
    is_shared: bool

    @property
    def dump_set(self) -> "DumpSet":
        """The set it belongs to."""
        return DumpSet(self.step, self.job, self.world_size)

    def store(self, files: Files = LOCAL) -> Store:
        """The store it is in."""
        return Store(Path(self.root), files)


@dataclass(frozen=True, order=True)
class DumpSet:
    """What the dumps that make one checkpoint have in common: step, job and world size."""

    step: int
    job: str
    world_size: int

    def __str__(self) -> str:
        return f"emergency_step_{self.step}"


@dataclass(frozen=True)
class Pointer:
    """A file in the run's own directory that names a rank's durable dump, so that a job on any host can find it.

    ``copy`` is the path of a verified copy that every host sees; None while there is none.
    """

    rank: int
    world_size: int
    step: int
    job: str
    host: str
    path: str
    copy: str | None = None

    @property
    def dump_set(self) -> DumpSet:
        """The set it belongs to."""
        return DumpSet(self.step, self.job, self.world_size)


@dataclass(frozen=True)
class VisibleDumps:
    """The dumps one rank of a job can see: usable ones, those of another host, and damaged ones with the reason."""

    host: str
    dumps: tuple[Dump, ...] = ()
    elsewhere: tuple[Dump, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DumpChoice:
    """The dump set to resume from; ``copies`` maps each of its ranks to (reader, dump) pairs, the best copy first."""

    dump_set: DumpSet | None = None
    copies: Mapping[int, tuple[tuple[int, Dump], ...]] = field(default_factory=dict)
    skipped: tuple[tuple[str, str], ...] = ()


def dump_name(step: int, at_ns: int) -> str:
    """The name of a dump; the second is in it, so that people can tell two of one step apart."""
    return f"emergency_step_{step}_{at_ns // 1_000_000_000}"


# ---- the area of a run ----


def read_area(run: Path, files: Files = LOCAL) -> Area | None:
    """The key of a run's dumps; None if it never had an area.

    Raises:
        RecordDamaged: it cannot be read, so that another run's dumps could be taken for this one's.
        StorageFailed: I/O error.
    """
    path = run / FOLDER / _AREA
    if files.find(path) is None:
        return None
    body = _record(path, _AREA_SCHEMA, files)
    try:
        return Area(body.text("key"), before=tuple(body.texts("before")))
    except Malformed as wrong:
        raise RecordDamaged(path=path, complaint=str(wrong)) from wrong


def make_area(run: Path, *, job: str, is_new: bool = False, files: Files = LOCAL) -> Area:
    """The area of a run, created at first use. ``is_new`` makes another, without the dumps so far: for a rewind.

    Raises:
        RecordDamaged: the existing record cannot be read.
        StorageFailed: I/O error.
    """
    found = read_area(run, files)
    if found is not None and not is_new:
        return found
    before = () if found is None else (*found.before, found.key)
    # Random, not derived from the path: a run that is deleted and started over must not find the dumps of the old one.
    area = Area(f"{run.resolve().name}-{secrets.token_hex(4)}", before=before)
    files.make_directory(run / FOLDER, durable=True)
    body = {"schema": _AREA_SCHEMA, "key": area.key, "before": list(before)}
    # crash here: the old area or the new one, which has no dump yet.
    files.replace(run / FOLDER / _AREA, json.dumps(body, sort_keys=True).encode(), scratch=scratch(job, "area"))
    return area


def _record(path: Path, schema: str, files: Files) -> Table:
    try:
        body = Table(updated(parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES))), path.name)
        body.one_of("schema", (schema,))
    except (ValueError, Malformed) as wrong:
        raise RecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong
    return body


# ---- pointers ----


def pointer_path(run: Path, rank: int) -> Path:
    """The path of a rank's pointer in the run's directory."""
    return run / FOLDER / f"{RANK}{rank:05}.json"


def point(run: Path, pointer: Pointer, files: Files = LOCAL) -> None:
    """Write a rank's pointer atomically; only after the dump is durable.

    Raises:
        StorageFailed: I/O error; the old pointer is intact.
    """
    files.make_directory(run / FOLDER, durable=True)
    body = {"schema": _POINTER_SCHEMA, **vars(pointer)}
    path = pointer_path(run, pointer.rank)
    # crash here: the pointer of before or this one; what either names was durable before it was written.
    files.replace(path, json.dumps(body, sort_keys=True).encode(), scratch=scratch(pointer.job, path.stem))


def read_pointers(run: Path, files: Files = LOCAL) -> list[Pointer]:
    """The pointers that earlier jobs left; one that cannot be read is ignored.

    Raises:
        StorageFailed: I/O error.
    """
    folder = run / FOLDER
    found = []
    for node in files.list_present(folder):
        if node.kind is NodeKind.FILE and node.name.startswith(RANK) and node.name.endswith(".json"):
            try:
                found.append(_pointer(_record(folder / node.name, _POINTER_SCHEMA, files)))
            except (RecordDamaged, Malformed):
                # A pointer is a hint: the dumps are found by scanning too.
                continue
            except StorageFailed:
                # Another rank may have removed its own meanwhile.
                if files.find(folder / node.name) is not None:
                    raise
    return found


def _pointer(body: Table) -> Pointer:
    ranks = {name: body.whole(name, below=MOST_RANKS) for name in ("rank", "world_size")}
    texts = {name: body.text(name) for name in ("job", "host", "path")}
    return Pointer(**ranks, **texts, step=body.whole("step"), copy=body.optional_text("copy"))  # type: ignore[arg-type]


# ---- finding ----


def look(area: Area, host: str, pointers: Iterable[Pointer] = (), files: Files = LOCAL) -> VisibleDumps:
    """The dumps of a run that this host sees, by names and sizes only; checksums are verified when they are read.

    The targets of pointers are searched too: a job may be started with other directories, or none.

    Raises:
        StorageFailed: I/O error.
    """
    dumps: list[Dump] = []
    elsewhere: list[Dump] = []
    damaged: list[tuple[str, str]] = []
    for root, is_shared in _roots(area, pointers, files).items():
        store = Store(root, files)
        for name in scan(store).committed:
            verdict = verify(store, name, Level.QUICK)
            found = _dump(store, name, verdict.manifest, area.key, is_shared=is_shared)
            if found is None or not verdict.is_sound:
                why = str(verdict.findings[0]) if verdict.findings else "not a dump of this run"
                damaged.append((str(store.path(name)), why))
            elif is_shared or same_host(found.host, host):
                dumps.append(found)
            else:
                elsewhere.append(found)
    return VisibleDumps(host, tuple(dumps), tuple(elsewhere), tuple(damaged))


def _roots(area: Area, pointers: Iterable[Pointer], files: Files) -> dict[Path, bool]:
    """The roots of the stores to search, each with whether all hosts see it."""
    found = {store.root: is_shared for root, is_shared in area.roots() for store in rank_stores(area, root, files)}
    for pointer in pointers:
        found.setdefault(Path(pointer.path).parent, pointer.copy == pointer.path)
        if pointer.copy is not None:
            found.setdefault(Path(pointer.copy).parent, True)
    return found


def rank_stores(area: Area, root: Path, files: Files) -> Iterator[Store]:
    """The stores below a root, one for each rank that ever dumped there.

    Raises:
        StorageFailed: I/O error.
    """
    folder = root / area.key
    for node in files.list_present(folder):
        if node.kind is NodeKind.DIRECTORY and node.name.startswith(RANK):
            yield Store(folder / node.name, files)


def _dump(store: Store, name: str, manifest: Manifest | None, key: str, *, is_shared: bool) -> Dump | None:
    if manifest is None or manifest.kind != EMERGENCY:
        return None
    try:
        found = Table(manifest.metadata.get(METADATA), METADATA)
        if found.text("run") != key:
            return None
        rank, world_size = (found.whole(each, below=MOST_RANKS) for each in ("rank", "world_size"))
        host = found.text("host")
    except Malformed:
        return None
    at_ns, where = manifest.saved_at_ns, str(store.root)
    return Dump(rank, world_size, manifest.step, manifest.job, host, manifest.id, at_ns, where, name, is_shared)


# ---- choosing ----


def choose_dumps(
    visible: Sequence[VisibleDumps],
    pointers: Iterable[Pointer],
    *,
    is_newer: Callable[[DumpSet], bool],
    failed: Mapping[DumpSet, str] | None = None,
) -> DumpChoice:
    """The newest complete and readable dump set, and why each newer one was skipped.

    Args:
        visible: what each rank of this job sees.
        pointers: of dumps that may not be visible to any rank.
        is_newer: whether a dump set is ahead of what the run would resume from without it.
        failed: dump sets that were damaged when they were read, with the reason.
    """
    seen: dict[DumpSet, dict[int, list[tuple[int, Dump]]]] = {}
    for reader, each in enumerate(visible):
        for dump in each.dumps:
            seen.setdefault(dump.dump_set, {}).setdefault(dump.rank, []).append((reader, dump))
    absent = _absent(visible, pointers)
    passed: list[tuple[str, str]] = []
    for dump_set in sorted(filter(is_newer, seen.keys() | absent.keys()), reverse=True):
        ranks = seen.get(dump_set, {})
        lacking = sorted(set(range(dump_set.world_size)) - ranks.keys())
        if reason := (failed or {}).get(dump_set) or _why_not(lacking, dump_set, absent.get(dump_set, {}), visible):
            passed.append((str(dump_set), reason))
            continue
        return DumpChoice(dump_set, {rank: _copies(found) for rank, found in ranks.items()}, tuple(passed))
    return DumpChoice(skipped=tuple(passed))


def _copies(found: Iterable[tuple[int, Dump]]) -> tuple[tuple[int, Dump], ...]:
    """The copies of one dump, the best first. Another dump of the same step is not a copy."""
    best, *others = sorted(found, key=_preference)
    return (best, *(each for each in others if each[1].id == best[1].id))


def _preference(found: tuple[int, Dump]) -> tuple[int, bool, int]:
    """The last dump of a step first, then local disk before shared, then the lowest reader."""
    reader, dump = found
    return -dump.saved_at_ns, dump.is_shared, reader


def _absent(visible: Sequence[VisibleDumps], pointers: Iterable[Pointer]) -> dict[DumpSet, dict[int, tuple[str, str]]]:
    """By dump set and rank: the host and path of dumps that are known and cannot be used from here."""
    found: dict[DumpSet, dict[int, tuple[str, str]]] = {}
    for pointer in pointers:
        found.setdefault(pointer.dump_set, {})[pointer.rank] = (pointer.host, pointer.path)
    for remote in (dump for seen in visible for dump in seen.elsewhere):
        found.setdefault(remote.dump_set, {})[remote.rank] = (remote.host, f"{remote.root}/{remote.name}")
    return found


def _why_not(
    lacking: Collection[int], dump_set: DumpSet, absent: Mapping[int, tuple[str, str]], visible: Sequence[VisibleDumps]
) -> str | None:
    if not lacking:
        return None
    here = ", ".join(sorted({machine_of(seen.host) for seen in visible}))
    hosts = [seen.host for seen in visible]
    for rank in lacking:
        host, path = absent.get(rank, ("", ""))
        if host and not any(same_host(host, one) for one in hosts):
            return (
                f"rank {rank}'s dump is on host {machine_of(host)} ({path}), this job runs on {here}, and "
                "persistent_dir holds no copy of it"
            )
    gone = [f"rank {rank}'s dump is gone from {absent[rank][1]}" for rank in lacking if rank in absent]
    never = ", ".join(str(rank) for rank in lacking if rank not in absent)
    left = [f"no complete dump from rank {never} (world size {dump_set.world_size})"] if never else []
    return "; ".join((*gone, *left))
