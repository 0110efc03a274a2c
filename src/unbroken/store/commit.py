"""The commit: the one instant at which a checkpoint begins to exist.

Parts go into a draft, a directory whose name no reader trusts. A commit then looks at the evidence (every part of the
plan reported, and on disk with that size), writes the manifest, makes everything durable, and renames the draft to its
final name. That rename is the commit: before it there is the old state, after it the new one, and nothing between.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointError, EvidenceMissing, StorageFailed
from unbroken.files import Files
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part, Tensor, decode, encode
from unbroken.store.names import (
    FINAL,
    LATEST,
    MANIFEST,
    OWN,
    PERIODIC,
    DraftName,
    checkpoint_name,
    is_job,
    parse_draft,
    require_safe,
    scratch,
)
from unbroken.store.parts import write_part
from unbroken.store.rewind import abandoned_ids


class PartWriter(Protocol):
    """Where the parts of a checkpoint that is being written go: a draft in a directory, or in an object store."""

    @property
    def path(self) -> Path:
        """Where it is, for messages."""

    def write_part(self, name: str, chunks: Iterable[bytes | memoryview], *, is_large: bool = False) -> Part:
        """Write one part durably; the returned evidence is for the commit."""

    def discard(self) -> None:
        """Give the draft up."""


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written. Ranks share it by its name."""

    store: Store
    name: DraftName

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.store.path(str(self.name))

    def write_part(self, name: str, chunks: Iterable[bytes | memoryview], *, is_large: bool = False) -> Part:
        """Write one part durably, a large one past the page cache; the returned evidence is for the commit.

        Raises:
            UnsafeName: the name leads out of the checkpoint.
            StorageFailed: I/O error; the draft can be given up.
        """
        require_safe(name)
        files = self.store.files
        if files.find(self.path) is None:
            # Created on this node alone it would look like success here and be missing on the others.
            cause = "the draft is not there; every rank must see the same directory"
            raise StorageFailed(operation="write a part into", path=self.path, cause=cause)
        files.make_directory((self.path / name).parent)
        # crash here: a draft with some of its parts; it is torn, and swept once its job is gone.
        return write_part(files, self.path, name, chunks, is_large=is_large)

    def discard(self) -> None:
        """Give the draft up.

        Raises:
            StorageFailed: I/O error; the next sweep tries again.
        """
        self.store.files.remove_tree(self.path)


@dataclass(frozen=True)
class Record:
    """The fields of a manifest beside the parts."""

    kind: str
    saved_at_ns: int
    origin: str = OWN
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def begin(store: Store, *, step: int, job: str) -> Draft:
    """Start a checkpoint; a second attempt at the same step by the same job gets a directory of its own.

    Raises:
        StorageFailed: I/O error.
    """
    if not is_job(job):
        raise ValueError(f"a job is named by at most 64 letters, digits and underscores, not {job!r}")
    files = store.files
    files.make_directory(store.root, durable=True)
    tried = [parse_draft(node.name) for node in files.list_directory(store.root)]
    attempts = [name.attempt for name in tried if name and name.job == job and name.step == step]
    draft = Draft(store, DraftName(job, step, max(attempts, default=0) + 1))
    # crash here: an empty draft, swept once its job is gone.
    files.make_directory(draft.path)
    return draft


def commit(
    draft: Draft,
    *,
    plan: Collection[str],
    parts: Collection[Part],
    record: Record,
    fence: Callable[[], None] | None = None,
    called: str | None = None,
) -> str:
    """Turn a draft into a checkpoint if the evidence is complete; returns the checkpoint's name.

    ``plan`` is what must be there, ``parts`` what the writers report. ``fence`` is called last and raises if this job
    has been taken for dead meanwhile, so that a job that slept through its successor's start cannot commit. ``called``
    is another stem for its name than the one that its kind gives it.

    Raises:
        EvidenceMissing: a planned part was not reported or is not on disk with its size, or there are others.
        ManifestDamaged: the record holds what a manifest cannot carry; nothing is committed.
        UnsafeName: a part's name leads out of the checkpoint; nothing is committed.
        StorageFailed: I/O error; the old state is intact.
    """
    store = draft.store
    stem = called or checkpoint_name(draft.name.step, record.kind)
    _require_evidence(draft, plan, parts)
    encoded = encoded_manifest(draft.path, draft.name.job, draft.name.step, parts, record)
    _complete(draft, plan, encoded)
    if fence is not None:
        fence()
    return _publish(store, draft, stem)


def encoded_manifest(path: Path, job: str, step: int, parts: Collection[Part], record: Record) -> bytes:
    """The manifest of a checkpoint as it is stored; ``path`` is the draft's, for messages.

    Raises:
        ManifestDamaged: the record holds what a manifest cannot carry.
        UnsafeName: a part's name leads out of the checkpoint.
    """
    manifest = Manifest(
        # The instant is in it, so that a later save of the same step by the same job is another checkpoint.
        id=f"{job}-{step}-{record.saved_at_ns:x}",
        step=step,
        kind=record.kind,
        saved_at_ns=record.saved_at_ns,
        job=job,
        origin=record.origin,
        parts=tuple(parts),
        tensors=record.tensors,
        metrics=record.metrics,
        fingerprint=record.fingerprint,
        metadata=record.metadata,
    )
    encoded = encode(manifest)
    # What no reader would take must not become a checkpoint: it would be found out when it is needed.
    decode(encoded, path / MANIFEST)
    return encoded


def commit_copy(draft: Draft, encoded: bytes, parts: Collection[Part], *, called: str) -> str:
    """Turn a draft into a copy of a checkpoint, with the manifest that it has elsewhere; returns its name here.

    Raises:
        EvidenceMissing: a part of the manifest is not on disk with its size, or there are others.
        StorageFailed: I/O error; the old state is intact.
    """
    names = [part.name for part in parts]
    _require_evidence(draft, names, parts)
    _complete(draft, names, encoded)
    return _publish(draft.store, draft, called)


def _complete(draft: Draft, plan: Collection[str], encoded: bytes) -> None:
    files = draft.store.files
    for directory in _directories(draft.path, plan):
        files.sync_directory(directory)
    # crash here: all parts, durable, and no manifest: torn.
    files.write_new(draft.path / MANIFEST, [encoded])
    # crash here: a whole checkpoint under a draft's name: torn all the same, since nothing was promised yet.
    files.sync_directory(draft.path)


def _require_evidence(draft: Draft, plan: Collection[str], parts: Collection[Part]) -> None:
    require_evidence(draft.path, plan, parts, dict(walk_files(draft.store.files, draft.path)))


def require_evidence(
    path: Path, plan: Collection[str], parts: Collection[Part], present: Mapping[str, int | None]
) -> None:
    """Pass if the parts that were planned, those that were reported and those that are there are the same.

    Raises:
        EvidenceMissing: they are not.
    """
    problems = list(_contradictions(plan, parts, present))
    if problems:
        raise EvidenceMissing(path=path, missing=tuple(problems))


def _contradictions(plan: Collection[str], parts: Collection[Part], present: Mapping[str, int | None]) -> Iterator[str]:
    reported = {part.name: part for part in parts}
    if not plan:
        yield "no part was planned"
    if len(reported) != len(parts):
        yield "a part was reported twice"
    for name in sorted(set(plan) - reported.keys()):
        yield f"{name}: planned and not reported by its writer"
    for name in sorted(reported.keys() - set(plan)):
        yield f"{name}: reported and not planned"
    for name in sorted(present.keys() - reported.keys()):
        yield f"{name}: on disk and not reported"
    for name, part in sorted(reported.items()):
        if name not in present:
            yield f"{name}: reported and not on disk"
        elif (size_bytes := present[name]) is None:
            yield f"{name}: is not a regular file"
        elif size_bytes != part.size_bytes:
            yield f"{name}: {size_bytes:,} bytes on disk, {part.size_bytes:,} reported"


def walk_files(files: Files, directory: Path) -> Iterator[tuple[str, int | None]]:
    """Every file below a directory with its size; None for what is not a regular file.

    A directory that another process removes meanwhile has no files.

    Raises:
        StorageFailed: I/O error.
    """
    # A list and no recursion: a folder nested a thousand deep must not stop a resume.
    pending = [("", directory)]
    while pending:
        prefix, here = pending.pop()
        for node in files.list_present(here):
            if node.kind is NodeKind.DIRECTORY:
                pending.append((f"{prefix}{node.name}/", here / node.name))
                continue
            found = files.find(here / node.name)
            yield f"{prefix}{node.name}", found.size_bytes if found and found.kind is NodeKind.FILE else None


def _directories(root: Path, plan: Collection[str]) -> list[Path]:
    """Every directory below the draft that leads to a part, deepest first; the draft itself comes later."""
    found = {root / above for name in plan for above in Path(name).parents if above != Path()}
    return sorted(found, key=lambda path: len(path.parts), reverse=True)


def _publish(store: Store, draft: Draft, stem: str) -> str:
    taken = {node.name for node in store.files.list_directory(store.root)}
    if stem == FINAL and FINAL in taken:
        taken = _make_way(store, taken, draft.name.step)
    name = _free(stem, taken)
    # crash here: the draft's name or the final one; the rename is the commit.
    store.files.publish(draft.path, store.path(name))
    return name


def _free(stem: str, taken: Collection[str]) -> str:
    name, copy = stem, 1
    while name in taken:
        copy += 1
        name = f"{stem}.{copy}"
    return name


def _make_way(store: Store, taken: Collection[str], step: int) -> set[str]:
    """Give an earlier end of an extended run the name of its step: ``final`` is the newest. Returns the names then."""
    try:
        earlier = store.read_outline(FINAL)
    except CheckpointError:
        return set(taken)
    # One that was abandoned is known by its name, and under another one it would be chosen again.
    if earlier.step >= step or earlier.id in abandoned_ids(store).get(FINAL, ()):
        return set(taken)
    name = _free(checkpoint_name(earlier.step, PERIODIC), taken)
    # crash here: the earlier end under one name or the other; `latest` may point at neither until the next save.
    store.files.publish(store.path(FINAL), store.path(name))
    return {*taken, name} - {FINAL}


def point_latest(store: Store, name: str, *, job: str) -> bool:
    """Point ``latest`` at a committed checkpoint; it is a hint, never used to choose.

    False where it was not updated: something else called ``latest`` belongs to another tool, or the file system has no
    symlinks.

    Raises:
        StorageFailed: I/O error; the old link is intact.
    """
    link = store.path(LATEST)
    found = store.files.find(link)
    if found is not None and found.kind is not NodeKind.LINK:
        return False
    return store.files.swap_link(link, name, scratch=scratch(job, LATEST))
