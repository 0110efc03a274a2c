"""Removing released checkpoints and what crashes left, after a commit and never before; and pins, which keep one.

A checkpoint stops existing in one instant, by a rename to a name no reader trusts; only then are its files removed, so
a crash in the middle never leaves half a checkpoint under a good name. Files that are not ours are never removed: a
checkpoint with a foreign file inside is left whole and named.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointError, StorageFailed
from unbroken.store.commit import point_latest, walk_files
from unbroken.store.directory import Store
from unbroken.store.keep import Candidate, Decision, Policy, decide, keeps_everything
from unbroken.store.manifest import Manifest
from unbroken.store.mirrored import missing_copies
from unbroken.store.names import ABANDONED, MANIFEST, PINS, DraftName, scratch, scratch_draft, trash_name
from unbroken.store.rewind import move_abandoned
from unbroken.store.scan import holds_store, scan

# ---- pins ----

_SCHEMA: Final = "unbroken.pin/1"


def pin(store: Store, name: str, *, reason: str, job: str, at_ns: int) -> bool:
    """Pin a committed checkpoint; says whether it was not pinned before.

    Raises:
        ManifestDamaged: the checkpoint has no trustworthy manifest, so nothing is known to be worth keeping.
        StorageFailed: I/O error.
    """
    manifest = store.read_outline(name)
    store.files.make_directory(store.path(PINS), durable=True)
    body = {"schema": _SCHEMA, "name": name, "id": manifest.id, "reason": reason, "at_ns": at_ns}
    # crash here: pinned or not; a scratch file that the next pin removes.
    return store.files.create_once(
        store.path(PINS) / manifest.id,
        (json.dumps(body, sort_keys=True) + "\n").encode(),
        scratch=scratch(job, "pin"),
    )


def unpin(store: Store, name: str) -> bool:
    """Remove a pin; says whether there was one.

    Raises:
        ManifestDamaged: the checkpoint has no trustworthy manifest.
        StorageFailed: I/O error.
    """
    manifest = store.read_outline(name)
    if manifest.id not in pinned_ids(store):
        return False
    store.files.remove_file(store.path(PINS) / manifest.id)
    store.files.sync_directory(store.path(PINS))
    return True


def pinned_ids(store: Store) -> frozenset[str]:
    """The ids of all pinned checkpoints.

    Raises:
        StorageFailed: I/O error.
    """
    nodes = store.files.list_present(store.path(PINS))
    return frozenset(node.name for node in nodes if node.kind is NodeKind.FILE and not node.name.startswith("."))


# ---- sweeping ----


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep would remove, with the bytes each holds, and what it leaves alone, with the reason."""

    checkpoints: Mapping[str, int]
    drafts: Mapping[str, int]
    leftovers: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    unfinished_rewind: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All that would be removed."""
        return (*self.checkpoints, *self.drafts, *self.leftovers)

    @property
    def freed_bytes(self) -> int:
        """The bytes that would come free."""
        return sum(self.checkpoints.values()) + sum(self.drafts.values())


def candidates(store: Store, names: Iterable[str], away: Collection[str] = ()) -> list[Candidate]:
    """What the policies may know of committed checkpoints; one whose manifest does not verify is not usable.

    What is only in mirrors of ``away`` does not count as mirrored.

    Raises:
        StorageFailed: I/O error to list the pins or what is mirrored.
    """
    pins = pinned_ids(store)
    # Read here, like the pins: whoever decides about checkpoints cannot forget those that wait for a mirror.
    missing = missing_copies(store, away)
    found = []
    for name in names:
        try:
            manifest = store.read_outline(name)
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
                is_mirrored=not missing(manifest.id) if missing is not None else None,
            )
        )
    return found


def _has_all_parts(store: Store, name: str, manifest: Manifest) -> bool:
    try:
        present = dict(walk_files(store.files, store.path(name)))
    except StorageFailed:
        return False
    return all(present.get(part.name) == part.size_bytes for part in manifest.parts)


def plan_sweep(
    store: Store,
    released: Collection[str],
    *,
    is_live: Callable[[DraftName], bool],
    spared: Mapping[str, str] | None = None,
) -> SweepPlan:
    """What to remove: released checkpoints, torn drafts of jobs that are gone, leftovers of earlier sweeps.

    ``is_live`` says whether a job may still be writing a draft; such a draft is never touched.
    ``spared`` names checkpoints to leave in any case, each with the reason.

    Raises:
        StorageFailed: I/O error.
    """
    inventory = scan(store)
    committed = frozenset(inventory.committed)
    checkpoints: dict[str, int] = {}
    left: list[tuple[str, str]] = []
    for name in released:
        obstacle, size_bytes = _weigh(store, name, committed)
        obstacle = (spared or {}).get(name, obstacle)
        if obstacle:
            left.append((name, obstacle))
        else:
            checkpoints[name] = size_bytes
    left += [(str(torn.name), "its job may still be writing it") for torn in inventory.torn if is_live(torn.name)]
    return SweepPlan(
        checkpoints=checkpoints,
        drafts={str(t.name): t.weigh(store)[1] for t in inventory.torn if not is_live(t.name)},
        leftovers=tuple(
            leftover.name
            for leftover in inventory.leftover
            if leftover.job is None or not is_live(scratch_draft(leftover.job))
        ),
        left=tuple(left),
        unfinished_rewind=tuple(name for name in inventory.abandoned if not name.startswith(f"{ABANDONED}/")),
    )


def carry_out(store: Store, plan: SweepPlan) -> None:
    """Remove what a plan names.

    Raises:
        StorageFailed: I/O error; what is gone is gone wholly.
    """
    if plan.unfinished_rewind:
        move_abandoned(store, plan.unfinished_rewind)
    for name in plan.checkpoints:
        _remove_checkpoint(store, name)
    for name in (*plan.drafts, *plan.leftovers):
        # crash here: a draft or trash with fewer files, still nothing a reader trusts, still swept next time.
        store.files.remove_tree(store.path(name))


def sweep(store: Store, released: Collection[str], *, is_live: Callable[[DraftName], bool]) -> SweepPlan:
    """Plan and carry out; returns what was removed.

    Raises:
        StorageFailed: I/O error; what is gone is gone wholly.
    """
    plan = plan_sweep(store, released, is_live=is_live)
    carry_out(store, plan)
    return plan


def _weigh(store: Store, name: str, committed: Collection[str]) -> tuple[str | None, int]:
    """What forbids removing a checkpoint, if anything, and the bytes it holds."""
    if name not in committed:
        return "it is not a committed checkpoint", 0
    if holds_store(store.files, store.path(name)):
        return "it is a run with checkpoints of its own, not a checkpoint", 0
    try:
        manifest = store.read_outline(name)
    except StorageFailed as refused:
        if refused.is_missing:
            return "it was removed meanwhile", 0
        raise
    except CheckpointError as refused:
        return f"its manifest does not verify, so its files are not known to be ours ({refused.kind})", 0
    ours = {part.name for part in manifest.parts} | {MANIFEST}
    foreign = [found for found, _ in walk_files(store.files, store.path(name)) if found not in ours]
    if foreign:
        return f"it holds a file that is not ours: {foreign[0]}", 0
    return None, manifest.size_bytes


def _remove_checkpoint(store: Store, name: str) -> None:
    trash = store.path(trash_name(name))
    # A crash may have left an earlier checkpoint of this name in the trash.
    store.files.remove_tree(trash)
    try:
        # crash here: the checkpoint under its own name, or as trash; in one instant it stops being a checkpoint.
        store.files.publish(store.path(name), trash)
    except StorageFailed as refused:
        # The run that is at work, or a command, was first.
        if refused.is_missing:
            return
        raise
    # crash here: trash with fewer files, which the next sweep removes.
    store.files.remove_tree(trash)


def settle(
    store: Store,
    committed: str,
    policies: Collection[Policy],
    *,
    job: str,
    is_live: Callable[[DraftName], bool],
    resume_target: str | None = None,
    away: Collection[str] = (),
) -> tuple[Decision, SweepPlan]:
    """All that follows a commit, in the one order that loses nothing: the hint, then keep, then sweep.

    Where the policies can release nothing, no manifest is read and the decision is empty. ``away`` names the mirrors
    that this job has not found in place: what they are recorded to hold is kept here.

    Raises:
        StorageFailed: I/O error; the new checkpoint is committed all the same.
    """
    point_latest(store, committed, job=job)
    if keeps_everything(policies):
        decision = Decision({}, ())
    else:
        known = candidates(store, scan(store).committed, away)
        decision = decide(known, tuple(policies), resume_target=resume_target)
    return decision, sweep(store, decision.released, is_live=is_live)
