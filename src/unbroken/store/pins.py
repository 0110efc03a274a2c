"""Pins: a person's word that a checkpoint is to be kept. One small file each, named by the checkpoint's id."""

import json
from typing import Final

from unbroken.disk import NodeKind
from unbroken.store.names import PINS, scratch
from unbroken.store.place import Store

_SCHEMA: Final = "unbroken.pin/1"


def pin(store: Store, name: str, *, reason: str, job: str, at_ns: int) -> bool:
    """Pin a committed checkpoint; says whether it was not pinned before.

    Raises:
        ManifestDamaged: the checkpoint has no trustworthy manifest, so nothing is known to be worth keeping.
        StorageFailed: the system refused.
    """
    manifest = store.read_manifest(name)
    store.files.make_directory(store.path(PINS), durable=True)
    body = {"schema": _SCHEMA, "name": name, "id": manifest.id, "reason": reason, "at_ns": at_ns}
    # crash here: pinned or not; a scratch file that the next pin removes.
    return store.files.create_once(
        store.path(PINS) / manifest.id,
        (json.dumps(body, sort_keys=True) + "\n").encode(),
        scratch=scratch(job, "pin"),
    )


def unpin(store: Store, name: str) -> bool:
    """Take a pin back; says whether there was one.

    Raises:
        ManifestDamaged: the checkpoint has no trustworthy manifest.
        StorageFailed: the system refused.
    """
    manifest = store.read_manifest(name)
    if manifest.id not in pinned_ids(store):
        return False
    store.files.remove_file(store.path(PINS) / manifest.id)
    store.files.sync_directory(store.path(PINS))
    return True


def pinned_ids(store: Store) -> frozenset[str]:
    """The ids of all pinned checkpoints.

    Raises:
        StorageFailed: the system refused.
    """
    if store.files.find(store.path(PINS)) is None:
        return frozenset()
    nodes = store.files.list_directory(store.path(PINS))
    return frozenset(node.name for node in nodes if node.kind is NodeKind.FILE and not node.name.startswith("."))
