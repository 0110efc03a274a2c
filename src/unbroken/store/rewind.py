"""Rewinding to an older checkpoint, so that the newer ones are never resumed from by mistake.

The decision is one record, published in one instant; from then on every checkpoint it names is abandoned, wherever it
is. Moving them into ``abandoned/`` afterwards only tidies up, and a crash in the middle of it changes nothing.

The record also keeps the request as it was written. A scheduler repeats the same command for every job; a request is
carried out once, or every job would start over from the same step.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointUnknown, ManifestDamaged, RecordDamaged, StorageFailed, UnsafeName
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed, Table, parsed
from unbroken.store.names import ABANDONED, REWINDS, scratch
from unbroken.store.old_names import updated

_RECORD_LIMIT_BYTES: Final = 64 << 20
_SCHEMA: Final = "unbroken.rewind/2"
SCRATCH: Final = "scratch"
# The tag distinguishes two requests for the same target; a path may have a # in an earlier component.
_TAG: Final = re.compile(r"#[^#/@]+\Z")
_COUNT: Final = re.compile(r"#(?P<count>[0-9]{1,9})(\.[^#/@]*)?\Z")


@dataclass(frozen=True)
class RewindRequest:
    """A request to resume from another than the newest checkpoint, as it was written, and the job that did it."""

    text: str
    target: str
    job: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether its target is a checkpoint of another run."""
        return "/" in self.target


def without_tag(request: str) -> str:
    """The target in a request: ``5#2`` means 5, as another request than ``5``."""
    return _TAG.sub("", request)


def next_request(request: str) -> str:
    """The request that rewinds to the same target once more, on purpose."""
    found = _COUNT.search(request)
    return f"{without_tag(request)}#{int(found['count']) + 1 if found else 2}"


def last_request(store: Store) -> RewindRequest | None:
    """The newest request that was carried out; None where there was none.

    Raises:
        RecordDamaged: a record cannot be read.
        StorageFailed: I/O error.
    """
    found: RewindRequest | None = None
    for body in _records(store):
        if "requested" in body:
            found = RewindRequest(body.text("requested"), body.text("target"), body.text("job"))
    return found


def record_rewind(
    store: Store,
    *,
    target: str,
    abandoned: Mapping[str, str],
    job: str,
    at_ns: int,
    request: str | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Publish the decision to continue from ``target``; ``abandoned`` maps names to the ids that are given up.

    ``request`` is kept as it was written, so that the same command does not rewind again. ``elsewhere`` is what is
    given up in mirrors, by the names there.

    Raises:
        StorageFailed: I/O error; nothing is abandoned.
    """
    directory = store.path(REWINDS)
    store.files.make_directory(directory, durable=True)
    given_up = {*abandoned.items(), *(elsewhere or {}).items()}
    body = {
        "schema": _SCHEMA,
        "target": target,
        "job": job,
        "at_ns": at_ns,
        "abandoned": [{"name": name, "id": id_} for name, id_ in sorted(given_up)],
        **({} if request is None else {"requested": request}),
    }
    number = 1 + max(
        (int(n.name[:6]) for n in store.files.list_directory(directory) if n.name[:6].isdecimal()), default=0
    )
    path = directory / f"{number:06}.json"
    data = json.dumps(body, sort_keys=True).encode()
    # Only the job that holds the run rewinds, so the name is not contested.
    # crash here: no record, and nothing is abandoned; or the whole record, and everything it names is.
    if not store.files.create_once(path, data, scratch=scratch(job, "rewind"), is_contested=False):
        raise StorageFailed(operation="record a rewind", path=path, cause="another job recorded one at the same time")


def rewind(
    store: Store,
    names_newest_first: list[str],
    *,
    target: str,
    job: str,
    at_ns: int,
    request: str | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> list[str]:
    """Abandon every checkpoint newer than ``target`` and move them aside; returns their names.

    A request is recorded even if there is nothing newer: the same request must not abandon what is trained from here.

    Raises:
        CheckpointUnknown: the target is not among the names.
        FormatUnknown: a newer checkpoint was written by another version, which could still choose it.
        StorageFailed: I/O error.
    """
    if target not in names_newest_first:
        raise CheckpointUnknown(reference=target, store=store.root, known=tuple(names_newest_first))
    newer = names_newest_first[: names_newest_first.index(target)]
    if newer or elsewhere or request is not None:
        ids = {name: id_ for name in newer if (id_ := _id_of(store, name)) is not None}
        record_rewind(store, target=target, abandoned=ids, job=job, at_ns=at_ns, request=request, elsewhere=elsewhere)
        move_abandoned(store, newer)
    return newer


def _id_of(store: Store, name: str) -> str | None:
    try:
        return store.read_manifest(name).id
    except (ManifestDamaged, UnsafeName):
        # It can never be chosen, so it needs no id to be given up by; moving it aside is enough.
        return None


def move_abandoned(store: Store, names: Iterable[str]) -> None:
    """Move abandoned checkpoints out of the way; doing it again, or after a crash, is harmless.

    In an object store they stay where they are: the record alone abandons them.

    Raises:
        StorageFailed: I/O error; what could not be moved is still abandoned.
    """
    if not store.files.can_rename:
        return
    store.files.make_directory(store.path(ABANDONED), durable=True)
    taken = {node.name for node in store.files.list_directory(store.path(ABANDONED))}
    for name in names:
        copy, aside = 1, name
        while aside in taken:
            copy += 1
            aside = f"{name}~{copy}"
        taken.add(aside)
        # crash here: the checkpoint is in one place or the other, and is abandoned in both.
        store.files.publish(store.path(name), store.path(ABANDONED) / aside)


def abandoned_ids(store: Store) -> dict[str, frozenset[str]]:
    """The abandoned ids, by the name they had; a name can be used again by the branch that continued.

    Raises:
        RecordDamaged: a record cannot be read, so that an abandoned checkpoint could be taken for a good one.
        StorageFailed: I/O error.
    """
    ids: dict[str, set[str]] = {}
    for body in _records(store):
        for row in body.rows("abandoned"):
            ids.setdefault(row.text("name"), set()).add(row.text("id"))
    return {name: frozenset(found) for name, found in ids.items()}


def _records(store: Store) -> Iterator[Table]:
    """Every record, oldest first, each with all required fields."""
    directory = store.path(REWINDS)
    for node in store.files.list_present(directory):
        if node.kind is not NodeKind.FILE or not node.name.endswith(".json"):
            continue
        path = directory / node.name
        try:
            found = parsed(store.files.read_bytes(path, limit_bytes=_RECORD_LIMIT_BYTES))
            body = Table(updated(found), "rewind")
            body.one_of("schema", (_SCHEMA,))
            _require_whole(body)
        except (ValueError, Malformed) as wrong:
            raise RecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong
        yield body


def _require_whole(body: Table) -> None:
    for row in body.rows("abandoned"):
        row.text("name"), row.text("id")
    if "requested" in body:
        body.text("requested"), body.text("target"), body.text("job")
