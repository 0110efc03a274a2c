"""Going back to an older checkpoint without ever meeting the newer ones again by mistake.

The decision is one record, published in one instant; from then on every checkpoint it names is abandoned, wherever it
stands. Moving them into ``abandoned/`` afterwards only tidies up, and a crash in the middle of it changes nothing.

The record also keeps the words of the request. A scheduler repeats the same command for every job; a request that was
carried out once is not carried out again, or every job would start over from the same step.
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

_RECORD_LIMIT_BYTES: Final = 64 << 20
_SCHEMA: Final = "unbroken.rewind/1"
SCRATCH: Final = "scratch"
# What stands behind it tells two requests for the same target apart; a path may have one in an earlier piece.
_TAG: Final = re.compile(r"#[^#/@]+\Z")
_COUNT: Final = re.compile(r"#(?P<count>[0-9]{1,9})(\.[^#/@]*)?\Z")


@dataclass(frozen=True)
class Request:
    """A request to start somewhere else than at the newest checkpoint, and the job that carried it out."""

    asked: str
    target: str
    job: str

    @property
    def is_elsewhere(self) -> bool:
        """Whether its target is a checkpoint of another run."""
        return "/" in self.target


def without_tag(asked: str) -> str:
    """What a request names: ``5#2`` asks for 5, as another request than ``5``."""
    return _TAG.sub("", asked)


def asked_again(asked: str) -> str:
    """The words by which the same target is asked for once more, on purpose."""
    found = _COUNT.search(asked)
    return f"{without_tag(asked)}#{int(found['count']) + 1 if found else 2}"


def last_request(store: Store) -> Request | None:
    """The newest request that was carried out; None where there was none.

    Raises:
        RecordDamaged: a record cannot be read.
        StorageFailed: the system refused.
    """
    found: Request | None = None
    for body in _records(store):
        if "asked" in body:
            found = Request(body.text("asked"), body.text("target"), body.text("job"))
    return found


def record_rewind(
    store: Store, *, target: str, abandoned: Mapping[str, str], job: str, at_ns: int, asked: str | None = None
) -> None:
    """Publish the decision to continue from ``target``; ``abandoned`` maps names to the ids that are given up.

    ``asked`` is the request in its own words, so that the same words do not lead to the same rewind again.

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
        **({} if asked is None else {"asked": asked}),
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


def rewind(
    store: Store, names_newest_first: list[str], *, target: str, job: str, at_ns: int, asked: str | None = None
) -> list[str]:
    """Abandon every checkpoint newer than ``target`` and move them aside; returns their names.

    A request is recorded even if there is nothing newer: the same words must not abandon what is trained from here.

    Raises:
        CheckpointUnknown: the target is not among the names.
        FormatUnknown: a newer checkpoint was written by another version, which could still choose it.
        StorageFailed: the system refused.
    """
    if target not in names_newest_first:
        raise CheckpointUnknown(reference=target, store=store.root, known=tuple(names_newest_first))
    newer = names_newest_first[: names_newest_first.index(target)]
    if newer or asked is not None:
        ids = {name: id_ for name in newer if (id_ := _id_of(store, name)) is not None}
        record_rewind(store, target=target, abandoned=ids, job=job, at_ns=at_ns, asked=asked)
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
    ids: dict[str, set[str]] = {}
    for body in _records(store):
        for row in body.rows("abandoned"):
            ids.setdefault(row.text("name"), set()).add(row.text("id"))
    return {name: frozenset(found) for name, found in ids.items()}


def _records(store: Store) -> Iterator[Table]:
    """Every record, oldest first, each with all that its readers ask for."""
    directory = store.path(REWINDS)
    if store.files.find(directory) is None:
        return
    nodes = store.files.list_directory(directory)
    for node in sorted(nodes, key=lambda node: node.name):
        if node.kind is not NodeKind.FILE or not node.name.endswith(".json"):
            continue
        path = directory / node.name
        try:
            body = Table(parsed(store.files.read_bytes(path, limit_bytes=_RECORD_LIMIT_BYTES)), "rewind")
            body.one_of("schema", (_SCHEMA,))
            _require_whole(body)
        except (ValueError, Malformed) as wrong:
            raise RecordDamaged(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong
        yield body


def _require_whole(body: Table) -> None:
    for row in body.rows("abandoned"):
        row.text("name"), row.text("id")
    if "asked" in body:
        body.text("asked"), body.text("target"), body.text("job")
