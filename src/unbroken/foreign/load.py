"""``unbroken.load``: weights, or any other item, of a checkpoint into live objects, without a run.

A checkpoint of another tool is read as data, staged as one of ours in the folder for temporary files, and loaded with
the same checks. Nothing else is written.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

from unbroken.errors import UnbrokenError
from unbroken.files import LOCAL, temporary_directory
from unbroken.foreign.staged import NOT_OURS, foreign_at, is_sealed_foreign, stage
from unbroken.records.run_references import resolve_checkpoint
from unbroken.state.items import Item
from unbroken.state.load import Loaded, load_items, require_loadable
from unbroken.state.restore import CheckpointSource
from unbroken.store.directory import Store
from unbroken.store.foreign import Foreign, resolve_foreign


def load(
    reference: str | os.PathLike[str],
    *,
    accept: Sequence[str] = (),
    allow_pickle: Sequence[str] = (),
    **items: object,
) -> Loaded:
    """Load items of a checkpoint into live objects, without a run.

    ``unbroken.load("runs/a@1000", model=model)``. For a sharded model it is collective.

    Args:
        reference: a run (its newest checkpoint), ``RUN@STEP``, ``RUN@NAME``, ``RUN@latest``, a checkpoint's path, or
            what ``unbroken import`` accepts: a checkpoint of another tool, or a directory of them.
        accept: names of differences to accept: a tensor, a prefix of names, or an item.
        allow_pickle: items whose values may be unpickled, which runs code that the checkpoint holds. Pickles of other
            tools are always read as data.
        items: the objects to load into, by the names they were saved under. An optimizer needs its model too.

    Raises:
        PathMissing: there is nothing at the path.
        NotAStore: it is neither a run nor a checkpoint.
        CheckpointUnknown: the run has no such checkpoint.
        NoUsableCheckpoint: the run has none at all.
        NotAnItem: an object has no state that could be loaded.
        StateDiffers: the checkpoint has no such item, or names, types or shapes differ; nothing was loaded.
        NotExact: an item's state differs by rank and cannot be taken as it is.
        DamagedCheckpoint: bytes are not what was written; says whether objects were touched.
        ForeignDamaged: files of another tool are missing or damaged.
        ForeignAmbiguous: several checkpoints of other tools are there, and none is clearly the newest.
        CannotImport: a checkpoint of another tool does not fit the model.
        NeedsClass: its pickles need classes that are not read by default; import it.
        StorageFailed: I/O error.
    """
    wanted = require_loadable(items)
    found = _resolve(reference)
    if isinstance(found, Foreign):
        return _load_foreign(found, wanted, accept)
    return load_items(found, wanted, accept=accept, allow_pickle=allow_pickle)


def _resolve(reference: str | os.PathLike[str]) -> CheckpointSource | Foreign:
    try:
        store, name, manifest = resolve_checkpoint(os.fspath(reference))
    except NOT_OURS as refused:
        return foreign_at(reference, refused)
    if is_sealed_foreign(manifest) and store.files is LOCAL:
        return resolve_foreign(store.path(name))
    return CheckpointSource(store, name, manifest)


def _load_foreign(source: Foreign, wanted: Sequence[Item], accept: Sequence[str]) -> Loaded:
    with temporary_directory("unbroken-load-") as folder:
        staged = stage(source, Store(folder), wanted, only=[item.name for item in wanted])
        where = CheckpointSource(staged.store, staged.name, staged.manifest)
        try:
            found = load_items(where, wanted, accept=accept)
        except UnbrokenError as refused:
            raise staged.told(refused) from None
    return replace(found, step=staged.step, path=source.path, left_out=staged.left_out)
