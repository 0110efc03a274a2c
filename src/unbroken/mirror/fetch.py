"""Bringing a checkpoint back from a mirror: staged under a name that no reader trusts, verified, then published.

An interrupted fetch leaves the old local copy or none, never a mixture under a good name. Of a checkpoint that is here
and damaged, only the damaged parts are fetched, and each replaces the bad one in one instant.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from unbroken.errors import DamagedCheckpoint, Help, WouldOverwrite
from unbroken.mirror.folder import is_alive
from unbroken.mirror.transfer import Limits, PieceBuffers
from unbroken.store.check import Level, verify
from unbroken.store.choose import quarantine
from unbroken.store.commit import Draft, begin, commit_copy
from unbroken.store.digest import block_ranges, digest_bytes
from unbroken.store.directory import Store
from unbroken.store.manifest import FILE_LIMIT_BYTES, Manifest, Part, decode
from unbroken.store.names import MANIFEST, checkpoint_name, is_checkpoint_name
from unbroken.store.parts import require_block
from unbroken.store.scan import read_quietly, scan, without_manifest

# A body that was cut short is asked for again.
_ATTEMPTS: Final = 3
_OWN_DRAFT: Final = re.compile(r"fetch_(?P<host>[0-9a-f]{8})_(?P<pid>[0-9]+)")


@dataclass(frozen=True)
class Fetched:
    """What a fetch did: the local name, and the parts that were copied; none if all were here and whole."""

    name: str
    manifest: Manifest
    parts: tuple[str, ...]
    is_new: bool

    @property
    def size_bytes(self) -> int:
        """The bytes that were copied."""
        return sum(part.size_bytes for part in self.manifest.parts if part.name in self.parts)


def command_job(host: str, pid: int) -> str:
    """The job in the names of what a command stages; it holds no lease."""
    return f"fetch_{digest_bytes(host.encode())[:4].hex()}_{pid}"


def sweep_own_drafts(store: Store, host: str) -> None:
    """Remove what a killed fetch on this machine has staged.

    Raises:
        StorageFailed: I/O error.
    """
    for torn in scan(store).torn:
        found = _OWN_DRAFT.fullmatch(torn.name.job)
        if found and found["host"] == digest_bytes(host.encode())[:4].hex() and not is_alive(int(found["pid"])):
            # crash here: a draft with fewer files, swept the next time.
            store.files.remove_tree(store.path(str(torn.name)))


def local_copy(store: Store, id_: str) -> str | None:
    """The committed checkpoint with this id, if it is here.

    Raises:
        StorageFailed: I/O error.
    """
    found = ((name, read_quietly(store, name)) for name in scan(store).committed)
    return next((name for name, manifest in found if manifest is not None and manifest.id == id_), None)


def fetch_checkpoint(
    remote: Store, remote_name: str, store: Store, limits: Limits, *, job: str, at_ns: int, is_refreshing: bool = False
) -> Fetched:
    """Make sure that a checkpoint of a mirror is here and whole; copies what is missing or damaged.

    Args:
        remote: the store in the mirror.
        remote_name: the checkpoint there.
        store: the local store.
        limits: memory, bandwidth, progress.
        job: in the names of what is staged.
        at_ns: the time for the record of a quarantine.
        is_refreshing: replace another checkpoint that has its name here, once the new copy is whole.

    Raises:
        WouldOverwrite: another checkpoint has its name here, and ``is_refreshing`` is not set.
        DamagedCheckpoint: the mirror's copy is not what was written; nothing here was changed.
        UnbrokenError: the mirror or the disk refused; the old copy is here, or none.
    """
    encoded, manifest = _read_manifest(remote, remote_name)
    here, name = local_copy(store, manifest.id), _name_here(remote_name, manifest)
    if here is not None:
        repaired = _repair(remote, remote_name, store, here, manifest, limits, job=job)
        # A refresh that was cut short has left both copies.
        is_left = is_refreshing and here.startswith(f"{name}.") and _is_stale(remote, store, name)
        return replace(repaired, name=_give_way(store, here, name, job, at_ns)) if is_left else repaired
    is_stale = _in_the_way(remote, store, name, is_refreshing=is_refreshing)
    # crash here: a draft with some parts, which no reader uses; what was here before is here.
    draft = begin(store, step=manifest.step, job=job)
    try:
        parts = _copy_parts(remote, remote_name, manifest, manifest.parts, draft, limits)
        published = commit_copy(draft, encoded, parts, called=name)
    except BaseException:
        draft.discard()
        raise
    if is_stale and published != name:
        published = _give_way(store, published, name, job, at_ns)
    return Fetched(published, manifest, tuple(part.name for part in parts), is_new=True)


def plan_fetch(remote: Store, remote_name: str, store: Store, *, is_refreshing: bool = False) -> Fetched:
    """What ``fetch_checkpoint`` would copy; copies nothing and does not read the parts in the mirror.

    Raises:
        WouldOverwrite: another checkpoint has its name here, and ``is_refreshing`` is not set.
        DamagedCheckpoint: the mirror's copy lacks a part, or has one of another size.
        UnbrokenError: the mirror or the disk refused.
    """
    _, manifest = _read_manifest(remote, remote_name)
    here, name = local_copy(store, manifest.id), _name_here(remote_name, manifest)
    wanted = _damaged_parts(store, here, manifest) if here is not None else list(manifest.parts)
    if here is None:
        _in_the_way(remote, store, name, is_refreshing=is_refreshing)
    verdict = verify(remote, remote_name, Level.QUICK)
    if wanted and not verdict.is_sound:
        raise verdict.error(remote)
    return Fetched(here or name, manifest, tuple(part.name for part in wanted), is_new=here is None)


def _read_manifest(remote: Store, remote_name: str) -> tuple[bytes, Manifest]:
    path = remote.path(remote_name) / MANIFEST
    encoded = remote.files.read_bytes(path, limit_bytes=FILE_LIMIT_BYTES)
    return encoded, decode(encoded, path)


def _name_here(remote_name: str, manifest: Manifest) -> str:
    return checkpoint_name(manifest.step, manifest.kind) if is_checkpoint_name(remote_name) else remote_name


def _in_the_way(remote: Store, store: Store, name: str, *, is_refreshing: bool) -> bool:
    """Whether something here has the name and must give way; if the name is only taken, the copy gets another."""
    if not _is_stale(remote, store, name):
        return False
    if name in scan(store).committed and verify(store, name, Level.QUICK).is_sound and not is_refreshing:
        remedy = Help("unbroken fetch … --refresh", "replace it once the new copy is whole")
        raise WouldOverwrite(path=store.path(name), remedy=remedy)
    return True


def _is_stale(remote: Store, store: Store, name: str) -> bool:
    """Whether a checkpoint of ours has a name here and is not one of the mirror's: a step may be saved twice."""
    inventory = scan(store)
    if name in without_manifest(store, inventory):
        return True
    if name not in inventory.committed:
        return False
    manifest = read_quietly(store, name)
    return manifest is None or local_copy(remote, manifest.id) is None


def _give_way(store: Store, published: str, name: str, job: str, at_ns: int) -> str:
    """Replace a stale checkpoint by a copy that is whole and here under another name; returns the copy's name.

    In this order there is one of the two at every instant.
    """
    # crash here: both copies, or the new one alone under the other name.
    quarantine(store, name, ("replaced by the copy of a mirror",), job=job, at_ns=at_ns)
    # crash here: the new copy under one name or the other.
    store.files.publish(store.path(published), store.path(name))
    return name


def _damaged_parts(store: Store, name: str, manifest: Manifest) -> list[Part]:
    bad = {finding.part for finding in verify(store, name, Level.FULL).findings}
    return [part for part in manifest.parts if part.name in bad]


def _repair(
    remote: Store, remote_name: str, store: Store, name: str, manifest: Manifest, limits: Limits, *, job: str
) -> Fetched:
    """Replace the damaged parts of a checkpoint that is here."""
    wanted = _damaged_parts(store, name, manifest)
    if not wanted:
        return Fetched(name, manifest, (), is_new=False)
    draft = begin(store, step=manifest.step, job=job)
    try:
        _copy_parts(remote, remote_name, manifest, wanted, draft, limits)
        for part in wanted:
            target = store.path(name) / part.name
            store.files.make_directory(target.parent)
            # crash here: some parts are whole again, the others as damaged as before.
            store.files.publish(draft.path / part.name, target)
    finally:
        draft.discard()
    return Fetched(name, manifest, tuple(part.name for part in wanted), is_new=False)


def _copy_parts(
    remote: Store, remote_name: str, manifest: Manifest, parts: Sequence[Part], draft: Draft, limits: Limits
) -> tuple[Part, ...]:
    block = min(manifest.block_bytes, max((part.size_bytes for part in parts), default=1) or 1)
    directory = remote.path(remote_name)
    # A block that is on its way is held twice: by the client library, and in the buffer that it is copied to.
    reading = max(limits.pieces(block) // 3, 1)
    objects, count = limits.objects(block), limits.pieces(block) - reading
    # One buffer more than all objects can hold while they wait for one.
    window, buffers = max((count - 1) // objects, 1), PieceBuffers(count, block, limits.is_stopped)

    def copy(part: Part) -> None:
        # Each block is verified with the digests of the manifest before it is written.
        draft.write_part(part.name, _blocks(remote, directory, manifest, part, readers, (buffers, window), limits))

    with (
        ThreadPoolExecutor(reading, thread_name_prefix="unbroken-fetch") as readers,
        ThreadPoolExecutor(objects, thread_name_prefix="unbroken-fetch") as writers,
    ):
        pending = [writers.submit(copy, part) for part in parts]
        try:
            for each in pending:
                each.result()
        except BaseException:
            for each in pending:
                each.cancel()
            raise
    return tuple(parts)


def _blocks(
    remote: Store,
    directory: Path,
    manifest: Manifest,
    part: Part,
    readers: ThreadPoolExecutor,
    memory: tuple[PieceBuffers, int],
    limits: Limits,
) -> Iterator[memoryview]:
    """The blocks of a part in order, each verified, some read ahead."""
    ranges = zip(block_ranges(part.size_bytes, manifest.block_bytes), part.digest.blocks, strict=True)
    ahead: deque[Future[memoryview]] = deque()
    buffers, window = memory

    def read(place: tuple[int, int], expected: bytes, into: memoryview) -> memoryview:
        limits.take(len(into))
        return _block(remote, directory, part, place, expected, into)

    for place, expected in ranges:
        ahead.append(readers.submit(read, place, expected, buffers.take(place[1] - place[0])))
        if len(ahead) >= window:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _block(
    remote: Store, directory: Path, part: Part, place: tuple[int, int], expected: bytes, into: memoryview
) -> memoryview:
    start = place[0]
    for attempt in range(_ATTEMPTS):
        with remote.files.reading(directory / part.name) as source:
            taken = into[: source.fill(start, into)]
        try:
            require_block(directory, part.name, place, taken, expected)
        except DamagedCheckpoint:
            if attempt + 1 == _ATTEMPTS:
                raise
            continue
        break
    return into
