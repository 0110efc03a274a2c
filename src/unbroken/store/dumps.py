"""Emergency dumps as evidence: where they stand, which of them together are a checkpoint, and what is said of the rest.

In an emergency every rank writes what it holds into a directory of its own, on fast local disk, and asks nobody. One
such dump is no checkpoint. A checkpoint exists if every rank of that world has left a whole dump of the same step by
the same job, and if this job can read them all: a dump in the local area counts on the host that wrote it, a copy in
the persistent area counts everywhere. That is decided here, at resume, from what is on disk; nothing is ever told in
advance. Knows no tensors.
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
from unbroken.store.scan import scan

FOLDER: Final = "emergency"
FACTS: Final = "emergency"
_AREA: Final = "area.json"
_AREA_SCHEMA: Final = "unbroken.emergency-area/1"
_POINTER_SCHEMA: Final = "unbroken.emergency-pointer/1"
_LIMIT_BYTES: Final = 1 << 20
RANK: Final = "rank-"


@dataclass(frozen=True)
class Area:
    """Where the dumps of one run stand: below ``key`` in a directory of this host, and in one that all hosts see.

    ``takes_dumps`` is False where some host cannot write there: what stands in it still counts.
    """

    key: str
    local: Path | None = None
    persistent: Path | None = None
    before: tuple[str, ...] = ()
    takes_dumps: bool = True

    def roots(self) -> list[tuple[Path, bool]]:
        """The directories to look into, each with whether it counts on every host."""
        if self.local == self.persistent:
            return [] if self.persistent is None else [(self.persistent, True)]
        return [(root, root == self.persistent) for root in (self.local, self.persistent) if root is not None]

    def store(self, root: Path, rank: int, files: Files = LOCAL) -> Store:
        """The store of one rank's dumps."""
        return Store(root / self.key / f"{RANK}{rank:05}", files)


@dataclass(frozen=True)
class Dump:
    """One rank's dump as it was found: whose it is, and where it stands."""

    rank: int
    world: int
    step: int
    job: str
    host: str
    id: str
    saved_at_ns: int
    root: str
    name: str
    is_shared: bool

    @property
    def moment(self) -> "Moment":
        """What all dumps of one checkpoint have in common."""
        return Moment(self.step, self.job, self.world)

    def store(self, files: Files = LOCAL) -> Store:
        """The store it stands in."""
        return Store(Path(self.root), files)


@dataclass(frozen=True, order=True)
class Moment:
    """The step, job and world of an emergency checkpoint."""

    step: int
    job: str
    world: int

    def __str__(self) -> str:
        return f"emergency_step_{self.step}"


@dataclass(frozen=True)
class Pointer:
    """What a rank leaves in the run's own directory once its dump is durable; a later job anywhere can say where it is.

    ``copy`` is where a proven copy stands that every host sees; None while there is none.
    """

    rank: int
    world: int
    step: int
    job: str
    host: str
    path: str
    copy: str | None = None

    @property
    def moment(self) -> Moment:
        """What all dumps of one checkpoint have in common."""
        return Moment(self.step, self.job, self.world)


@dataclass(frozen=True)
class Sight:
    """What one rank of a job sees: dumps it can use, dumps of another host, and what is wrong with others."""

    host: str
    dumps: tuple[Dump, ...] = ()
    strangers: tuple[Dump, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Choice:
    """The moment to go on from and who reads which dump: copies of rank ``r``'s by the ranks that see them."""

    moment: Moment | None = None
    copies: Mapping[int, tuple[tuple[int, Dump], ...]] = field(default_factory=dict)
    passed_over: tuple[tuple[str, str], ...] = ()


def dump_name(step: int, at_ns: int) -> str:
    """The name of a dump; the second is in it, so that people can tell two of one step apart."""
    return f"emergency_step_{step}_{at_ns // 1_000_000_000}"


# ---- the area of a run ----


def read_area(run: Path, files: Files = LOCAL) -> Area | None:
    """Under which key the dumps of a run stand; None if it never had an area.

    Raises:
        RecordDamaged: it cannot be read, so that another run's dumps could be taken for this one's.
        StorageFailed: the system refused.
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
    """The area of a run, made at its first use; a new one leaves all dumps so far behind, for a run that goes back.

    Raises:
        RecordDamaged: the one that stands there cannot be read.
        StorageFailed: the system refused.
    """
    found = read_area(run, files)
    if found is not None and not is_new:
        return found
    before = () if found is None else (*found.before, found.key)
    # Drawn, not derived from the path: a run that is deleted and begun anew must never meet the dumps of the old one.
    area = Area(f"{run.resolve().name}-{secrets.token_hex(4)}", before=before)
    files.make_directory(run / FOLDER, durable=True)
    body = {"schema": _AREA_SCHEMA, "key": area.key, "before": list(before)}
    # crash here: the old area or the new one; no dump stands in the new one yet.
    files.replace(run / FOLDER / _AREA, json.dumps(body, sort_keys=True).encode(), scratch=scratch(job, "area"))
    return area


def _record(path: Path, schema: str, files: Files) -> Table:
    try:
        body = Table(parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), path.name)
        body.one_of("schema", (schema,))
    except (ValueError, Malformed) as wrong:
        raise RecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong
    return body


# ---- pointers ----


def pointer_path(run: Path, rank: int) -> Path:
    """Where a rank's pointer stands in the run's directory."""
    return run / FOLDER / f"{RANK}{rank:05}.json"


def point(run: Path, pointer: Pointer, files: Files = LOCAL) -> None:
    """Say in the run's directory where a dump stands, in one instant; only after the dump is durable.

    Raises:
        StorageFailed: the system refused; the old pointer is intact.
    """
    files.make_directory(run / FOLDER, durable=True)
    body = {"schema": _POINTER_SCHEMA, **vars(pointer)}
    path = pointer_path(run, pointer.rank)
    # crash here: the pointer of before or this one; what either names was durable before it was written.
    files.replace(path, json.dumps(body, sort_keys=True).encode(), scratch=scratch(pointer.job, path.stem))


def read_pointers(run: Path, files: Files = LOCAL) -> list[Pointer]:
    """What the ranks of earlier jobs have pointed at, by rank; a pointer that cannot be read points at nothing.

    Raises:
        StorageFailed: the system refused.
    """
    folder = run / FOLDER
    if files.find(folder) is None:
        return []
    found = []
    for node in files.list_directory(folder):
        if node.kind is NodeKind.FILE and node.name.startswith(RANK) and node.name.endswith(".json"):
            try:
                found.append(_pointer(_record(folder / node.name, _POINTER_SCHEMA, files)))
            except (RecordDamaged, Malformed):
                # It only tells people where to look; the dumps speak for themselves.
                continue
            except StorageFailed:
                # Other ranks sweep theirs at the same time.
                if files.find(folder / node.name) is not None:
                    raise
    return found


def _pointer(body: Table) -> Pointer:
    ranks = {name: body.whole(name, below=MOST_RANKS) for name in ("rank", "world")}
    texts = {name: body.text(name) for name in ("job", "host", "path")}
    return Pointer(**ranks, **texts, step=body.whole("step"), copy=body.optional_text("copy"))  # type: ignore[arg-type]


# ---- looking ----


def look(area: Area, host: str, pointers: Iterable[Pointer] = (), files: Files = LOCAL) -> Sight:
    """What of a run's dumps can be seen from here: names and sizes only, every byte is proven when it is read.

    Where the pointers of earlier jobs lead is looked at too: a job may be started with other directories, or none.

    Raises:
        StorageFailed: the system refused.
    """
    dumps: list[Dump] = []
    strangers: list[Dump] = []
    damaged: list[tuple[str, str]] = []
    for root, is_shared in _places(area, pointers, files).items():
        store = Store(root, files)
        for name in scan(store).committed:
            verdict = verify(store, name, Level.QUICK)
            found = _dump(store, name, verdict.manifest, area.key, is_shared=is_shared)
            if found is None or not verdict.is_sound:
                why = str(verdict.findings[0]) if verdict.findings else "it is no dump of this run"
                damaged.append((str(store.path(name)), why))
            elif is_shared or same_host(found.host, host):
                dumps.append(found)
            else:
                strangers.append(found)
    return Sight(host, tuple(dumps), tuple(strangers), tuple(damaged))


def _places(area: Area, pointers: Iterable[Pointer], files: Files) -> dict[Path, bool]:
    """The roots of the stores to look at, each with whether what stands there counts on every host."""
    found = {store.root: is_shared for root, is_shared in area.roots() for store in rank_stores(area, root, files)}
    for pointer in pointers:
        found.setdefault(Path(pointer.path).parent, pointer.copy == pointer.path)
        if pointer.copy is not None:
            found.setdefault(Path(pointer.copy).parent, True)
    return found


def rank_stores(area: Area, root: Path, files: Files) -> Iterator[Store]:
    """The stores below a root, one for each rank that ever dumped there.

    Raises:
        StorageFailed: the system refused.
    """
    folder = root / area.key
    if files.find(folder) is None:
        return
    for node in files.list_directory(folder):
        if node.kind is NodeKind.DIRECTORY and node.name.startswith(RANK):
            yield Store(folder / node.name, files)


def _dump(store: Store, name: str, manifest: Manifest | None, key: str, *, is_shared: bool) -> Dump | None:
    if manifest is None or manifest.kind != EMERGENCY:
        return None
    try:
        facts = Table(manifest.facts.get(FACTS), FACTS)
        if facts.text("run") != key:
            return None
        rank, world = (facts.whole(each, below=MOST_RANKS) for each in ("rank", "world"))
        host = facts.text("host")
    except Malformed:
        return None
    at_ns, where = manifest.saved_at_ns, str(store.root)
    return Dump(rank, world, manifest.step, manifest.job, host, manifest.id, at_ns, where, name, is_shared)


# ---- choosing ----


def choose_dumps(
    sights: Sequence[Sight],
    pointers: Iterable[Pointer],
    *,
    is_newer: Callable[[Moment], bool],
    failed: Mapping[Moment, str] | None = None,
) -> Choice:
    """The newest moment of which every rank's dump is there and can be read; and why each newer one was passed over.

    Args:
        sights: what each rank of this job sees.
        pointers: what the run's directory says of dumps that nobody may see.
        is_newer: whether a moment is ahead of what the run would resume from without it.
        failed: moments that turned out damaged when they were read, with the reason.
    """
    seen: dict[Moment, dict[int, list[tuple[int, Dump]]]] = {}
    for reader, sight in enumerate(sights):
        for dump in sight.dumps:
            seen.setdefault(dump.moment, {}).setdefault(dump.rank, []).append((reader, dump))
    absent = _absent(sights, pointers)
    passed: list[tuple[str, str]] = []
    for moment in sorted(filter(is_newer, seen.keys() | absent.keys()), reverse=True):
        ranks = seen.get(moment, {})
        lacking = sorted(set(range(moment.world)) - ranks.keys())
        if reason := (failed or {}).get(moment) or _why_not(lacking, moment, absent.get(moment, {}), sights):
            passed.append((str(moment), reason))
            continue
        return Choice(moment, {rank: _copies(found) for rank, found in ranks.items()}, tuple(passed))
    return Choice(passed_over=tuple(passed))


def _copies(found: Iterable[tuple[int, Dump]]) -> tuple[tuple[int, Dump], ...]:
    """The copies of one dump, the best first; another dump of the same step is no copy of it."""
    best, *others = sorted(found, key=_preference)
    return (best, *(each for each in others if each[1].id == best[1].id))


def _preference(found: tuple[int, Dump]) -> tuple[int, bool, int]:
    """The last dump of a step before earlier ones, the local disk before the shared one, the first rank to see it."""
    reader, dump = found
    return -dump.saved_at_ns, dump.is_shared, reader


def _absent(sights: Sequence[Sight], pointers: Iterable[Pointer]) -> dict[Moment, dict[int, tuple[str, str]]]:
    """By moment and rank: the host and path of dumps that are known of and cannot be used from here."""
    found: dict[Moment, dict[int, tuple[str, str]]] = {}
    for pointer in pointers:
        found.setdefault(pointer.moment, {})[pointer.rank] = (pointer.host, pointer.path)
    for stranger in (dump for sight in sights for dump in sight.strangers):
        found.setdefault(stranger.moment, {})[stranger.rank] = (stranger.host, f"{stranger.root}/{stranger.name}")
    return found


def _why_not(
    lacking: Collection[int], moment: Moment, absent: Mapping[int, tuple[str, str]], sights: Sequence[Sight]
) -> str | None:
    if not lacking:
        return None
    here = ", ".join(sorted({machine_of(sight.host) for sight in sights}))
    hosts = [sight.host for sight in sights]
    for rank in lacking:
        host, path = absent.get(rank, ("", ""))
        if host and not any(same_host(host, one) for one in hosts):
            return (
                f"rank {rank}'s dump is on host {machine_of(host)} ({path}), this job runs on {here}, and "
                "persistent_dir holds no copy of it"
            )
    gone = [f"rank {rank}'s dump is gone from {absent[rank][1]}" for rank in lacking if rank in absent]
    never = ", ".join(str(rank) for rank in lacking if rank not in absent)
    left = [f"of {moment.world} ranks, {never} left no whole dump of it"] if never else []
    return "; ".join((*gone, *left))
