"""Files that a killed job left in the folders of ``ModelCheckpoint`` callbacks.

There are two kinds, and a resume computes both again with the same bits:

- A save that no resume starts from is a plain file of Lightning. If the job is killed before its next commit, the file
  has the name that its save gets again, and Lightning would name the second one ``-v1``.
- The path that a save replaces is removed after the commit. If the job is killed between the two, the path would stay.

The journal records each plain file (name, size, time, inode), and a manifest names the paths that its save gave up. A
file that differs from its record is left alone, and so is everything after somebody went back to an older checkpoint.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.files import Files
from unbroken.frameworks.lightning_links import Links, paths_of
from unbroken.records.journal import Event
from unbroken.store.manifest import Manifest

# The event of a file that Lightning wrote, and in a manifest the paths that its save gave up, from the run's directory.
WRITTEN: Final = "file-written"
GIVES_UP: Final = "gives_up"


@dataclass(frozen=True)
class WrittenFile:
    """One file, as it was when Lightning had written it at a step."""

    path: str
    step: int
    size_bytes: int
    modified_ns: int
    identity: int

    @classmethod
    def now(cls, files: Files, path: Path, root: Path, step: int) -> "WrittenFile | None":
        """The file at a path; None if there is no regular file.

        Raises:
            StorageFailed: an I/O error.
        """
        found = files.find(path)
        if found is None or found.kind is not NodeKind.FILE:
            return None
        return cls(os.path.relpath(path, root), step, found.size_bytes, found.modified_ns, found.identity)


def note_written(record: Callable[..., object], files: Files, path: Path, root: Path, step: int) -> None:
    """Name a file that Lightning has just written in the journal, so that the job after a kill knows it again.

    Raises:
        StorageFailed: an I/O error.
    """
    # crash here: a file that no job knows: it stays, and Lightning names the next one "-v1".
    if (found := WrittenFile.now(files, path, root, step)) is not None:
        record(WRITTEN, **vars(found))


def written_files(events: Iterable[Event], *, uncommitted: bool) -> list[WrittenFile]:
    """The files that the journal names; ``uncommitted``: those after the last commit and the last way back."""
    found: list[WrittenFile] = []
    for event in events:
        if uncommitted and (event.kind == "commit" or (event.kind == "resume" and event.values.get("abandoned"))):
            found = []
        elif event.kind == WRITTEN:
            numbers = [event.whole(name) for name in ("step", "size_bytes", "modified_ns", "identity")]
            path = event.values.get("path")
            if isinstance(path, str) and None not in numbers:
                found.append(WrittenFile(path, *(number or 0 for number in numbers)))
    return found


def held_by(savers: Iterable[Any], *, kept_all: bool) -> set[Path]:
    """The paths that ``ModelCheckpoint`` callbacks hold; without ``kept_all`` not of those that never give one up."""
    return {
        path
        for saver in savers
        if kept_all or saver.save_top_k != -1
        for path in (*paths_of(saver), *([Path(saver.last_model_path)] if saver.last_model_path else []))
    }


class Leftovers:
    """The leftovers of the job before, for rank 0 of a job that resumes from the newest checkpoint."""

    def __init__(self, links: Links, files: Files, root: Path, events: Collection[Event], step: int) -> None:
        self._links, self._files, self._root, self._events, self._step = links, files, root, events, step

    def remove_given_up(self, manifest: Manifest, held: Collection[Path]) -> None:
        """Remove what the save of the checkpoint gave up, where that was not done any more.

        Raises:
            StorageFailed: an I/O error.
        """
        known = set(written_files(self._events, uncommitted=False))
        names = manifest.metadata.get(GIVES_UP)
        for path in [self._at(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []:
            if path in held or not self._links.holds(path):
                continue
            # crash here: it is there or not; the next job looks again.
            if not self._links.remove(path) and self._is_as_written(path, known):
                self._files.remove_file(path)

    def written_again(self, held: Collection[Path]) -> set[str]:
        """The paths of files that the job before wrote after the checkpoint, and that this one will write again.

        Raises:
            StorageFailed: an I/O error.
        """
        later = {each for each in written_files(self._events, uncommitted=True) if each.step > self._step}
        paths = {self._at(each.path) for each in later}
        return {str(path) for path in paths if path not in held and self._is_as_written(path, later)}

    def _at(self, name: str) -> Path:
        return Path(os.path.normpath(self._root / name))

    def _is_as_written(self, path: Path, known: Collection[WrittenFile]) -> bool:
        steps = {each.step for each in known if self._at(each.path) == path}
        return any(WrittenFile.now(self._files, path, self._root, step) in known for step in steps)


def let_overwrite(savers: Iterable[Any], paths: Collection[str]) -> None:
    """Let ``ModelCheckpoint`` callbacks name a save by each of these paths, once, though there is such a file."""
    left = set(paths)

    def answer(asked: Callable[..., bool]) -> Callable[..., bool]:
        def file_exists(filepath: object, trainer: object) -> bool:
            if str(filepath) in left:
                left.discard(str(filepath))
                return False
            return asked(filepath, trainer)

        return file_exists

    for saver in savers:
        saver.file_exists = answer(saver.file_exists)


def ask_again(saver: Any) -> None:  # noqa: ANN401 - a ModelCheckpoint of one package or the other
    """Undo ``let_overwrite``."""
    vars(saver).pop("file_exists", None)


def given_up(before: Collection[Path], savers: Iterable[Any], resumed_from: object, root: Path) -> list[str]:
    """What callbacks held before a save and do not hold any longer, from the run's directory; they remove it next."""
    savers = list(savers)
    gone = set(before) - held_by(savers, kept_all=True)
    # Lightning never removes what its Trainer was told to resume from.
    kept = Path(str(resumed_from)).absolute() if resumed_from is not None else None
    return sorted(os.path.relpath(path, root) for path in gone if path.absolute() != kept)


def metadata_of(names: list[str]) -> Mapping[str, Any]:
    """What a manifest says of them."""
    return {GIVES_UP: names} if names else {}
