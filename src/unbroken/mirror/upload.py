"""Copying one checkpoint to a mirror: claim, parts, proof, manifest, record.

The manifest goes last, by a conditional create: that is the commit in the mirror, and before it no reader there takes
the parts for a checkpoint. Each part is proven in the store first, by the store's own checksum where it is one of the
bytes (S3 and those that speak like it), else by reading it back. Whatever is cut short is begun again by name: parts
that are there and proven are not sent twice.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from unbroken.errors import MirrorTaken, MirrorUnreachable, MirrorUnverified
from unbroken.mirror.client import Client, Found, piece_bytes
from unbroken.mirror.ownership import claim_name
from unbroken.mirror.transfer import READERS, Limits, PieceBuffers, PieceDigests, Reading, local_pieces
from unbroken.store.digest import BlockDigester
from unbroken.store.directory import Store
from unbroken.store.manifest import FILE_LIMIT_BYTES, Manifest, Part, decode
from unbroken.store.mirrored import Upload, record_upload, upload_of
from unbroken.store.names import MANIFEST

# A part that does not verify is sent again; a store that loses it every time is no mirror.
_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class _Copy:
    """One checkpoint on its way to one mirror; ``remote_name`` is the name that was claimed there."""

    store: Store
    name: str
    manifest: Manifest
    client: Client
    remote_name: str
    limits: Limits

    def key(self, part: str) -> str:
        return f"{self.remote_name}/{part}"


def upload_checkpoint(
    store: Store,
    name: str,
    client: Client,
    mirror: str,
    limits: Limits,
    *,
    job: str,
    clock_ns: Callable[[], int],
) -> Upload:
    """Copy a committed checkpoint to a mirror, verify it there, commit it there and record it here.

    Args:
        store: where the checkpoint is.
        name: what it is called here.
        client: the mirror, at the place of the checkpoints.
        mirror: the address of the mirror as the ledger knows it.
        limits: memory, bandwidth, progress.
        job: who writes the record.
        clock_ns: the time for the record.

    Raises:
        DamagedCheckpoint: the local checkpoint is not what was written; the mirror has no manifest of it.
        MirrorTaken: another writer has committed another checkpoint under the claimed name.
        MirrorUnverified: what is in the store is not what was sent.
        Stopped: the transfer was asked to end.
        UnbrokenError: the object store or the disk refused; the checkpoint is pending still.
    """
    path = store.path(name) / MANIFEST
    encoded = store.files.read_bytes(path, limit_bytes=FILE_LIMIT_BYTES)
    manifest = decode(encoded, path)
    copy = _Copy(store, name, manifest, client, claim_name(client, name, manifest.id), limits)
    present = {found.key: found for found in client.listing(copy.remote_name)}
    _send_parts(copy, present)
    # crash here: all parts in the mirror, and no manifest: no checkpoint there, and pending here.
    _commit(copy, encoded)
    upload = upload_of(mirror, manifest, name, copy.remote_name)
    # crash here: a checkpoint in the mirror that is pending here; the next pass verifies and records it.
    record_upload(store, upload, job=job, at_ns=clock_ns())
    return upload


def _send_parts(copy: _Copy, present: Mapping[str, Found]) -> None:
    # Large ones first: the last to end is then a short one.
    parts = sorted(copy.manifest.parts, key=lambda part: part.size_bytes, reverse=True)
    largest = piece_bytes(parts[0].size_bytes)
    with (
        ThreadPoolExecutor(READERS, thread_name_prefix="unbroken-mirror") as readers,
        ThreadPoolExecutor(copy.limits.objects(largest), thread_name_prefix="unbroken-mirror") as pool,
    ):
        reading = Reading(readers, copy.limits.buffers(largest), copy.client.has_checksum)
        pending = [pool.submit(_send_part, copy, part, reading, present.get(copy.key(part.name))) for part in parts]
        try:
            for each in pending:
                each.result()
        except BaseException:
            for each in pending:
                each.cancel()
            raise


def _send_part(copy: _Copy, part: Part, reading: Reading, there: Found | None) -> None:
    """Make sure that a part is in the mirror with the bytes that the manifest names."""
    if (
        there is not None
        and there.size_bytes == part.size_bytes
        and _is_proven(copy, part, there, _expected(copy, part, reading), reading.buffers)
    ):
        copy.limits.progress(part.size_bytes)
        return
    complaint = ""
    for _ in range(_ATTEMPTS):
        digests, lost = PieceDigests(), None
        with contextlib.closing(_sent(copy, part, reading, digests)) as chunks:
            # crash here: this part whole or absent; an upload in pieces leaves pieces that no key names.
            try:
                copy.client.put(
                    copy.key(part.name),
                    chunks,
                    part.size_bytes,
                    in_flight=copy.limits.in_flight(piece_bytes(part.size_bytes)),
                )
            except MirrorUnreachable as error:
                # Perhaps only the answer to the last request was lost: then the part is there.
                lost = error
        complaint = _complaint(copy, part, digests, reading.buffers)
        if not complaint:
            return
        if lost is not None:
            raise lost
    raise MirrorUnverified(mirror=str(copy.client.address), key=copy.key(part.name), complaint=complaint)


def _complaint(copy: _Copy, part: Part, digests: PieceDigests, buffers: PieceBuffers) -> str:
    """What is wrong with a part in the store; empty if its bytes are there."""
    found = copy.client.find(copy.key(part.name))
    if found is None:
        return "it is not there after it was written"
    if found.size_bytes != part.size_bytes:
        return f"it has {found.size_bytes:,} bytes there, not {part.size_bytes:,}"
    return "" if _is_proven(copy, part, found, digests, buffers) else "its bytes there are not those that were sent"


def _sent(
    copy: _Copy, part: Part, reading: Reading, digests: PieceDigests
) -> Generator[bytes | memoryview, None, None]:
    with contextlib.closing(local_pieces(copy.store, copy.name, copy.manifest, part, reading, digests)) as pieces:
        for piece in pieces:
            copy.limits.take(len(piece))
            yield piece
            # Held no longer than the client holds it: its memory is for the next piece.
            del piece


def _expected(copy: _Copy, part: Part, reading: Reading) -> PieceDigests:
    digests = PieceDigests()
    deque(local_pieces(copy.store, copy.name, copy.manifest, part, reading, digests), maxlen=0)
    return digests


def _is_proven(copy: _Copy, part: Part, found: Found, digests: PieceDigests, buffers: PieceBuffers) -> bool:
    is_multipart = part.size_bytes > piece_bytes(part.size_bytes)
    if found.etag is not None and found.etag == digests.etag(is_multipart=is_multipart):
        return True
    return has_bytes(copy.client, part, found, copy.manifest.block_bytes, buffers, copy.limits)


def has_bytes(
    client: Client, part: Part, found: Found, block_bytes: int, buffers: PieceBuffers, limits: Limits
) -> bool:
    """Whether the bytes of an object are those of a part, by reading them back.

    For stores whose checksum is of another kind or that have none: encrypted by a key service, Azure, a directory.

    Raises:
        Stopped: the transfer was asked to end.
        UnbrokenError: the object store refused.
    """
    digester = BlockDigester(block_bytes)
    for start in range(0, part.size_bytes, buffers.size_bytes):
        size_bytes = min(buffers.size_bytes, part.size_bytes - start)
        limits.wait_for(size_bytes)
        # A piece is held twice: by the client library, and in the buffer that it is copied to.
        with buffers.room():
            into = buffers.take(size_bytes)
            try:
                is_there = client.fill(found.key, start, into) == size_bytes
            except FileNotFoundError:
                return False
        if not is_there:
            return False
        digester.update(into)
        del into
    return digester.finish() == part.digest


def _commit(copy: _Copy, encoded: bytes) -> None:
    create_manifest(copy.client, copy.key(MANIFEST), encoded)


def create_manifest(client: Client, key: str, encoded: bytes) -> None:
    """Commit a checkpoint in an object store, whose parts are there and proven.

    Raises:
        MirrorUnverified: the manifest is not there after it was written.
        MirrorTaken: another writer has committed another checkpoint under the name.
        UnbrokenError: the object store refused.
    """
    mirror = str(client.address)
    # crash here: the manifest is there whole or not at all; it is the instant at which the mirror has the checkpoint.
    is_ours = client.create(key, encoded)
    try:
        found = client.read(key, 0, len(encoded) + 1)
    except FileNotFoundError:
        raise MirrorUnverified(mirror=mirror, key=key, complaint="it is not there after it was written") from None
    if found == encoded:
        return
    if is_ours:
        raise MirrorUnverified(mirror=mirror, key=key, complaint="its bytes there are not those that were sent")
    raise MirrorTaken(mirror=mirror, complaint=f"{key} is another checkpoint")
