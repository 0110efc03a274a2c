"""References to runs and checkpoints, where a run may not have saved anything yet.

A store alone cannot tell such a run from a folder that has nothing to do with us: it knows no records of runs.
"""

from pathlib import Path

from unbroken.errors import NotAStore, NoUsableCheckpoint
from unbroken.files import LOCAL
from unbroken.mirror.address import is_url
from unbroken.records.layout import Layout, require_reachable
from unbroken.records.lease import DIRECTORY as LEASES
from unbroken.store.directory import Store
from unbroken.store.dumps import read_pointers
from unbroken.store.manifest import Manifest
from unbroken.store.mirrored import read_direct
from unbroken.store.references import Reference, checkpoint_of, named_in
from unbroken.store.references import resolve_in_store as resolve_in_store


def is_run(layout: Layout) -> bool:
    """Whether records of a run are there: it has a status before it has a checkpoint, and perhaps emergency dumps."""
    records = (layout.run_state, layout.journal, layout.run / LEASES)
    return any(LOCAL.find(record) is not None for record in records) or bool(read_pointers(layout.run))


def resolve(reference: str) -> Reference:
    """The store, and the checkpoint if one is named; a run that has not saved yet has an empty store.

    An address of a mirror, ``s3://bucket/runs/a@1000``, is a reference too.

    Raises:
        BadRunPath: it is a path at which nothing can be.
        BadMirror: it is an address that no mirror has.
        PathMissing: there is nothing at the path.
        NotAStore: there is, and it is no run and holds no checkpoint of ours.
        CheckpointUnknown: the store has no checkpoint by that name or step.
        NoUsableCheckpoint: one is named of a run that has not saved yet.
        TornCheckpoint: the path is, or lies in, a checkpoint that was never committed.
        StorageFailed: an I/O error.
    """
    if is_url(reference):
        # Imported here: most commands never touch an object store.
        from unbroken.mirror.remote import resolve_remote

        return resolve_remote(reference)
    require_reachable(reference)
    if (elsewhere := _elsewhere(reference)) is not None:
        return elsewhere
    try:
        return resolve_in_store(reference)
    except NotAStore:
        is_path = LOCAL.find(Path(reference)) is not None
        layout = Layout(Path(reference if is_path else reference.rpartition("@")[0]))
        if not is_run(layout):
            raise
        store = Store(layout.checkpoints)
        if not is_path:
            raise NoUsableCheckpoint(store=store.root) from None
        return Reference(store)


def _elsewhere(reference: str) -> Reference | None:
    """What a run directory stands for whose jobs save straight to an object store."""
    path = reference if LOCAL.find(Path(reference)) is not None else reference.rpartition("@")[0]
    local = Store(Layout(Path(path)).checkpoints)
    if not path or read_direct(local) is None:
        return None
    from unbroken.mirror.remote import checkpoints_of

    store, wanted = checkpoints_of(local), reference.removeprefix(path).removeprefix("@")
    return Reference(store, named_in(store, wanted) if wanted else None, records=local)


def resolve_checkpoint(reference: str) -> tuple[Store, str, Manifest]:
    """One checkpoint: the one named, or a store's newest whose manifest is proven.

    Raises:
        NoUsableCheckpoint: the store has none at all, or the run has not saved yet.
        UnbrokenError: as ``resolve_in_store`` raises it, or the manifest of the named one cannot be read.
    """
    return checkpoint_of(resolve(reference))
