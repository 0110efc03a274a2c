"""Moving a bad checkpoint aside with the reason beside it. Never deletes: what looks bad today may be read tomorrow."""

import json
from typing import Final

from unbroken.store.names import QUARANTINE, scratch
from unbroken.store.place import Store

_SCHEMA: Final = "unbroken.quarantine/1"


def quarantine(store: Store, name: str, reasons: tuple[str, ...], *, job: str, at_ns: int) -> str:
    """Move a checkpoint into ``quarantine/``, its reason file first; returns the name it has there.

    Raises:
        StorageFailed: the system refused; the checkpoint is where it was.
    """
    directory = store.path(QUARANTINE)
    store.files.make_directory(directory, durable=True)
    taken = {node.name for node in store.files.list_directory(directory)}
    copy, aside = 1, name
    while aside in taken:
        copy += 1
        aside = f"{name}~{copy}"
    reason = {"schema": _SCHEMA, "name": name, "reasons": list(reasons), "job": job, "at_ns": at_ns}
    # crash here: a reason without its checkpoint, which the next attempt replaces.
    store.files.replace(
        directory / f"{aside}.reason.json",
        (json.dumps(reason, sort_keys=True, indent=1) + "\n").encode(),
        scratch=scratch(job, "reason"),
    )
    # crash here: the checkpoint stands in one place or the other, whole as it was.
    store.files.publish(store.path(name), directory / aside)
    return aside
