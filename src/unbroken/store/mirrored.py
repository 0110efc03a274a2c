"""The ledger of mirrors: which second stores a run has, and which checkpoints are known to be there.

A record says that one checkpoint was verified in one mirror. What has no record is pending: so a job that is killed
between a commit and its upload, or during it, leaves a pending upload and no gap, and nothing must be written for an
upload to be remembered. Records are created once and durably, after the mirror was verified and never before.
Addresses hold no credentials.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from unbroken.errors import StorageFailed
from unbroken.store.digest import digest_bytes
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed, Table, parsed
from unbroken.store.manifest import Manifest
from unbroken.store.names import MIRROR, scratch

_TARGETS: Final = "targets.json"
_RUN: Final = "run.json"
_DIRECT: Final = "direct.json"
_SCHEMA: Final = "unbroken.mirrors/1"
_LIMIT_BYTES: Final = 1 << 20
_RECORD: Final = re.compile(r"(?P<mirror>[0-9a-f]{16})-(?P<id>[0-9A-Za-z_][0-9A-Za-z_.-]{0,127})")


@dataclass(frozen=True)
class Upload:
    """A checkpoint that was verified in a mirror, and the name it has there."""

    mirror: str
    id: str
    name: str
    remote_name: str
    size_bytes: int


# ---- which mirrors a run has ----


def read_mirrors(store: Store) -> tuple[str, ...]:
    """The addresses of the mirrors of a run; empty where it has none.

    Raises:
        StorageFailed: I/O error, or the record is damaged: then nothing may be taken for mirrored.
    """
    body = _read(store, _TARGETS)
    return () if body is None else tuple(body.texts("mirrors"))


def write_mirrors(store: Store, mirrors: Iterable[str], *, job: str) -> None:
    """Record the mirrors of a run, before anything is uploaded: from then on what is not there is kept.

    Raises:
        StorageFailed: I/O error; the old record is intact.
    """
    store.files.make_directory(store.path(MIRROR), durable=True)
    # crash here: the old list or the new one; with the new one every checkpoint is pending.
    store.files.replace(
        store.path(MIRROR) / _TARGETS, _encoded({"mirrors": list(mirrors)}), scratch=scratch(job, "mirrors")
    )


# ---- where the checkpoints are, if not here ----


def read_direct(store: Store) -> str | None:
    """The address to which the jobs of a run save instead of here; None for an ordinary run.

    Raises:
        StorageFailed: I/O error, or the record is damaged.
    """
    body = _read(store, _DIRECT)
    return None if body is None else body.text("checkpoints")


def write_direct(store: Store, address: str | None, *, job: str) -> None:
    """Record where the checkpoints of a run are; None: here.

    Raises:
        StorageFailed: I/O error; the old record is intact.
    """
    path = store.path(MIRROR) / _DIRECT
    if address is None:
        # crash here: the record or none.
        store.files.remove_file(path)
        return
    store.files.make_directory(store.path(MIRROR), durable=True)
    # crash here: the old record or the new one; the next job with the same settings writes it again.
    store.files.replace(path, _encoded({"checkpoints": address}), scratch=scratch(job, "direct"))


# ---- which run this is ----


def read_run_id(store: Store) -> str | None:
    """The id by which mirrors tell this run from others; None before the first upload.

    Raises:
        StorageFailed: I/O error, or the record is damaged.
    """
    body = _read(store, _RUN)
    return None if body is None else body.text("run")


def write_run_id(store: Store, run: str, *, job: str) -> None:
    """Record the id, once it is known to the mirror.

    Raises:
        StorageFailed: I/O error.
    """
    store.files.make_directory(store.path(MIRROR), durable=True)
    # crash here: no id or the whole one; the mirror tells it again.
    store.files.replace(store.path(MIRROR) / _RUN, _encoded({"run": run}), scratch=scratch(job, "run"))


# ---- what is mirrored ----


def record_upload(store: Store, upload: Upload, *, job: str, at_ns: int) -> None:
    """Record that a checkpoint was verified in a mirror; only now may its local copy be swept.

    Raises:
        StorageFailed: I/O error; the checkpoint is pending still.
    """
    store.files.make_directory(store.path(MIRROR), durable=True)
    fields = {
        "mirror": upload.mirror,
        "id": upload.id,
        "name": upload.name,
        "remote_name": upload.remote_name,
        "bytes": upload.size_bytes,
        "at_ns": at_ns,
    }
    # crash here: pending or mirrored; the next job finds the mirror's own commit and records it then.
    store.files.create_once(
        store.path(MIRROR) / f"{_token(upload.mirror)}-{upload.id}",
        _encoded(fields),
        # Of this mirror: another one of the same job may be recorded at the same moment.
        scratch=scratch(job, f"upload-{_token(upload.mirror)}"),
        is_contested=False,
    )


def mirrored_ids(store: Store, mirror: str) -> frozenset[str]:
    """The ids of the checkpoints that were verified in a mirror.

    Raises:
        StorageFailed: I/O error.
    """
    found = (_RECORD.fullmatch(node.name) for node in store.files.list_present(store.path(MIRROR)))
    return frozenset(each["id"] for each in found if each and each["mirror"] == _token(mirror))


def remote_name(store: Store, mirror: str, id_: str) -> str | None:
    """The name that a checkpoint has in a mirror, as it was recorded; None if there is no readable record.

    Raises:
        StorageFailed: I/O error.
    """
    path = store.path(MIRROR) / f"{_token(mirror)}-{id_}"
    if store.files.find(path) is None:
        return None
    try:
        return Table(parsed(store.files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), "upload").text("remote_name")
    except (ValueError, Malformed):
        return None


def forget_uploads(store: Store, mirror: str, ids: Iterable[str]) -> None:
    """Remove the records of checkpoints that are gone here, or are to be mirrored again.

    Raises:
        StorageFailed: I/O error; what has no record is pending.
    """
    for each in ids:
        # crash here: a record less; its checkpoint is gone, or is uploaded again.
        store.files.remove_file(store.path(MIRROR) / f"{_token(mirror)}-{each}")


def missing_copies(store: Store, away: Collection[str] = ()) -> "Callable[[str], Collection[str]] | None":
    """For the id of a checkpoint the mirrors that lack it; None for a run without mirrors.

    A record says what a mirror held once. Of the mirrors in ``away``, which nobody has seen since, it says nothing.

    Raises:
        StorageFailed: I/O error, or the record of the mirrors is damaged.
    """
    known = {
        mirror: frozenset[str]() if mirror in away else mirrored_ids(store, mirror) for mirror in read_mirrors(store)
    }
    if not known:
        return None
    return lambda id_: [mirror for mirror, ids in known.items() if id_ not in ids]


def upload_of(mirror: str, manifest: Manifest, name: str, remote_name: str) -> Upload:
    """The record of one verified checkpoint."""
    return Upload(mirror, manifest.id, name, remote_name, manifest.size_bytes)


def _token(mirror: str) -> str:
    return digest_bytes(mirror.encode())[:8].hex()


def _encoded(fields: dict[str, Any]) -> bytes:
    return (json.dumps({"schema": _SCHEMA, **fields}, sort_keys=True) + "\n").encode()


def _read(store: Store, name: str) -> Table | None:
    path = store.path(MIRROR) / name
    if store.files.find(path) is None:
        return None
    try:
        body = Table(parsed(store.files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), name)
        body.one_of("schema", (_SCHEMA,))
        _ = body.texts("mirrors") if name == _TARGETS else body.text("run" if name == _RUN else "checkpoints")
    except (ValueError, Malformed) as wrong:
        cause = "it is damaged; until it is removed, checkpoints are kept as not mirrored"
        raise StorageFailed(operation="read", path=path, cause=cause) from wrong
    return body
