"""Copies of emergency dumps in a directory that every host sees, and the removal of dumps after a later commit.

A copy gets its name only after all of it was read back and its checksums verified.
"""

import contextlib
from pathlib import Path

from unbroken.errors import CopyDiffers, DamagedCheckpoint
from unbroken.files import LOCAL, Files
from unbroken.store.commit import Draft, Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.dumps import RANK, Area, pointer_path, rank_stores, read_pointers
from unbroken.store.manifest import Manifest
from unbroken.store.names import EMERGENCY, LATEST, DraftName
from unbroken.store.parts import read_part
from unbroken.store.scan import scan
from unbroken.store.sweep import sweep


def copy_dump(source: Store, name: str, target: Store) -> str:
    """Copy a dump to another directory, read it back there, and only then commit it; returns its name.

    Raises:
        CopyDiffers: the copy differs from the dump; it is removed.
        DamagedCheckpoint: the dump itself is not what was written.
        StorageFailed: I/O error; there is no copy.
    """
    manifest = source.read_manifest(name)
    draft = begin(target, step=manifest.step, job=manifest.job)
    try:
        for part in manifest.parts:
            with contextlib.closing(read_part(source.files, source.path(name), manifest, part)) as blocks:
                # crash here: a draft in the other directory, which no reader uses; the dump is untouched.
                draft.write_part(part.name, blocks)
        _require_same(draft, manifest)
        return _commit(draft, manifest, name)
    except BaseException:
        target.files.remove_tree(draft.path)
        raise


def _require_same(draft: Draft, manifest: Manifest) -> None:
    """Read the copy back: a write that returned does not show what is on disk."""
    try:
        for part in manifest.parts:
            for _ in read_part(draft.store.files, draft.path, manifest, part):
                pass
    except DamagedCheckpoint as wrong:
        raise CopyDiffers(path=draft.store.root, findings=wrong.findings) from wrong


def _commit(draft: Draft, manifest: Manifest, name: str) -> str:
    record = Record(
        kind=EMERGENCY,
        saved_at_ns=manifest.saved_at_ns,
        origin=manifest.origin,
        tensors=manifest.tensors,
        metrics=manifest.metrics,
        fingerprint=manifest.fingerprint,
        metadata=manifest.metadata,
    )
    plan = [part.name for part in manifest.parts]
    return commit(draft, plan=plan, parts=manifest.parts, record=record, called=name)


def sweep_dumps(run: Path, area: Area, *, up_to_step: int, share: tuple[int, int], files: Files = LOCAL) -> list[str]:
    """Remove the dumps that a commit of this step or a later one has replaced; returns their paths.

    ``share`` is the rank and the world size, so that no two ranks sweep one directory. Drafts
    and leftovers go too, and all dumps under earlier keys of the run. Only called after the commit.

    Raises:
        StorageFailed: I/O error; what is left is swept next time.
    """
    mine, sweepers = share
    removed: list[str] = []
    for key in (area.key, *area.before):
        for root, _ in area.roots():
            for store in rank_stores(Area(key), root, files):
                rank = store.root.name.removeprefix(RANK)
                if rank.isdecimal() and int(rank) % sweepers == mine:
                    removed += _sweep_store(store, up_to_step if key == area.key else None)
    for pointer in read_pointers(run, files):
        if pointer.rank % sweepers == mine and pointer.step <= up_to_step:
            files.remove_file(pointer_path(run, pointer.rank))
    return removed


def _sweep_store(store: Store, up_to_step: int | None) -> list[str]:
    inventory = scan(store)
    old = [
        name
        for name in inventory.committed
        if up_to_step is None or (step := _step_of(name)) is None or step <= up_to_step
    ]
    plan = sweep(store, old, is_live=lambda draft: _is_kept(draft, up_to_step))
    if inventory.latest in plan.checkpoints:
        store.files.remove_file(store.path(LATEST))
    return [str(store.path(name)) for name in plan.checkpoints]


def _is_kept(draft: DraftName, up_to_step: int | None) -> bool:
    return up_to_step is not None and draft.step > up_to_step


def _step_of(name: str) -> int | None:
    step = name.removeprefix("emergency_step_").partition("_")[0]
    return int(step) if step.isdecimal() else None
