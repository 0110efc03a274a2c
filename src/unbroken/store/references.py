"""References to runs and checkpoints, as users write them: every command and every loader resolves them here.

Accepted: a run directory, its ``checkpoints`` directory, one checkpoint, a file or directory inside one (its
``state/``, a ``model_000200.pt``), the ``latest`` link, and ``RUN@1000``, ``RUN@checkpoint-1000``, ``RUN@latest``.
A named checkpoint is used or is an error: no other is taken in its place.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import CheckpointUnknown, NotAStore, NoUsableCheckpoint, PathMissing, TornCheckpoint
from unbroken.files import LOCAL, Files
from unbroken.store.directory import Store
from unbroken.store.foreign import import_command, import_from_store
from unbroken.store.manifest import Manifest
from unbroken.store.names import (
    CHECKPOINTS,
    CHECKPOINTS_HERE,
    LATEST,
    MANIFEST,
    is_checkpoint_name,
    parse_draft,
    step_in_name,
    step_of,
)
from unbroken.store.scan import Inventory, Torn, holds_store, newest_first, read_quietly, scan, without_manifest
from unbroken.store.seal import seal_command

# No longer than a step can be, since converting a text of any length to a number is refused by Python itself.
_STEP: Final = re.compile(r"[0-9](_?[0-9]){0,18}")


@dataclass(frozen=True)
class Reference:
    """A store, and one checkpoint in it if the reference named one.

    ``records`` is the store beside the records of the run where that is another one: a run may save its checkpoints to
    an object store.
    """

    store: Store
    name: str | None = None
    records: Store | None = None

    @property
    def path(self) -> Path:
        """What is referred to."""
        return self.store.path(self.name) if self.name else self.store.root


def resolve_in_store(reference: str, files: Files = LOCAL) -> Reference:
    """The store, and the checkpoint if one is named.

    Raises:
        PathMissing: there is nothing at the path.
        NotAStore: it holds no checkpoint of ours.
        CheckpointUnknown: the store has no checkpoint by that name or step.
        TornCheckpoint: the path is, or lies in, a checkpoint that was never committed.
    """
    place, at, wanted = reference.rpartition("@")
    # A slash behind it makes the @ a letter in a path.
    if at and place and "/" not in wanted and files.find(Path(reference)) is None:
        store = find_store(Path(place), files)
        return Reference(store, named_in(store, wanted))
    path = Path(reference)
    # Through links: a run directory may be behind one.
    if files.find(path) is None:
        raise PathMissing(path=path, purpose="run, store or checkpoint")
    around = _checkpoint_around(path, files)
    return around if around is not None else Reference(find_store(path, files))


def resolve_checkpoint(reference: str, files: Files = LOCAL) -> tuple[Store, str, Manifest]:
    """One checkpoint: the one named, or a store's newest whose manifest verifies.

    Raises:
        PathMissing: there is nothing at the path.
        NotAStore: it holds no checkpoint of ours.
        CheckpointUnknown: no such checkpoint.
        TornCheckpoint: it was never committed.
        NoUsableCheckpoint: the store has none at all.
        ManifestDamaged: the named one cannot be trusted.
        FormatUnknown: another version wrote the named one.
    """
    return checkpoint_of(resolve_in_store(reference, files))


def checkpoint_of(found: Reference) -> tuple[Store, str, Manifest]:
    """The checkpoint that a reference names, or its store's newest whose manifest verifies.

    Raises:
        NoUsableCheckpoint: the store has none at all.
        ManifestDamaged: the named one cannot be trusted.
        FormatUnknown: another version wrote the named one.
    """
    if found.name is not None:
        return found.store, found.name, found.store.read_manifest(found.name)
    for name in newest_first(found.store, scan(found.store).committed):
        manifest = read_quietly(found.store, name)
        if manifest is not None:
            return found.store, name, manifest
    root = found.store.root
    raise NoUsableCheckpoint(store=root, importing=import_from_store(root, found.store.files))


def is_bare(reference: str) -> bool:
    """Whether a reference names a checkpoint and no place: a step, a checkpoint's name, ``latest``."""
    return reference == LATEST or is_checkpoint_name(reference) or _STEP.fullmatch(reference) is not None


def find_store(path: Path, files: Files = LOCAL) -> Store:
    """The store of a run directory, or the directory itself if it holds checkpoints.

    Raises:
        PathMissing: there is nothing at the path.
        NotAStore: it holds no run and no checkpoint of ours.
    """
    if files.find(path) is None:
        raise PathMissing(path=path, purpose="run or store")
    if files.find(path / CHECKPOINTS_HERE) is not None:
        # Accelerate has a folder called checkpoints of its own, beside those of the run.
        return Store(path, files)
    for root in (path / CHECKPOINTS, path):
        if _is_directory(root, files):
            store = Store(root, files)
            found = scan(store)
            if root != path or found.committed or found.torn or found.quarantined or found.abandoned:
                return store
    if path.name == CHECKPOINTS and _is_directory(path, files):
        return Store(path, files)
    if not _is_directory(path, files):
        raise NotAStore(path=path, is_directory=False, importing=import_command(path, files))
    raise NotAStore(path=path, sealing=seal_command(files, path), importing=import_command(path, files))


def named_in(store: Store, wanted: str) -> str:
    """The name of a store's checkpoint that is meant by a step, its name, or ``latest``.

    Raises:
        CheckpointUnknown: it has none such.
    """
    inventory = scan(store)
    names = newest_first(store, inventory.committed)
    if wanted == LATEST:
        target = store.files.read_link(store.path(LATEST))
        if target in names:
            return target
        # The link is a hint: where it is missing or wrong, the newest whose manifest verifies is meant.
        if (newest := next((name for name in names if read_quietly(store, name)), None)) is not None:
            return newest
    if wanted in names:
        return wanted
    if _STEP.fullmatch(wanted):
        step = int(wanted)
        for name in names:
            its_step = step_of(name)
            if its_step is None:
                manifest = read_quietly(store, name)
                its_step = manifest.step if manifest else None
            if its_step == step:
                return name
    unsealed = _unsealed(store, inventory, wanted)
    sealing = None if unsealed is None else seal_command(store.files, store.path(unsealed))
    known = tuple(names)
    raise CheckpointUnknown(reference=wanted, store=store.root, known=known, unsealed=unsealed, sealing=sealing)


def _unsealed(store: Store, inventory: Inventory, wanted: str) -> str | None:
    """A folder that another tool wrote and that fits what is wanted; ours without their manifest are damaged."""
    step = int(wanted) if _STEP.fullmatch(wanted) else None
    damaged = without_manifest(store, inventory)
    for name in inventory.foreign:
        fits = name == wanted or (step is not None and step_in_name(name) == step)
        if fits and name not in damaged and _is_directory(store.path(name), store.files):
            return name
    return None


def _checkpoint_around(path: Path, files: Files) -> Reference | None:
    """The checkpoint that a path is, or lies in; at most three levels up, as deep as a part's usual place."""
    if path.name == LATEST and (target := files.read_link(path)) is not None:
        path = path.parent / target
    # Taken by its text, ".." would be the checkpoint's name.
    absolute = path.resolve() if ".." in path.parts else path.absolute()
    for here in (absolute, *absolute.parents)[:4]:
        found = files.find(here / MANIFEST)
        is_sealed = found is not None and found.kind is NodeKind.FILE
        if is_sealed or here == absolute:
            _refuse_draft(here, files)
        if is_sealed and _is_run(here, files):
            # An earlier version let a run be sealed as if it were one checkpoint; its name still means the run.
            return None
        if is_sealed and (is_checkpoint_name(here.name) or _is_ours(here, files)):
            # What was said relative to here is shown relative to here.
            root = here.parent if path.is_absolute() else Path(os.path.relpath(here.parent))
            return Reference(Store(root, files), here.name)
    return None


def _refuse_draft(directory: Path, files: Files) -> None:
    draft = parse_draft(directory.name)
    # A run may be in a directory of any name.
    if draft is None or not _is_directory(directory, files) or _is_directory(directory / CHECKPOINTS, files):
        return
    # Even where its manifest is written: the crash came before the commit, and nothing was promised.
    count, size_bytes = Torn(draft).weigh(Store(directory.parent, files))
    raise TornCheckpoint(path=directory, parts=count, size_bytes=size_bytes)


def _is_run(directory: Path, files: Files) -> bool:
    return holds_store(files, directory) and bool(scan(Store(directory / CHECKPOINTS, files)).committed)


def _is_ours(directory: Path, files: Files) -> bool:
    return read_quietly(Store(directory.parent, files), directory.name) is not None


def _is_directory(path: Path, files: Files) -> bool:
    found = files.find(path)
    if found is None:
        return False
    if found.kind is NodeKind.LINK:
        return path.is_dir()
    return found.kind is NodeKind.DIRECTORY
