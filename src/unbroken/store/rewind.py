"""Going back to an older checkpoint without ever meeting the newer ones again by mistake.

The decision is one record, published in one instant; from then on every checkpoint it names is abandoned, wherever it
stands. Moving them into ``abandoned/`` afterwards only tidies up, and a crash in the middle of it changes nothing.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointUnknown, ManifestDamaged, RecordDamaged, StorageFailed, UnsafeName
from unbroken.store.fields import Malformed, Table, parsed
from unbroken.store.names import ABANDONED, REWINDS, scratch
from unbroken.store.place import Store

_RECORD_LIMIT_BYTES: Final = 64 << 20
_SCHEMA: Final = "unbroken.rewind/1"


def record_rewind(store: Store, *, target: str, abandoned: Mapping[str, str], job: str, at_ns: int) -> None:
    """Publish the decision to continue from ``target``; ``abandoned`` maps names to the ids that are given up.

    Raises:
        StorageFailed: the system refused; nothing is abandoned.
    """
    directory = store.path(REWINDS)
    store.files.make_directory(directory, durable=True)
    body = {
        "schema": _SCHEMA,
        "target": target,
        "job": job,
        "at_ns": at_ns,
        "abandoned": [{"name": name, "id": abandoned[name]} for name in sorted(abandoned)],
    }
    number = 1 + max(
        (int(n.name[:6]) for n in store.files.list_directory(directory) if n.name[:6].isdecimal()), default=0
    )
    path = directory / f"{number:06}.json"
    data = json.dumps(body, sort_keys=True).encode()
    # Only the job that holds the run goes back, so nobody contests the name.
    # crash here: no record, and nothing is abandoned; or the whole record, and everything it names is.
    if not store.files.create_once(path, data, scratch=scratch(job, "rewind"), is_contested=False):
        raise StorageFailed(operation="record a rewind", path=path, cause="another job recorded one at the same time")


def rewind(store: Store, names_newest_first: list[str], *, target: str, job: str, at_ns: int) -> list[str]:
    """Abandon every checkpoint newer than ``target`` and move them aside; returns their names.

    Raises:
        CheckpointUnknown: the target is not among the names.
        FormatUnknown: a newer checkpoint was written by another version, which could still choose it.
        StorageFailed: the system refused.
    """
    if target not in names_newest_first:
        raise CheckpointUnknown(reference=target, store=store.root, known=tuple(names_newest_first))
    newer = names_newest_first[: names_newest_first.index(target)]
    if newer:
        ids = {name: id_ for name in newer if (id_ := _id_of(store, name)) is not None}
        record_rewind(store, target=target, abandoned=ids, job=job, at_ns=at_ns)
        set_aside(store, newer)
    return newer


def _id_of(store: Store, name: str) -> str | None:
    try:
        return store.read_manifest(name).id
    except (ManifestDamaged, UnsafeName):
        # It can never be chosen, so it needs no id to be given up by; moving it aside is enough.
        return None


def set_aside(store: Store, names: Iterable[str]) -> None:
    """Move abandoned checkpoints out of the way; doing it again, or after a crash, is harmless.

    Raises:
        StorageFailed: the system refused; what could not be moved is still abandoned.
    """
    store.files.make_directory(store.path(ABANDONED), durable=True)
    taken = {node.name for node in store.files.list_directory(store.path(ABANDONED))}
    for name in names:
        copy, aside = 1, name
        while aside in taken:
            copy += 1
            aside = f"{name}~{copy}"
        taken.add(aside)
        # crash here: the checkpoint stands in one place or the other, and is abandoned in both.
        store.files.publish(store.path(name), store.path(ABANDONED) / aside)


def abandoned_ids(store: Store) -> dict[str, frozenset[str]]:
    """The ids given up so far, by the name they had; a name can be used again by the branch that went on.

    Raises:
        RecordDamaged: a record cannot be read, so that an abandoned checkpoint could be taken for a good one.
        StorageFailed: the system refused.
    """
    directory = store.path(REWINDS)
    if store.files.find(directory) is None:
        return {}
    ids: dict[str, set[str]] = {}
    for node in store.files.list_directory(directory):
        if node.kind is not NodeKind.FILE or not node.name.endswith(".json"):
            continue
        path = directory / node.name
        try:
            body = Table(parsed(store.files.read_bytes(path, limit_bytes=_RECORD_LIMIT_BYTES)), "rewind")
            body.one_of("schema", (_SCHEMA,))
            for row in body.rows("abandoned"):
                ids.setdefault(row.text("name"), set()).add(row.text("id"))
        except (ValueError, Malformed) as wrong:
            raise RecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong
    return {name: frozenset(found) for name, found in ids.items()}
