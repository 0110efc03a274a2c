"""What a resume takes from the mirrors: the newest checkpoint if the local disk lacks it, and parts that are damaged.

Pure of training: it makes the local store whole, and the resume then chooses from the local store as ever. A mirror
that cannot be reached is an error only where the local store has nothing to resume from: a run never starts over
because its mirror was away. A copy that turns out damaged is skipped: the same checkpoint is tried in the next
mirror, then the next older one.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.errors import (
    CheckpointUnknown,
    DamagedCheckpoint,
    ManifestDamaged,
    NoUsableCheckpoint,
    StorageError,
    UnbrokenError,
)
from unbroken.mirror.background import Mirror
from unbroken.mirror.fetch import Fetched, fetch_checkpoint, local_copy, plan_fetch
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits
from unbroken.quoting.amounts import count, plural
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.choose import choose
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest
from unbroken.store.mirrored import forget_uploads, record_upload, upload_of
from unbroken.store.names import REWINDS, scratch, step_of
from unbroken.store.references import named_in
from unbroken.store.rewind import abandoned_ids
from unbroken.store.scan import newest_first, read_quietly, scan, without_manifest

_RECORD_LIMIT_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Brought:
    """One checkpoint that was brought back, and from where."""

    mirror: str
    fetched: Fetched

    def sentence(self) -> str:
        """One line of text."""
        what = "fetched" if self.fetched.is_new else f"repaired {plural(len(self.fetched.parts), 'part')} of"
        # An extended run has a `final` of each of its targets.
        return f"{what} {self.fetched.name} (step {count(self.fetched.manifest.step)}) from {self.mirror}"


@dataclass(frozen=True)
class Skipped:
    """A copy in a mirror that was not used, and why; ``id`` and ``step`` are None if its manifest cannot be read."""

    mirror: str
    name: str
    id: str | None
    step: int | None
    reason: str

    def sentence(self) -> str:
        """One line of text."""
        return f"the copy of {self.name} in {self.mirror} is not used: {self.reason}"


@dataclass(frozen=True)
class Taking:
    """Who takes from the mirrors: for names of what is staged, times of records, limits.

    With ``is_dry`` nothing is copied and nothing is written: what would be taken is returned all the same.
    """

    job: str
    clock_ns: Callable[[], int]
    limits: Limits
    is_dry: bool = False

    def take(self, remote: Store, name: str, store: Store, *, is_refreshing: bool = False) -> Fetched:
        """Make sure that a checkpoint of a mirror is here and whole, or say what that would copy.

        Raises:
            UnbrokenError: as ``fetch_checkpoint``.
        """
        if self.is_dry:
            return plan_fetch(remote, name, store, is_refreshing=is_refreshing)
        return fetch_checkpoint(
            remote, name, store, self.limits, job=self.job, at_ns=self.clock_ns(), is_refreshing=is_refreshing
        )


def _unheard(skipped: Skipped) -> None:
    """Nobody is told."""


def bring_back(
    store: Store,
    mirrors: Sequence[Mirror],
    taking: Taking,
    *,
    refused: Callable[[Mirror, StorageError], None],
    skipped: Callable[[Skipped], None] = _unheard,
    without: Iterable[str] = (),
    is_repairing: bool = True,
) -> list[Brought]:
    """Repair the newest local checkpoints and fetch a newer one, where the mirrors have them.

    Args:
        store: the local store.
        mirrors: those of the run; of two copies of a checkpoint, that of the first mirror is tried first.
        taking: who takes.
        refused: is told of each mirror that could not be asked, where that is no error.
        skipped: is told of each copy that is damaged.
        without: the ids of checkpoints that are not fetched.
        is_repairing: whether to repair, too; otherwise only a newer checkpoint is fetched.

    Raises:
        UnbrokenError: a mirror refused, and neither this disk nor another mirror has anything to resume from.
        NoUsableCheckpoint: the same, and every copy in the mirrors is damaged.
        StorageFailed: I/O error here.
    """
    seeking = _Seeking(store, taking, skipped)
    asked = [mirror for mirror in mirrors if seeking.has_learned_rewinds(mirror)]
    here, passed = _newest(store)
    tried = [seeking.repair(verdict.name, asked) for verdict in passed if is_repairing]
    brought = [each for each in tried if each is not None]
    if brought:
        here = brought[0].fetched.manifest if taking.is_dry else _newest(store)[0]
    newer = seeking.newer(asked, here, _abandoned(store) | set(without))
    if newer is not None:
        brought.append(newer)
    # Only now: of two mirrors, one is enough.
    is_empty = here is None and newer is None
    if is_empty and seeking.refusals:
        raise seeking.refusals[0][1]
    if is_empty and seeking.skipped:
        reasons = tuple((f"{each.name} in {each.mirror}", each.reason) for each in seeking.skipped)
        raise NoUsableCheckpoint(store=store.root, skipped=reasons)
    for mirror, refusal in seeking.refusals:
        refused(mirror, refusal)
    return brought


def learn_rewinds(store: Store, mirrors: Sequence[Mirror], taking: Taking, *, warn: Callable[[str], None]) -> None:
    """Copy the records of rewinds from all mirrors, before a request is taken for one that nobody has carried out.

    Raises:
        UnbrokenError: every mirror refused, and there is nothing here: what they know is all that is known.
        StorageFailed: I/O error here.
    """
    refusals: list[tuple[Mirror, StorageError]] = []
    for mirror in mirrors:
        try:
            take_rewinds(store_at(mirror.client), store, taking)
        except StorageError as refused:
            refusals.append((mirror, refused))
    if refusals and len(refusals) == len(mirrors) and _newest(store)[0] is None:
        raise refusals[0][1]
    for mirror, refusal in refusals:
        warn(f"the mirror {mirror.url} was not asked where this run went back to: {refusal.message}")


@dataclass(frozen=True)
class _Copy:
    """A checkpoint in a mirror, as its manifest and its sizes look."""

    mirror: Mirror
    remote: Store
    verdict: Verdict
    step: float


class _Seeking:
    """One search in the mirrors: which of them refused, and which copies are damaged."""

    def __init__(self, store: Store, taking: Taking, told: Callable[[Skipped], None]) -> None:
        self._store, self._taking, self._told = store, taking, told
        self.refusals: list[tuple[Mirror, StorageError]] = []
        self.skipped: list[Skipped] = []
        self._bad: dict[tuple[str, str], UnbrokenError | None] = {}

    def has_learned_rewinds(self, mirror: Mirror) -> bool:
        """Copy its records of rewinds; says whether it can be asked."""
        if self._taking.is_dry:
            return True
        try:
            take_rewinds(store_at(mirror.client), self._store, self._taking)
        except StorageError as refused:
            self.refusals.append((mirror, refused))
        return self._is_there(mirror)

    def newer(self, mirrors: Sequence[Mirror], here: Manifest | None, given_up: set[str]) -> Brought | None:
        """Fetch the newest checkpoint that is newer than the one here and whole in a mirror."""
        found = [self._copies(mirror, given_up) for mirror in mirrors if self._is_there(mirror)]
        for copy in heapq.merge(*found, key=lambda each: -each.step):
            if here is not None and copy.step <= here.step:
                return None
            manifest = copy.verdict.manifest
            if manifest is None or not copy.verdict.is_sound:
                self._skip(copy.mirror, copy.verdict.name, manifest, str(copy.verdict.findings[0]), None)
            elif (brought := self._take(copy.mirror, copy.remote, copy.verdict.name, is_newest=True)) is not None:
                return brought
        return None

    def repair(self, name: str, mirrors: Sequence[Mirror]) -> Brought | None:
        """Replace the damaged parts of a local checkpoint, or all of it if its manifest is damaged."""
        manifest = read_quietly(self._store, name)
        if manifest is None and not _has_lost_manifest(self._store, name):
            return None
        for mirror in mirrors:
            remote = store_at(mirror.client)
            try:
                there = self._same(remote, name, manifest)
            except StorageError as refused:
                self.refusals.append((mirror, refused))
                continue
            brought = self._take(mirror, remote, there, is_newest=manifest is None) if there is not None else None
            if brought is not None:
                return brought
        return None

    def named(self, wanted: str, mirrors: Sequence[Mirror]) -> Brought | None:
        """Fetch the checkpoint that a step or a name means."""
        for mirror in mirrors:
            remote = store_at(mirror.client)
            try:
                name = named_in(remote, wanted)
            except CheckpointUnknown:
                continue
            except StorageError as refused:
                self.refusals.append((mirror, refused))
                continue
            brought = self._take(mirror, remote, name, is_newest=False)
            if brought is not None:
                return brought
        return None

    def first_error(self) -> UnbrokenError | None:
        """Why nothing came of it, if something was tried."""
        damaged = [error for error in self._bad.values() if error is not None]
        return next(iter([*damaged, *(error for _, error in self.refusals)]), None)

    def _is_there(self, mirror: Mirror) -> bool:
        return all(mirror is not away for away, _ in self.refusals)

    def _copies(self, mirror: Mirror, given_up: set[str]) -> Iterator[_Copy]:
        """The checkpoints of a mirror, newest first; read one by one, since mostly the first is enough."""
        remote = store_at(mirror.client)
        try:
            given_up = given_up | _abandoned(remote)
            for name in newest_first(remote, scan(remote).committed):
                verdict = verify(remote, name, Level.QUICK)
                manifest, stated = verdict.manifest, step_of(name)
                if verdict.is_removed or (manifest is not None and manifest.id in given_up):
                    continue
                step = manifest.step if manifest is not None else stated
                yield _Copy(mirror, remote, verdict, math.inf if step is None else step)
                if not self._is_there(mirror):
                    return
        except StorageError as refused:
            self.refusals.append((mirror, refused))

    def _take(self, mirror: Mirror, remote: Store, name: str, *, is_newest: bool) -> Brought | None:
        """One checkpoint from one mirror; None if its copy is damaged or the mirror refused."""
        manifest, taking = read_quietly(remote, name), self._taking
        if manifest is not None and (mirror.url, manifest.id) in self._bad:
            return None
        try:
            fetched = taking.take(remote, name, self._store, is_refreshing=is_newest)
        except (DamagedCheckpoint, ManifestDamaged) as damaged:
            self._skip(mirror, name, manifest, next(iter(damaged.details()), damaged.message), damaged)
            return None
        except StorageError as refused:
            self.refusals.append((mirror, refused))
            return None
        if fetched.is_new and not taking.is_dry:
            # All of it was just read there and verified.
            upload = upload_of(mirror.url, fetched.manifest, fetched.name, name)
            record_upload(self._store, upload, job=taking.job, at_ns=taking.clock_ns())
        return Brought(mirror.url, fetched)

    def _skip(
        self, mirror: Mirror, name: str, manifest: Manifest | None, reason: str, error: UnbrokenError | None
    ) -> None:
        id_ = manifest.id if manifest is not None else None
        self._bad[mirror.url, id_ or name] = error
        if id_ is not None and not self._taking.is_dry:
            # It is no second copy: what is here is kept, and uploaded again.
            forget_uploads(self._store, mirror.url, [id_])
        skipped = Skipped(mirror.url, name, id_, manifest.step if manifest is not None else step_of(name), reason)
        self.skipped.append(skipped)
        self._told(skipped)

    def _same(self, remote: Store, name: str, manifest: Manifest | None) -> str | None:
        """The name there of a local checkpoint; without its manifest, the only one that can be meant by its name."""
        names = scan(remote).committed
        if manifest is not None:
            return next((each for each in names if _has_id(remote, each, manifest)), None)
        given_up = _abandoned(self._store) | _abandoned(remote)
        alike = [each for each in names if each.partition(".")[0] == name.partition(".")[0]]
        read = [(each, found) for each in alike if (found := read_quietly(remote, each)) is not None]
        meant = [each for each, found in read if found.id not in given_up and local_copy(self._store, found.id) is None]
        return meant[0] if len(meant) == 1 else None


def repair(
    store: Store,
    name: str,
    mirrors: Sequence[Mirror],
    taking: Taking,
    *,
    skipped: Callable[[Skipped], None] = _unheard,
) -> Brought | None:
    """Replace the damaged parts of a local checkpoint by those of a mirror; None if no mirror has it.

    Raises:
        UnbrokenError: no mirror has a whole copy, and one refused or has a damaged one; or the disk refused.
    """
    seeking = _Seeking(store, taking, skipped)
    return _or_raise(seeking, seeking.repair(name, mirrors))


def fetch_named(
    store: Store,
    wanted: str,
    mirrors: Sequence[Mirror],
    taking: Taking,
    *,
    skipped: Callable[[Skipped], None] = _unheard,
) -> Brought | None:
    """Fetch the checkpoint that a step or a name means; None if no mirror has it.

    Raises:
        UnbrokenError: no mirror has a whole copy, and one refused or has a damaged one; or the disk refused.
    """
    seeking = _Seeking(store, taking, skipped)
    return _or_raise(seeking, seeking.named(wanted, mirrors))


def _or_raise(seeking: _Seeking, brought: Brought | None) -> Brought | None:
    if brought is None and (error := seeking.first_error()) is not None:
        raise error
    return brought


def remote_ids(mirrors: Sequence[Mirror], *, after_step: int) -> dict[str, str]:
    """The checkpoints of the mirrors behind a step, by name: a rewind gives them up as well.

    Raises:
        UnbrokenError: a mirror refused.
    """
    found: dict[str, str] = {}
    for mirror in mirrors:
        remote = store_at(mirror.client)
        for name in scan(remote).committed:
            manifest = read_quietly(remote, name)
            if manifest is not None and manifest.step > after_step:
                found[name] = manifest.id
    return found


def _has_id(remote: Store, name: str, manifest: Manifest) -> bool:
    found = read_quietly(remote, name)
    return found is not None and found.id == manifest.id


def _newest(store: Store) -> tuple[Manifest | None, list[Verdict]]:
    """The newest local checkpoint that looks usable, and the newer ones that do not."""
    found = choose(newest_first(store, scan(store).committed), lambda name: verify(store, name, Level.QUICK))
    chosen = found.chosen.manifest if found.chosen is not None else None
    return chosen, [over.verdict for over in found.skipped]


def _has_lost_manifest(store: Store, name: str) -> bool:
    """Whether the manifest is there and damaged, or gone; one of a newer format is neither."""
    return verify(store, name, Level.QUICK).is_damaged or name in without_manifest(store, scan(store))


def _abandoned(store: Store) -> set[str]:
    return {id_ for ids in abandoned_ids(store).values() for id_ in ids}


def take_rewinds(remote: Store, store: Store, taking: Taking) -> None:
    """Copy the mirror's records of rewinds that are not here: after a wiped disk they are all that is left of them."""
    if remote.files.find(remote.path(REWINDS)) is None:
        return
    store.files.make_directory(store.path(REWINDS), durable=True)
    here = {node.name for node in store.files.list_directory(store.path(REWINDS))}
    for node in remote.files.list_directory(remote.path(REWINDS)):
        if node.name not in here and node.name.endswith(".json"):
            data = remote.files.read_bytes(remote.path(REWINDS) / node.name, limit_bytes=_RECORD_LIMIT_BYTES)
            # crash here: a record more, or not yet; each stands for itself.
            store.files.create_once(
                store.path(REWINDS) / node.name, data, scratch=scratch(taking.job, "rewind"), is_contested=False
            )
