"""How a folder that a framework wrote becomes a checkpoint: written into a draft, digested, and named by one rename.

The framework gets a draft to write ``checkpoint-100`` into. No reader takes that for a checkpoint, and a crash leaves
it to the next sweep. Needs no torch.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbroken.files import LOCAL, Files
from unbroken.records.layout import Layout
from unbroken.store.commit import Draft, Record, commit
from unbroken.store.directory import Store
from unbroken.store.keep import Policy
from unbroken.store.manifest import Tensor
from unbroken.store.names import LATEST, PERIODIC, DraftName, scratch
from unbroken.store.seal import digest_files, files_to_seal, tensors_of


@dataclass(frozen=True)
class Folder:
    """A save to publish: its step, the framework, and what its manifest says of it.

    All are of one kind, whatever they were saved for: it is the kind that names a checkpoint, here and in a mirror, and
    the framework knows one name for a step. ``tensors`` are those in files of its own; without any, the tensors of
    safetensors files are taken.
    """

    step: int
    origin: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    policies: Collection[Policy] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name that the framework gives it."""
        return f"checkpoint-{self.step}"


def mark_checkpoints_here(layout: Layout, *, job: str, files: Files = LOCAL) -> None:
    """Mark a run as one whose checkpoints stand in its directory itself.

    Raises:
        StorageFailed: I/O error.
    """
    words = b"the checkpoints of this run stand in this directory\n"
    # crash here: a run without a mark and without a checkpoint; the next job writes the mark before it saves.
    files.create_once(layout.checkpoints_here, words, scratch=scratch(job, "here"))


def begin_folder(store: Store, staged: DraftName) -> None:
    """Make the draft that the framework writes into; the next attempt is for what it wrote.

    Raises:
        StorageFailed: I/O error.
    """
    # crash here: an empty draft, swept once its job is gone.
    store.files.make_directory(store.path(str(staged)))


def publish_folder(store: Store, folder: Folder, staged: DraftName, fence: Callable[[], None]) -> tuple[str, int]:
    """Commit what the framework wrote; returns the checkpoint's name and its bytes.

    Raises:
        CannotSeal: the framework wrote nothing, or something that is not a regular file.
        LeaseLost: another job has taken the run.
        StorageFailed: I/O error; nothing was committed.
    """
    files = store.files
    draft = Draft(store, DraftName(staged.job, staged.step, staged.attempt + 1))
    # crash here: a draft under one name or another, torn and swept like every other.
    files.publish(store.path(str(staged)) / folder.name, draft.path)
    files.remove_tree(store.path(str(staged)))
    names = files_to_seal(files, draft.path)
    parts = digest_files(files, draft.path, names)
    record = Record(
        PERIODIC,
        time.time_ns(),
        origin=folder.origin,
        tensors=folder.tensors or tensors_of(files, draft.path, parts),
        metrics=folder.metrics,
        metadata=folder.metadata,
    )
    name = commit(draft, plan=names, parts=parts, record=record, fence=fence, called=folder.name)
    return name, sum(part.size_bytes for part in parts)


def write_latest(store: Store, name: str, *, job: str) -> None:
    """Name the newest checkpoint in a text file, for a framework whose tools read one where we have a link.

    Raises:
        StorageFailed: I/O error.
    """
    # crash here: the link or the file; both are hints, and none is used to choose.
    store.files.replace(store.path(LATEST), name.encode(), scratch=scratch(job, LATEST))
