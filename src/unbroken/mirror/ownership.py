"""Whose mirror a prefix is, and which name a checkpoint has there.

The first upload to a prefix leaves a record with the id of its run, by a conditional create: of two runs that are
given the same prefix, the second one is refused. Before the parts of a checkpoint are written, its name is claimed the
same way, so that two checkpoints never write the same keys; one that finds its name claimed by another takes the next.

A mirror is made once. One that the run has used and that has no such record now is away (a disk that is not mounted, a
folder that was moved), and is not made anew: it would look like an empty one.
"""

import json
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from unbroken.errors import (
    BadMirror,
    MirrorDamaged,
    MirrorDiverged,
    MirrorMissing,
    MirrorTaken,
    MirrorUnreachable,
    MirrorUnverified,
    StorageError,
)
from unbroken.mirror.address import Address, parse_address
from unbroken.mirror.client import Client, open_client
from unbroken.mirror.remote import home_of, store_at
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed, Table, parsed
from unbroken.store.mirrored import read_run_id, write_run_id
from unbroken.store.names import CHECKPOINTS, CLAIMS, MIRROR, REWINDS, is_checkpoint_name
from unbroken.store.scan import newest_first, outline_quietly, read_quietly, scan

_SCHEMA: Final = "unbroken.mirror/1"
_RUN: Final = f"{MIRROR}/run.json"
_LIMIT_BYTES: Final = 1 << 20
_REWIND_LIMIT_BYTES: Final = 64 << 20
_JOBS: Final = f"{MIRROR}/jobs"


@dataclass(frozen=True)
class Owner:
    """The run that a prefix belongs to: its id, the name of its directory, and where that was when it was recorded."""

    run: str
    name: str
    path: str | None = None
    host: str | None = None


@dataclass(frozen=True)
class Adopted:
    """A run that a run directory without checkpoints continues, because its mirror says so."""

    owner: Owner
    address: Address
    step: int | None
    # Its directory was in another place: perhaps it is another run of the same name.
    is_moved: bool

    def sentence(self) -> str:
        """One line of text."""
        step = "without a checkpoint" if self.step is None else f"whose newest checkpoint is of step {self.step:,}"
        begun = f"begun in {self.owner.path} on {self.owner.host}, " if self.owner.path is not None else ""
        return f"no checkpoints here: continuing the run {self.owner.run} in {self.address}, {begun}{step}"


def read_owner(client: Client) -> Owner | None:
    """The run that a prefix belongs to; None for a fresh one.

    Raises:
        MirrorTaken: there is a record, and it is none of ours.
        UnbrokenError: the object store refused.
    """
    body = _read(client, _RUN)
    if body is None:
        return None
    path, host = (body.text(key) if key in body else None for key in ("path", "host"))
    return Owner(body.text("run"), body.text("name"), path, host)


def name_of_run(store: Store) -> str:
    """The name of the directory of a run, or of a store that stands alone."""
    return directory_of_run(store).name


def directory_of_run(store: Store) -> Path:
    """The directory of the run whose checkpoints these are, or that of a store that stands alone."""
    root = store.root.absolute()
    return root.parent if root.name == CHECKPOINTS else root


def require_own(
    store: Store,
    client: Client,
    *,
    new_id: str,
    job: str,
    is_second_copy: bool = True,
    is_known: bool = False,
    is_dry: bool = False,
) -> Adopted | None:
    """Make a prefix ours, or pass if it is; returns the run that is continued, where nothing here says which one it is.

    A run without an id of its own takes over that of the mirror if it is the same run: its checkpoints are there, or
    it has none yet and its directory has the same name, as after a wiped disk. It is another run if the directory that
    the mirror was made for is still there, in another place.

    Args:
        store: the checkpoints here.
        client: the prefix.
        new_id: names the run if it has no id yet.
        job: who writes the records.
        is_second_copy: False of the only copy, which may be anywhere but among the checkpoints of another run.
        is_known: whether the run has used this mirror before.
        is_dry: only check; nothing is written.

    Raises:
        BadMirror: the mirror is inside the run directory, or is that of the run's own checkpoints.
        MirrorMissing: the mirror was used before and is not there, or its directory would be made in one that is not.
        MirrorTaken: the prefix belongs to another run, or is among the checkpoints of one.
        MirrorUnverified: the record is not there after it was written.
        UnbrokenError: the object store refused.
    """
    _require_apart(store, client, is_second_copy=is_second_copy)
    ours, name = read_run_id(store), name_of_run(store)
    owner = read_owner(client)
    if owner is None:
        _require_place(store, client, is_known=is_known, is_second_copy=is_second_copy)
        if is_dry:
            return None
        place = {"path": str(directory_of_run(store)), "host": socket.gethostname()}
        client.create(_RUN, _encoded({"run": ours or new_id, "name": name, **place}))
        # Read back, whoever has won: a store that answers "done" and keeps nothing is found out here.
        owner = read_owner(client)
        if owner is None:
            raise MirrorUnverified(
                mirror=str(client.address), key=_RUN, complaint="it is not there after it was written"
            )
        ours = ours or new_id
    elsewhere = _elsewhere(store, owner, is_second_copy=is_second_copy)
    is_adopted = ours is None and _is_same_run(store, client, owner, name) and elsewhere is None
    if is_adopted:
        ours = owner.run
    if ours != owner.run:
        what = "is the mirror of" if is_second_copy else "holds the checkpoints of"
        whose = f"it {what} a run called {owner.name}" + (f", which is in {elsewhere}" if elsewhere else "")
        raise MirrorTaken(mirror=str(client.address), complaint=whose)
    adopted = _adopted(store, client, owner) if is_adopted else None
    if read_run_id(store) is None and not is_dry:
        write_run_id(store, owner.run, job=job)
    return adopted


def owned_first(store: Store, mirrors: Sequence[str]) -> list[str]:
    """The mirrors in the order in which ``require_own`` is to be asked: those that know their run, then the others.

    A run without an id, as after a wiped disk, must find its own before it begins an empty mirror with a new one.

    Raises:
        MirrorTaken: a record is none of ours.
        StorageError: none of them knows its run, one cannot be asked, and there are no checkpoints here.
    """
    if read_run_id(store) is not None:
        return list(mirrors)
    owned, fresh, refusals = list[str](), list[str](), dict[str, StorageError]()
    for text in mirrors:
        try:
            client = open_client(home_of(parse_address(text), store), store.files)
            (fresh if read_owner(client) is None else owned).append(text)
        except StorageError as refused:
            refusals[text] = refused
    if refusals and not owned and not scan(store).committed:
        raise next(iter(refusals.values()))
    return [*owned, *fresh, *refusals]


def require_present(store: Store, client: Client) -> None:
    """Pass if a mirror that was used before is there.

    Raises:
        MirrorMissing: it has no record of a run.
        UnbrokenError: the object store refused.
    """
    if read_owner(client) is None:
        _require_place(store, client, is_known=True)


def _require_place(store: Store, client: Client, *, is_known: bool, is_second_copy: bool = True) -> None:
    """Refuse to make a mirror anew, and one in a directory that is not there: a disk may not be mounted."""
    address = client.address
    if store.root.name == CHECKPOINTS:
        address = Address(address.scheme, address.bucket, address.prefix.removesuffix(CHECKPOINTS).rstrip("/"))
    above = address.directory.parent if address.scheme == "file" else None
    mirror, run = str(address), str(directory_of_run(store))
    if above is not None and store.files.find(above) is None:
        complaint = f"the directory {above} does not exist"
        raise MirrorMissing(mirror=mirror, run=run, complaint=complaint, remedy="above", above=str(above))
    if is_known:
        complaint = "it has no record of this run any more"
        remedy: Literal["again", "anew"] = "again" if is_second_copy else "anew"
        raise MirrorMissing(mirror=mirror, run=run, complaint=complaint, remedy=remedy, above=str(above))


def _adopted(store: Store, client: Client, owner: Owner) -> Adopted | None:
    if scan(store).committed:
        return None
    remote = store_at(client)
    read = (outline_quietly(remote, name) for name in newest_first(remote, scan(remote).committed))
    newest = next((manifest for manifest in read if manifest is not None), None)
    is_moved = owner.path != str(directory_of_run(store))
    return Adopted(owner, client.address, newest.step if newest is not None else None, is_moved)


def _elsewhere(store: Store, owner: Owner, *, is_second_copy: bool) -> str | None:
    """The directory that a mirror was made for, if it is another one than ours and still holds that run."""
    if not (is_second_copy or owner.host == socket.gethostname()):
        # The run may continue on another machine, with the only copy: that directory is not where it is.
        return None
    if owner.path is None or Path(owner.path).resolve() == directory_of_run(store).resolve():
        return None
    path = Path(owner.path)
    there = Store(path / CHECKPOINTS if store.root.name == CHECKPOINTS else path, store.files)
    try:
        return owner.path if read_run_id(there) == owner.run else None
    except StorageError:
        # It cannot be read from here: nothing is known of it.
        return None


def _require_apart(store: Store, client: Client, *, is_second_copy: bool) -> None:
    """Refuse a mirror in the store itself or among another run's checkpoints: its records would replace theirs."""
    address = client.address
    pieces = address.prefix.split("/")
    for depth in [n for n, piece in enumerate(pieces) if piece == CHECKPOINTS and n + 1 < len(pieces)]:
        above = Address(address.scheme, address.bucket, "/".join(pieces[: depth + 1]))
        if (owner := read_owner(open_client(above))) is not None:
            complaint = f"{above} holds the checkpoints of a run called {owner.name}"
            raise MirrorTaken(mirror=str(address), complaint=complaint)
    if address.scheme != "file":
        return
    here, there = store.root.resolve(), address.directory.resolve()
    if there == here or here in there.parents:
        complaint = f"it is in {here}, where the checkpoints of this run are"
        raise BadMirror(text=str(client.address), complaint=complaint)
    if is_second_copy and here.name == CHECKPOINTS and here.parent in there.parents:
        complaint = f"it is in the run directory {here.parent}, and would be lost with it"
        raise BadMirror(text=str(client.address), complaint=complaint)


def is_mirror(store: Store) -> bool:
    """Whether a store is itself a mirror, or where a run saves without a local disk.

    Raises:
        UnbrokenError: the storage refused.
    """
    path = store.path(_RUN)
    if store.files.find(path) is None:
        return False
    try:
        Table(parsed(store.files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), _RUN).one_of("schema", (_SCHEMA,))
    except (ValueError, Malformed):
        return False
    return True


def adopt(store: Store, client: Client, *, job: str) -> None:
    """Make a local store part of the run that a mirror belongs to, before a checkpoint is fetched by hand.

    Raises:
        MirrorTaken: the store belongs to another run than the mirror.
        UnbrokenError: the object store refused.
    """
    owner = require_adoptable(store, client)
    if owner is not None and read_run_id(store) is None:
        write_run_id(store, owner.run, job=job)


def require_adoptable(store: Store, client: Client) -> Owner | None:
    """The run that a mirror belongs to, if a local store can be a part of it.

    Raises:
        MirrorTaken: the store belongs to another run than the mirror.
        UnbrokenError: the object store refused.
    """
    owner, ours = read_owner(client), read_run_id(store)
    if owner is None:
        # Checkpoints that somebody copied there by other means belong to no run.
        return None
    here = _ids(store) if ours is None else set()
    if ours not in (None, owner.run) or (here and not here & _ids(store_at(client))):
        complaint = f"it is the mirror of a run called {owner.name}, and {store.root} holds another run"
        raise MirrorTaken(mirror=str(client.address), complaint=complaint)
    return owner


def _is_same_run(store: Store, client: Client, owner: Owner, name: str) -> bool:
    here = _ids(store)
    there = _ids(store_at(client)) if here else set()
    return bool(here & there) if there else owner.name == name


def _ids(store: Store) -> set[str]:
    found = (read_quietly(store, name) for name in scan(store).committed)
    return {manifest.id for manifest in found if manifest is not None}


def claim_name(client: Client, name: str, id_: str) -> str:
    """The name of a checkpoint in the mirror: its own, or with a number behind it if another one has that.

    Raises:
        MirrorTaken: a claim is none of ours.
        UnbrokenError: the object store refused.
    """
    copy, stem = 1, name.partition(".")[0] if is_checkpoint_name(name) else name
    while True:
        wanted = name if copy == 1 else f"{stem}.{copy}"
        key = f"{CLAIMS}/{wanted}"
        if client.create(key, _encoded({"id": id_})):
            return wanted
        body = _read(client, key)
        if body is not None and body.text("id") == id_:
            return wanted
        copy += 1


def claimed_by(client: Client, name: str) -> str | None:
    """The id that a name was claimed with.

    Raises:
        MirrorTaken: the claim is none of ours.
        UnbrokenError: the object store refused.
    """
    body = _read(client, f"{CLAIMS}/{name}")
    return None if body is None else body.text("id")


def release_names(client: Client, names: Collection[str]) -> None:
    """Give up the claims of checkpoints that were removed from a mirror.

    Raises:
        UnbrokenError: the object store refused.
    """
    client.delete([f"{CLAIMS}/{name}" for name in names])


def take_number(client: Client, job: str) -> int:
    """Take the next number of the jobs that save straight to a prefix: from now on no job before it may commit.

    Raises:
        MirrorTaken: a record is none of ours.
        UnbrokenError: the object store refused.
    """
    _, found = client.level(_JOBS)
    numbers = [int(stem) for each in found if (stem := each.key.rpartition("/")[2].partition(".")[0]).isdecimal()]
    number, mine = max(numbers, default=0) + 1, _encoded({"id": job})
    # Read back where it was there already: the answer to our own request may have been lost and the request repeated.
    while not client.create(_job_key(number), mine) and client.read(_job_key(number), 0, _LIMIT_BYTES) != mine:
        number += 1
    return number


def newer_job(client: Client, number: int) -> str | None:
    """The job that has taken the number behind this one; None while this one is the newest.

    Raises:
        MirrorTaken: a record is none of ours.
        UnbrokenError: the object store refused.
    """
    body = _read(client, _job_key(number + 1))
    return None if body is None else body.text("id")


def _job_key(number: int) -> str:
    return f"{_JOBS}/{number:06}.json"


def push_rewinds(store: Store, client: Client, address: Address) -> None:
    """Copy the records of rewinds, so that nobody resumes from a mirror what this run has abandoned.

    ``address`` is that of the mirror as the user wrote it; the client is at the place of the checkpoints.

    Raises:
        MirrorDiverged: the mirror has another record of the same number: another copy of this run was rewound too.
        UnbrokenError: the object store refused.
    """
    for node in store.files.list_present(store.path(REWINDS)):
        if not node.name.endswith(".json"):
            continue
        data = store.files.read_bytes(store.path(REWINDS) / node.name, limit_bytes=_REWIND_LIMIT_BYTES)
        key = f"{REWINDS}/{node.name}"
        if not client.create(key, data) and client.read(key, 0, _REWIND_LIMIT_BYTES) != data:
            raise MirrorDiverged(mirror=str(address), run=str(directory_of_run(store)), record=key)


def _encoded(fields: dict[str, Any]) -> bytes:
    return (json.dumps({"schema": _SCHEMA, **fields}, sort_keys=True) + "\n").encode()


def _read(client: Client, key: str) -> Table | None:
    try:
        data = client.read(key, 0, _LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except MirrorUnreachable:
        # S3 refuses every range of an empty object.
        found = client.find(key)
        if found is None or found.size_bytes:
            raise
        data = b""
    try:
        value = parsed(data)
    except ValueError:
        raise MirrorDamaged(mirror=str(client.address), key=key) from None
    try:
        body = Table(value, key)
        body.one_of("schema", (_SCHEMA,))
        _ = (body.text("run"), body.text("name")) if key == _RUN else body.text("id")
    except (ValueError, Malformed) as wrong:
        raise MirrorTaken(mirror=str(client.address), complaint=f"{key} is not a record of unbroken") from wrong
    return body
