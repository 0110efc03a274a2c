"""Checkpoints that are written straight to an object store, without a local copy.

Every rank sends its parts and proves them there; rank 0 looks at what is there and creates the manifest, conditionally:
that is the commit. No disk says who holds the run, so each job takes the next number in the store when it opens the
run; a job that finds a higher number than its own commits nothing more. The name of a checkpoint is claimed before its
first part. The claim of one that was not committed stays for ever: its writer may be slow and not dead, and what it
still sends must not fall among the parts of another.
"""

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import MirrorUnverified, NoCredentials, Superseded
from unbroken.mirror.address import Address
from unbroken.mirror.client import Client, piece_bytes
from unbroken.mirror.ownership import claim_name, claimed_by, newer_job, take_number
from unbroken.mirror.remote import RemotePath, store_at
from unbroken.mirror.remove import remove_checkpoints, remove_parts
from unbroken.mirror.transfer import Limits, PieceBuffers, PieceDigests
from unbroken.mirror.upload import create_manifest, has_bytes
from unbroken.store.commit import Record, encoded_manifest, require_evidence
from unbroken.store.digest import BLOCK_BYTES, BlockDigester
from unbroken.store.directory import Store
from unbroken.store.keep import Policy, decide, keeps_everything
from unbroken.store.manifest import Part
from unbroken.store.names import MANIFEST, Begun, checkpoint_name, require_safe
from unbroken.store.scan import scan
from unbroken.store.sweep import candidates, plan_sweep

# As often as an upload to a mirror sends a part.
_ATTEMPTS: Final = 3
_CLAIM: Final = re.compile(r"direct-(?P<number>[0-9]+)-.+")


@dataclass(frozen=True)
class DirectDraft:
    """A checkpoint that is being written to an object store, on one rank."""

    client: Client
    name: str
    limits: Limits
    # No part is larger; from it follows the size of the pieces of an upload.
    most_bytes: int

    @property
    def piece(self) -> int:
        """The size of the pieces of an upload."""
        return piece_bytes(self.most_bytes)

    @property
    def path(self) -> Path:
        """Its address."""
        return RemotePath(str(self.client.address)) / self.name

    def write_part(self, name: str, chunks: Iterable[bytes | memoryview], *, is_large: bool = False) -> Part:
        """Send one part and prove it there; the returned evidence is for the commit.

        Raises:
            UnsafeName: the name leads out of the checkpoint.
            MirrorUnverified: what is in the store is not what was sent.
            UnbrokenError: the object store refused; the draft can be given up.
        """
        del is_large
        require_safe(name)
        for _ in range(_ATTEMPTS - 1 if iter(chunks) is not chunks else 0):
            # Keys that another program has renewed are found the next time, and bytes that were lost are sent again.
            with contextlib.suppress(MirrorUnverified, NoCredentials):
                return self._send(name, chunks)
        return self._send(name, chunks)

    def _send(self, name: str, chunks: Iterable[bytes | memoryview]) -> Part:
        key = f"{self.name}/{name}"
        digester, digests = BlockDigester(), PieceDigests()
        pieces = self._sent(chunks, digester, digests)
        first, second = next(pieces), next(pieces, None)
        # crash here: this part whole or absent; an upload in pieces leaves pieces that no key names.
        if second is None:
            self.client.put(key, iter([first]), len(first), in_flight=1)
        else:
            rest = itertools.chain([first, second], pieces)
            # The client takes from it the size of the pieces, and that there are several.
            size_bytes = max(self.most_bytes, self.piece + 1)
            self.client.put(key, rest, size_bytes, in_flight=self.limits.in_flight(self.piece))
        part = Part(name, digester.finish())
        self._require_proven(key, part, digests, is_multipart=second is not None)
        return part

    def _sent(
        self, chunks: Iterable[bytes | memoryview], digester: BlockDigester, digests: PieceDigests
    ) -> Generator[bytes, None, None]:
        for piece in _in_pieces(chunks, self.piece):
            digester.update(memoryview(piece))
            digests.add(piece)
            self.limits.take(len(piece))
            yield piece

    def _require_proven(self, key: str, part: Part, digests: PieceDigests, *, is_multipart: bool) -> None:
        found, complaint = self.client.find(key), ""
        if found is None:
            complaint = "it is not there after it was written"
        elif found.size_bytes != part.size_bytes:
            complaint = f"it has {found.size_bytes:,} bytes there, not {part.size_bytes:,}"
        elif found.etag is None or found.etag != digests.etag(is_multipart=is_multipart):
            buffers = PieceBuffers(2, min(BLOCK_BYTES, max(part.size_bytes, 1)), self.limits.is_stopped)
            if not has_bytes(self.client, part, found, BLOCK_BYTES, buffers, self.limits):
                complaint = "its bytes there are not those that were sent"
        if complaint:
            raise MirrorUnverified(mirror=str(self.client.address), key=key, complaint=complaint)

    def discard(self) -> None:
        """Remove what was written.

        Raises:
            UnbrokenError: the object store refused; a later save removes it.
        """
        remove_parts(self.client, self.name)


def _in_pieces(chunks: Iterable[bytes | memoryview], piece: int) -> Iterator[bytes]:
    """The same bytes in pieces of one size but for the last; at least one piece, which may be empty."""
    held, count = bytearray(), 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while len(rest):
            taken, rest = rest[: piece - len(held)], rest[piece - len(held) :]
            held += taken
            if len(held) == piece:
                count += 1
                yield bytes(held)
                held = bytearray()
    if held or not count:
        yield bytes(held)


class DirectStore:
    """The object store that a job saves to, on one rank; rank 0 opens it with ``number``, its place among the jobs."""

    def __init__(
        self,
        client: Client,
        job: str,
        limits: Limits,
        *,
        number: int = 0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client, self._job, self._limits = client, job, limits
        self._number, self._clock_ns = number, clock_ns
        self._policies: tuple[Policy, ...] = ()
        self._resume_target: str | None = None
        self._fence: Callable[[], None] | None = None
        # Set once another job has opened the run.
        self.lost: Superseded | None = None

    def keep(
        self, policies: tuple[Policy, ...], *, resume_target: str | None, fence: Callable[[], None] | None
    ) -> None:
        """What to keep after each commit; ``fence`` raises if the run directory says that another job has the run."""
        self._policies, self._resume_target, self._fence = policies, resume_target, fence

    @property
    def address(self) -> Address:
        """Where the checkpoints are."""
        return self._client.address

    def store(self) -> Store:
        """The checkpoints as they are now."""
        return store_at(self._client)

    def require_held(self) -> None:
        """Pass if no other job has opened the run since.

        Raises:
            Superseded: one has.
            UnbrokenError: the object store refused.
        """
        if self._fence is not None:
            self._fence()
        if (other := newer_job(self._client, self._number)) is not None:
            self.lost = Superseded(store=str(self.address), mine=self._job, other=other)
            raise self.lost

    def begin(self, step: int, kind: str, *, coming_bytes: int, coming_files: int) -> Begun:
        """Claim a name.

        Raises:
            Superseded: another job has opened the run since.
            UnbrokenError: the object store refused.
        """
        del coming_bytes, coming_files
        self.require_held()
        claim = f"direct-{self._number}-{self._job}-{step}-{self._clock_ns():x}"
        # crash here: a claim without a part; the name is not used again.
        return Begun(step, claim_name(self._client, checkpoint_name(step, kind), claim))

    def draft(self, begun: Begun, *, coming_bytes: int) -> DirectDraft:
        """Where this rank writes its parts."""
        # Beside its elements a tensor has a head of some hundred bytes.
        return DirectDraft(self._client, begun.place, self._limits, coming_bytes + coming_bytes // 8)

    def commit(self, begun: Begun, *, plan: Collection[str], parts: Collection[Part], record: Record) -> str:
        """Create the manifest, if all parts are there and this job still holds the run; returns the name.

        Raises:
            EvidenceMissing: a planned part was not reported or is not there with its size, or there are others.
            ManifestDamaged: the record holds what a manifest cannot carry; nothing is committed.
            Superseded: another job has opened the run since; nothing is committed.
            UnbrokenError: the object store refused; the old state is intact.
        """
        name, path = begun.place, RemotePath(str(self.address)) / begun.place
        present = {found.key.removeprefix(f"{name}/"): found.size_bytes for found in self._client.listing(name)}
        require_evidence(path, plan, parts, present)
        encoded = encoded_manifest(path, self._job, begun.step, parts, record)
        self.require_held()
        # crash here: all parts and no manifest: no checkpoint. The manifest is there whole or not at all.
        create_manifest(self._client, f"{name}/{MANIFEST}", encoded)
        return name

    def settle(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Keep and sweep, and remove what earlier jobs left unfinished; returns what was removed.

        Raises:
            UnbrokenError: the object store refused; what is gone is gone wholly.
        """
        store = self.store()
        inventory = scan(store)
        released: tuple[str, ...] = ()
        if not keeps_everything(self._policies):
            known = candidates(store, inventory.committed)
            decision = decide(known, self._policies, resume_target=self._resume_target)
            plan = plan_sweep(store, [each for each in decision.released if each != name], is_live=lambda draft: True)
            released = tuple(plan.checkpoints)
        remove_checkpoints(self._client, released)
        torn = tuple(each for each in inventory.uploading if self._is_left(each))
        for each in torn:
            remove_parts(self._client, each)
        return (*released, *torn), ()

    def _is_left(self, name: str) -> bool:
        """Whether an unfinished checkpoint is of an earlier job, or of this one: it has none in flight now."""
        found = _CLAIM.fullmatch(claimed_by(self._client, name) or "")
        return found is not None and int(found["number"]) <= self._number


def open_direct(client: Client, job: str, limits: Limits, *, is_first: bool) -> DirectStore:
    """Open the object store of a run on one rank; on rank 0 this job holds the run from now on.

    Raises:
        UnbrokenError: the object store refused.
    """
    return DirectStore(client, job, limits, number=take_number(client, job) if is_first else 0)
