"""A checkpoint copied whole into another store: every byte proven as it is read, and nothing there before all is."""

import contextlib

from unbroken.errors import DamagedCheckpoint
from unbroken.store.commit import begin
from unbroken.store.manifest import Manifest, encode
from unbroken.store.names import MANIFEST
from unbroken.store.parts import read_part
from unbroken.store.place import Store


def copy_checkpoint(source: Store, name: str, manifest: Manifest, target: Store, *, job: str) -> None:
    """Copy one checkpoint under its own name, with its own manifest; ``job`` is whose draft it is until it is whole.

    Raises:
        DamagedCheckpoint: its bytes are not what was written; the target has no such checkpoint.
        StorageFailed: the system refused.
    """
    draft = begin(target, step=manifest.step, job=job)
    for part in manifest.parts:
        with contextlib.closing(read_part(source.files, source.path(name), manifest, part)) as blocks:
            # crash here: a draft with some of the parts, which no reader takes for a checkpoint.
            written = draft.write_part(part.name, blocks)
        if written.digest.size_bytes != part.size_bytes:
            raise DamagedCheckpoint(path=source.path(name), findings=(f"{part.name}: it is shorter than it was",))
    for directory in sorted({(draft.path / part.name).parent for part in manifest.parts} - {draft.path}):
        target.files.sync_directory(directory)
    # crash here: a whole checkpoint under a draft's name: torn all the same.
    target.files.write_new(draft.path / MANIFEST, [encode(manifest)])
    target.files.sync_directory(draft.path)
    # crash here: the draft's name or the checkpoint's own, and nothing between.
    target.files.publish(draft.path, target.path(name))
