"""Removing what keeping released and what crashes left. Delete after, never before.

A checkpoint stops existing in one instant, by a rename to a name no reader trusts; only then are its files removed, so
a crash in the middle never leaves half a checkpoint under a good name. Files that are not ours are never removed: a
checkpoint with a foreign file inside is left whole and named.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from unbroken.errors import CheckpointError, StorageFailed
from unbroken.store.commit import point_latest, walk_files
from unbroken.store.keep import Candidate, Decision, Policy, decide
from unbroken.store.manifest import Manifest
from unbroken.store.names import ABANDONED, MANIFEST, TRASH_PREFIX, DraftName
from unbroken.store.pins import pinned_ids
from unbroken.store.place import Store
from unbroken.store.rewind import set_aside
from unbroken.store.scan import Inventory, scan


@dataclass(frozen=True)
class Swept:
    """What a sweep removed and what it left alone, with the reason."""

    removed: tuple[str, ...] = ()
    freed_bytes: int = 0
    left: tuple[tuple[str, str], ...] = ()


def candidates(
    store: Store, names: Iterable[str], *, is_mirrored: Callable[[Manifest], bool] | None = None
) -> list[Candidate]:
    """What the policies may know of committed checkpoints; one whose manifest is not proven is not usable.

    Raises:
        StorageFailed: the system refused to list the pins.
    """
    pins = pinned_ids(store)
    found = []
    for name in names:
        try:
            manifest = store.read_manifest(name)
        except (CheckpointError, StorageFailed):
            found.append(Candidate(name, step=0, saved_at_ns=0, is_usable=False))
            continue
        found.append(
            Candidate(
                name,
                manifest.step,
                manifest.saved_at_ns,
                manifest.metrics,
                is_usable=_has_all_parts(store, name, manifest),
                is_pinned=manifest.id in pins,
                is_mirrored=is_mirrored(manifest) if is_mirrored else None,
            )
        )
    return found


def _has_all_parts(store: Store, name: str, manifest: Manifest) -> bool:
    try:
        present = dict(walk_files(store.files, store.path(name)))
    except StorageFailed:
        return False
    return all(present.get(part.name) == part.size_bytes for part in manifest.parts)


def sweep(store: Store, released: Collection[str], *, is_live: Callable[[DraftName], bool]) -> Swept:
    """Remove released checkpoints, torn drafts of jobs that are gone, and leftovers of earlier sweeps.

    ``is_live`` says whether somebody may still be writing a draft; such a draft is never touched.

    Raises:
        StorageFailed: the system refused; what is gone is gone wholly.
    """
    inventory = scan(store)
    removed: list[str] = []
    left: list[tuple[str, str]] = []
    freed = 0
    _tidy_abandoned(store, inventory)
    for name in released:
        if name not in inventory.committed:
            left.append((name, "it is not a committed checkpoint"))
            continue
        obstacle, size_bytes = _weigh(store, name)
        if obstacle:
            left.append((name, obstacle))
            continue
        _remove_checkpoint(store, name)
        removed.append(name)
        freed += size_bytes
    for torn in inventory.torn:
        if is_live(torn.name):
            left.append((str(torn.name), "its job is alive"))
            continue
        freed += torn.weigh(store)[1]
        # crash here: a draft with fewer files, still torn, still swept next time.
        store.files.remove_tree(store.path(str(torn.name)))
        removed.append(str(torn.name))
    removed += _remove_leftovers(store, inventory, is_live)
    return Swept(tuple(removed), freed, tuple(left))


def _weigh(store: Store, name: str) -> tuple[str | None, int]:
    """What forbids removing a checkpoint, if anything, and the bytes it holds."""
    try:
        manifest = store.read_manifest(name)
    except CheckpointError as refused:
        return f"its manifest is not proven, so its files are not known to be ours ({refused.kind})", 0
    ours = {part.name for part in manifest.parts} | {MANIFEST}
    foreign = [found for found, _ in walk_files(store.files, store.path(name)) if found not in ours]
    if foreign:
        return f"it holds a file that is not ours: {foreign[0]}", 0
    return None, manifest.size_bytes


def _remove_checkpoint(store: Store, name: str) -> None:
    trash = store.path(f"{TRASH_PREFIX}{name}")
    # A crash may have left an earlier checkpoint of this name in the trash.
    store.files.remove_tree(trash)
    # crash here: the checkpoint under its own name, or as trash; in one instant it stops being a checkpoint.
    store.files.publish(store.path(name), trash)
    # crash here: trash with fewer files, which the next sweep removes.
    store.files.remove_tree(trash)


def _remove_leftovers(store: Store, inventory: Inventory, is_live: Callable[[DraftName], bool]) -> list[str]:
    removed = []
    for leftover in inventory.leftover:
        if leftover.job is not None and is_live(DraftName(leftover.job, 0, 0)):
            continue
        store.files.remove_tree(store.path(leftover.name))
        removed.append(leftover.name)
    return removed


def _tidy_abandoned(store: Store, inventory: Inventory) -> None:
    """Finish a rewind that a crash interrupted."""
    standing = [name for name in inventory.abandoned if not name.startswith(f"{ABANDONED}/")]
    if standing:
        set_aside(store, standing)


def settle(
    store: Store,
    committed: str,
    policies: Collection[Policy],
    *,
    job: str,
    is_live: Callable[[DraftName], bool],
    resume_target: str | None = None,
    is_mirrored: Callable[[Manifest], bool] | None = None,
) -> tuple[Decision, Swept]:
    """All that follows a commit, in the one order that loses nothing: the hint, then keep, then sweep.

    Raises:
        StorageFailed: the system refused; the new checkpoint is committed all the same.
    """
    point_latest(store, committed, job=job)
    names = scan(store).committed
    decision = decide(candidates(store, names, is_mirrored=is_mirrored), tuple(policies), resume_target=resume_target)
    return decision, sweep(store, decision.released, is_live=is_live)
