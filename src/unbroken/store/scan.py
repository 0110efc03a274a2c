"""What is on disk: committed, torn, quarantined, abandoned, leftover, foreign. Reads only, verifies nothing.

A scan reads names, not manifests, so that it stays quick over ten thousand checkpoints; whoever needs a manifest reads
that one. A directory is a checkpoint if it carries a manifest of ours, whatever its name: another tool's folder
that was sealed counts like one that we wrote.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.disk import Node, NodeKind
from unbroken.errors import CheckpointError, StorageFailed
from unbroken.files import Files
from unbroken.store.commit import walk_files
from unbroken.store.directory import Store
from unbroken.store.envelope import begins_one
from unbroken.store.manifest import Manifest
from unbroken.store.names import (
    ABANDONED,
    CHECKPOINTS,
    CHECKPOINTS_HERE,
    CLAIMS,
    LATEST,
    MANIFEST,
    MIRROR,
    OWN_PARTS,
    PINS,
    QUARANTINE,
    REASON,
    REWINDS,
    RUN_RECORDS,
    DraftName,
    is_checkpoint_name,
    is_trash,
    parse_draft,
    scratch_owner,
    step_of,
    trashed_before_marks,
)
from unbroken.store.rewind import abandoned_ids

_RECORDS: Final = (QUARANTINE, ABANDONED, PINS, REWINDS, MIRROR)


@dataclass(frozen=True)
class Torn:
    """A draft: parts of a checkpoint that was not committed, or is not yet."""

    name: DraftName

    def weigh(self, store: Store) -> tuple[int, int]:
        """How many files it holds and their bytes.

        Raises:
            StorageFailed: I/O error.
        """
        sizes = [size or 0 for _, size in walk_files(store.files, store.path(str(self.name)))]
        return len(sizes), sum(sizes)


@dataclass(frozen=True)
class Leftover:
    """Something of ours that a crash kept from being removed or renamed; ``job`` is None if no job can be using it."""

    name: str
    job: str | None


@dataclass(frozen=True)
class Inventory:
    """A store at one moment."""

    committed: tuple[str, ...] = ()
    torn: tuple[Torn, ...] = ()
    leftover: tuple[Leftover, ...] = ()
    quarantined: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    # In a mirror: checkpoints whose upload has begun and not ended.
    uploading: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    latest: str | None = None


def scan(store: Store) -> Inventory:
    """Scan a store; one that does not exist is empty.

    Raises:
        StorageFailed: I/O error.
    """
    files = store.files
    if files.find(store.root) is None:
        return Inventory()
    nodes = files.list_directory(store.root)
    if any(node.name == CHECKPOINTS_HERE for node in nodes):
        nodes = [node for node in nodes if node.name not in RUN_RECORDS]
    given_up = abandoned_ids(store)
    in_place = dict.fromkeys(_quarantined_in_place(store))
    committed: list[str] = []
    abandoned: list[str] = []
    torn: list[Torn] = []
    leftover: list[Leftover] = []
    uploading: list[str] = []
    foreign: list[str] = []
    for node in nodes:
        draft = parse_draft(node.name)
        if draft and node.kind is NodeKind.DIRECTORY:
            torn.append(Torn(draft))
        elif is_trash(node.name) or _is_old_trash(store, node):
            leftover.append(Leftover(node.name, None))
        elif (owner := scratch_owner(node.name)) is not None and node.kind is not NodeKind.DIRECTORY:
            leftover.append(Leftover(node.name, owner))
        elif _is_record(node):
            continue
        elif not _carries_manifest(store, node):
            (uploading if _is_claimed(store, node) else foreign).append(node.name)
        elif node.name in in_place:
            continue
        elif node.name in given_up and _has_id(store, node.name, given_up):
            abandoned.append(node.name)
        else:
            committed.append(node.name)
    return Inventory(
        committed=tuple(committed),
        torn=tuple(torn),
        leftover=(*leftover, *_scratch_of_records(store, nodes)),
        quarantined=(*in_place, *_names_below(store, QUARANTINE)),
        abandoned=(*abandoned, *(f"{ABANDONED}/{name}" for name in _names_below(store, ABANDONED))),
        uploading=tuple(uploading),
        foreign=tuple(foreign),
        latest=files.read_link(store.path(LATEST)),
    )


def holds_store(files: Files, directory: Path) -> bool:
    """Whether a folder has a ``checkpoints`` folder in it: then it is a run, whatever else it carries.

    Raises:
        StorageFailed: I/O error.
    """
    found = files.find(directory / CHECKPOINTS)
    return found is not None and found.kind is NodeKind.DIRECTORY


def without_manifest(store: Store, inventory: Inventory) -> tuple[str, ...]:
    """Checkpoints of ours whose manifest is gone: under a name of ours, with a part that only we write.

    They count as foreign, since nothing of them can be verified; but one was committed there, and the user must know.

    Raises:
        StorageFailed: I/O error.
    """
    named = [name for name in inventory.foreign if is_checkpoint_name(name)]
    return tuple(name for name in named if any(store.files.find(store.path(name) / part) for part in OWN_PARTS))


def newest_first(store: Store, names: Iterable[str]) -> list[str]:
    """Committed names, newest step first; of one step, the last committed first.

    Only names that do not state their step, and steps saved twice, cost the reading of a manifest; one that cannot be
    read sorts behind its step's others, or first if its step is unknown, so that it is looked at and not overlooked.

    Raises:
        StorageFailed: I/O error.
    """
    names = list(names)
    by_name = {name: step_of(name) for name in names}
    stated = Counter(step for step in by_name.values() if step is not None)
    crowded = {step for step, saves in stated.items() if saves > 1}
    read = {name: outline_quietly(store, name) for name, step in by_name.items() if step is None}
    crowded |= {manifest.step for manifest in read.values() if manifest} & stated.keys()
    read |= {name: outline_quietly(store, name) for name, step in by_name.items() if step in crowded}

    def age(name: str) -> tuple[float, int, str]:
        manifest = read.get(name)
        if manifest is not None:
            return manifest.step, manifest.saved_at_ns, name
        step = by_name[name]
        return (float("inf") if step is None else step), -1, name

    return sorted(names, key=age, reverse=True)


def read_quietly(store: Store, name: str) -> Manifest | None:
    """A checkpoint's manifest, or None if it is damaged, unreadable or of another version."""
    try:
        return store.read_manifest(name)
    except (CheckpointError, StorageFailed):
        return None


def outline_quietly(store: Store, name: str) -> Manifest | None:
    """The same without the tensors."""
    try:
        return store.read_outline(name)
    except (CheckpointError, StorageFailed):
        return None


def _scratch_of_records(store: Store, nodes: Iterable[Node]) -> Iterator[Leftover]:
    """What a crash left beside a pin, a rewind or a reason that was being written."""
    for above in nodes:
        if above.name in _RECORDS and above.kind is NodeKind.DIRECTORY:
            for node in store.files.list_directory(store.path(above.name)):
                if (owner := scratch_owner(node.name)) is not None and node.kind is not NodeKind.DIRECTORY:
                    yield Leftover(f"{above.name}/{node.name}", owner)


def _is_old_trash(store: Store, node: Node) -> bool:
    """Whether an earlier version has left this in the trash: a checkpoint that verifies, with nothing else in it."""
    if node.kind is not NodeKind.DIRECTORY or not trashed_before_marks(node.name):
        return False
    manifest = read_quietly(store, node.name)
    ours = {MANIFEST, *(part.name for part in manifest.parts)} if manifest is not None else set()
    return manifest is not None and all(name in ours for name, _ in walk_files(store.files, store.path(node.name)))


def _is_record(node: Node) -> bool:
    # Another tool's file called `latest` is foreign; only our link is ours.
    if node.name == LATEST:
        return node.kind is NodeKind.LINK
    return node.name in _RECORDS and node.kind is NodeKind.DIRECTORY


def _carries_manifest(store: Store, node: Node) -> bool:
    if node.kind is not NodeKind.DIRECTORY:
        return False
    path = store.path(node.name) / MANIFEST
    found = store.files.find(path)
    if found is None:
        return False
    if is_checkpoint_name(node.name):
        # Under a name of ours even a ruined manifest is a damaged checkpoint, not another tool's folder.
        return True
    if found.kind is not NodeKind.FILE:
        return False
    return begins_one(store.files, path)


def _is_claimed(store: Store, node: Node) -> bool:
    return node.kind is NodeKind.DIRECTORY and store.files.find(store.path(CLAIMS) / node.name) is not None


def _has_id(store: Store, name: str, ids: Mapping[str, frozenset[str]]) -> bool:
    manifest = outline_quietly(store, name)
    return manifest is not None and manifest.id in ids[name]


def _quarantined_in_place(store: Store) -> tuple[str, ...]:
    """Of an object store, where nothing can be moved: the checkpoints for which there is a reason file."""
    directory = store.path(QUARANTINE)
    if store.files.can_rename:
        return ()
    names = (node.name for node in store.files.list_present(directory) if node.kind is NodeKind.FILE)
    return tuple(name.removesuffix(REASON) for name in names if name.endswith(REASON))


def _names_below(store: Store, name: str) -> tuple[str, ...]:
    found = store.files.find(store.path(name))
    if found is None or found.kind is not NodeKind.DIRECTORY:
        return ()
    return tuple(n.name for n in store.files.list_directory(store.path(name)) if n.kind is NodeKind.DIRECTORY)
