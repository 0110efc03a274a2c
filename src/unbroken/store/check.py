"""Verifying a checkpoint: quick (names and sizes), sampled, full.

Every level first verifies the manifest by its own digest. Quick then checks names, kinds and sizes; sampled also
reads some blocks of each part; full reads every byte. All bad places are named, with their byte ranges; nothing is
changed. Links are never followed: a part is a regular file inside its own checkpoint or it is a finding.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointError, DamagedCheckpoint, FormatUnknown, ManifestDamaged, StorageFailed
from unbroken.store.commit import walk_files
from unbroken.store.digest import block_ranges, digest_bytes
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part
from unbroken.store.names import MANIFEST
from unbroken.store.parts import BlockReader

DEFAULT_WORKERS: Final = 8
_SAMPLED_BLOCKS: Final = 2
_LASTING: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


class Level(Enum):
    """How far a verification goes."""

    QUICK = "quick"
    SAMPLED = "sampled"
    FULL = "full"


class Cause(Enum):
    """Why a part did not verify: its bytes are wrong, cannot be read or are of an unknown format, or it was removed."""

    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    UNKNOWN_FORMAT = "unknown-format"
    REMOVED = "removed"


@dataclass(frozen=True)
class Finding:
    """One bad place: the part, what is wrong, and the byte range where that is known."""

    part: str
    problem: str
    start: int | None = None
    end: int | None = None
    cause: Cause = Cause.DAMAGED

    def __str__(self) -> str:
        where = "" if self.start is None else f" bytes {self.start:,} to {self.end:,}"
        return f"{self.part}:{where} {self.problem}"


@dataclass(frozen=True)
class Verdict:
    """What a verification found; ``foreign`` are files inside the checkpoint that its manifest does not name."""

    name: str
    level: Level
    manifest: Manifest | None
    findings: tuple[Finding, ...]
    foreign: tuple[str, ...] = ()
    checked_bytes: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing bad was found at this level."""
        return not self.findings

    @property
    def is_damaged(self) -> bool:
        """Whether bytes are there and wrong; what merely could not be read may be readable tomorrow."""
        return any(finding.cause is Cause.DAMAGED for finding in self.findings)

    @property
    def is_removed(self) -> bool:
        """Whether there is no such checkpoint any more: its run, or a command, has removed or moved it meanwhile."""
        return any(finding.cause is Cause.REMOVED for finding in self.findings)

    def error(self, store: Store) -> DamagedCheckpoint:
        """The findings as an error."""
        return DamagedCheckpoint(path=store.path(self.name), findings=tuple(map(str, self.findings)))


@dataclass(frozen=True)
class _Block:
    part: Part
    start: int
    end: int
    expected: bytes


def verify(
    store: Store,
    name: str,
    level: Level,
    *,
    seed: int = 0,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[int], None] | None = None,
) -> Verdict:
    """Check one checkpoint; ``seed`` draws the sample, ``progress`` gets the number of bytes as they are verified.

    A bad checkpoint raises nothing: what cannot be read is a finding too. Nor is it damage if the run that is at work
    removes an old checkpoint while it is being read.
    """
    found = _verify(store, name, level, seed=seed, workers=workers, progress=progress)
    if found.is_damaged and is_removed(store, name):
        return Verdict(
            name, level, found.manifest, (Finding(MANIFEST, "is not there, or not any more", cause=Cause.REMOVED),)
        )
    return found


def is_removed(store: Store, name: str) -> bool:
    """Whether there is no such checkpoint any more: in a mirror the manifest goes first, in a run all goes at once."""
    try:
        store.read_manifest(name)
    except StorageFailed as refused:
        return refused.is_missing
    except CheckpointError:
        pass
    return False


def without_its_manifest(name: str, level: Level) -> Verdict:
    """The verdict on a checkpoint whose manifest is lost, so that nothing of it can be verified."""
    return Verdict(name, level, None, (Finding(MANIFEST, "is missing"),))


def _verify(
    store: Store, name: str, level: Level, *, seed: int, workers: int, progress: Callable[[int], None] | None
) -> Verdict:
    try:
        manifest = store.read_manifest(name)
    except (CheckpointError, StorageFailed) as refused:
        return Verdict(name, level, None, (_manifest_finding(refused),))
    directory = store.path(name)
    findings, whole = _look_at_names(store, directory, manifest)
    foreign = _foreign_files(store, directory, manifest)
    blocks = [block for part in whole for block in _chosen_blocks(part, manifest, level, seed)]
    findings += _read_blocks(store, directory, blocks, workers, progress)
    findings.sort(key=lambda finding: (finding.part, finding.start or 0))
    checked = sum(block.end - block.start for block in blocks)
    return Verdict(name, level, manifest, tuple(findings), foreign, checked)


def _manifest_finding(refused: CheckpointError | StorageFailed) -> Finding:
    match refused:
        case FormatUnknown():
            return Finding(
                MANIFEST, f"is of a format this version does not read: {refused.found}", cause=Cause.UNKNOWN_FORMAT
            )
        case StorageFailed():
            return _unreadable(MANIFEST, refused)
        case ManifestDamaged():
            return Finding(MANIFEST, f"cannot be trusted: {refused.complaint}")
    return Finding(MANIFEST, refused.message)


def _unreadable(part: str, refused: StorageFailed, start: int | None = None, end: int | None = None) -> Finding:
    # No such file, or a link or directory in its place, is a fact about the checkpoint; an I/O error may pass.
    lasting = isinstance(refused.__cause__, OSError) and refused.__cause__.errno in _LASTING
    cause = Cause.DAMAGED if lasting else Cause.UNREADABLE
    return Finding(part, f"cannot be read: {refused.cause}", start, end, cause)


def _look_at_names(store: Store, directory: Path, manifest: Manifest) -> tuple[list[Finding], list[Part]]:
    findings: list[Finding] = []
    whole: list[Part] = []
    kinds: dict[Path, NodeKind | None] = {}
    for part in manifest.parts:
        try:
            problem = _name_problem(store, directory, part, kinds)
        except StorageFailed as refused:
            findings.append(_unreadable(part.name, refused))
            continue
        if problem:
            findings.append(Finding(part.name, problem))
        else:
            whole.append(part)
    return findings, whole


def _name_problem(store: Store, directory: Path, part: Part, kinds: dict[Path, NodeKind | None]) -> str | None:
    for above in Path(part.name).parents:
        if above != Path() and above not in kinds:
            found = store.files.find(directory / above)
            kinds[above] = found.kind if found else None
        if kinds.get(above) is NodeKind.LINK:
            return f"is behind a link, {above}"
    found = store.files.find(directory / part.name)
    if found is None:
        return "is missing"
    if found.kind is not NodeKind.FILE:
        return f"is a {found.kind.value}, not a file" if found.kind is not NodeKind.OTHER else "is not a regular file"
    if found.size_bytes != part.size_bytes:
        return f"has {found.size_bytes:,} bytes, not {part.size_bytes:,}"
    return None


def _foreign_files(store: Store, directory: Path, manifest: Manifest) -> tuple[str, ...]:
    known = {part.name for part in manifest.parts} | {MANIFEST}
    try:
        return tuple(name for name, _ in walk_files(store.files, directory) if name not in known)
    except StorageFailed:
        # A directory that cannot be listed hides its parts as well; each of them is a finding already.
        return ()


def _chosen_blocks(part: Part, manifest: Manifest, level: Level, seed: int) -> Iterator[_Block]:
    if level is Level.QUICK:
        return
    ranges = list(block_ranges(part.size_bytes, manifest.block_bytes))
    chosen = range(len(ranges))
    if level is Level.SAMPLED and len(ranges) > _SAMPLED_BLOCKS:
        import random

        draw = random.Random(f"{seed}:{manifest.id}:{part.name}")  # noqa: S311 - a sample, not a secret
        chosen = sorted(draw.sample(chosen, _SAMPLED_BLOCKS))  # type: ignore[assignment]
    for i in chosen:
        yield _Block(part, *ranges[i], part.digest.blocks[i])


def _read_blocks(
    store: Store, directory: Path, blocks: list[_Block], workers: int, progress: Callable[[int], None] | None
) -> list[Finding]:
    reader = BlockReader(store.files, max((block.end - block.start for block in blocks), default=0))

    def read(block: _Block) -> Finding | None:
        finding = _block_finding(reader, directory, block)
        if progress is not None:
            progress(block.end - block.start)
        return finding

    if len(blocks) < 2 or workers < 2:
        return [finding for block in blocks if (finding := read(block))]
    # Imported here: a quick look, which `status` takes at every call, needs no threads.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(workers, thread_name_prefix="unbroken-verify") as pool:
        return [finding for finding in pool.map(read, blocks) if finding]


def _block_finding(reader: BlockReader, directory: Path, block: _Block) -> Finding | None:
    try:
        view = reader.read(directory / block.part.name, block.start, block.end)
    except StorageFailed as refused:
        return _unreadable(block.part.name, refused, block.start, block.end)
    if len(view) != block.end - block.start or digest_bytes(view) != block.expected:
        return Finding(block.part.name, "are not the bytes that were written", block.start, block.end)
    return None
