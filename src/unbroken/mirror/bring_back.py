"""What a resume takes from the mirrors: the newest checkpoint if the local disk lacks it, and parts that are damaged.

Pure of training: it makes the local store whole, and the resume then chooses from the local store as ever. A mirror
that cannot be reached is an error only where the local store has nothing to resume from: a run never starts over
because its mirror was away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.errors import StorageError, UnbrokenError
from unbroken.mirror.background import Mirror
from unbroken.mirror.fetch import Fetched, fetch_checkpoint
from unbroken.mirror.remote import store_at
from unbroken.mirror.transfer import Limits
from unbroken.quoting.amounts import count, plural
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.choose import choose
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest
from unbroken.store.mirrored import record_upload, upload_of
from unbroken.store.names import REWINDS, scratch
from unbroken.store.references import named_in
from unbroken.store.rewind import abandoned_ids
from unbroken.store.scan import newest_first, read_quietly, scan

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
class Taking:
    """Who takes from the mirrors: for names of what is staged, times of records, limits."""

    job: str
    clock_ns: Callable[[], int]
    limits: Limits


def bring_back(
    store: Store, mirrors: Sequence[Mirror], taking: Taking, *, warn: Callable[[str], None]
) -> list[Brought]:
    """Repair the newest local checkpoints and fetch a newer one, where the mirrors have them.

    Raises:
        UnbrokenError: a mirror refused, and neither this disk nor another mirror has anything to resume from.
        StorageFailed: I/O error here.
    """
    brought: list[Brought] = []
    refusals: list[tuple[Mirror, StorageError]] = []
    for mirror in mirrors:
        try:
            brought += _from_one(store, mirror, taking)
        except StorageError as refused:
            refusals.append((mirror, refused))
    # Only now: of two mirrors, one is enough.
    if refusals and _newest(store)[0] is None:
        raise refusals[0][1]
    for mirror, refusal in refusals:
        warn(f"the mirror {mirror.url} was not asked for newer checkpoints: {refusal.message}")
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


def _from_one(store: Store, mirror: Mirror, taking: Taking) -> list[Brought]:
    remote = store_at(mirror.client)
    take_rewinds(remote, store, taking)
    here, passed = _newest(store)
    tried = [repair(store, verdict.name, [mirror], taking) for verdict in passed]
    brought = [each for each in tried if each is not None]
    if brought:
        here, _ = _newest(store)
    there = _newest_remote(remote, _abandoned(store) | _abandoned(remote))
    if there is not None and (here is None or there[1].step > here.step):
        fetched = fetch_checkpoint(
            remote, there[0], store, taking.limits, job=taking.job, at_ns=taking.clock_ns(), is_refreshing=True
        )
        # All of it was just read there and verified.
        upload = upload_of(mirror.url, fetched.manifest, fetched.name, there[0])
        record_upload(store, upload, job=taking.job, at_ns=taking.clock_ns())
        brought.append(Brought(mirror.url, fetched))
    return brought


def repair(store: Store, name: str, mirrors: Sequence[Mirror], taking: Taking) -> Brought | None:
    """Replace the damaged parts of a local checkpoint by those of a mirror; None if no mirror has it.

    Raises:
        UnbrokenError: a mirror refused or its copy is damaged too, or the disk refused.
    """
    manifest = read_quietly(store, name)
    if manifest is None:
        return None
    for mirror in mirrors:
        remote = store_at(mirror.client)
        there = next((each for each in scan(remote).committed if _has_id(remote, each, manifest)), None)
        if there is not None:
            fetched = fetch_checkpoint(remote, there, store, taking.limits, job=taking.job, at_ns=taking.clock_ns())
            return Brought(mirror.url, fetched) if fetched.parts else None
    return None


def fetch_named(store: Store, wanted: str, mirrors: Sequence[Mirror], taking: Taking) -> Brought | None:
    """Fetch the checkpoint that a step or a name means, if a mirror has it.

    Raises:
        UnbrokenError: a mirror refused, or the disk.
    """
    for mirror in mirrors:
        remote = store_at(mirror.client)
        try:
            name = named_in(remote, wanted)
        except UnbrokenError:
            continue
        fetched = fetch_checkpoint(remote, name, store, taking.limits, job=taking.job, at_ns=taking.clock_ns())
        return Brought(mirror.url, fetched)
    return None


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


def _newest_remote(remote: Store, given_up: set[str]) -> tuple[str, Manifest] | None:
    for name in newest_first(remote, scan(remote).committed):
        verdict = verify(remote, name, Level.QUICK)
        if verdict.is_sound and verdict.manifest is not None and verdict.manifest.id not in given_up:
            return name, verdict.manifest
    return None


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
