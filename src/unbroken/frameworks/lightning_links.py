"""The paths that ``ModelCheckpoint`` knows, as symbolic links to checkpoints of the run.

``ModelCheckpoint`` names a file for every save, and deletes files to keep its best. Here that file is a link to the one
in ``checkpoint-N``, made after the commit, so a link always leads to a complete and sealed checkpoint. A checkpoint
with a link is kept. After a resume a ``ModelCheckpoint`` has the state of the checkpoint. That state may name links
that were removed later, or were not made yet when the job was killed: the manifests say which ones to make again, and
the others are dropped from the state. Needs no torch.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.errors import StorageFailed
from unbroken.quoting.log import logger
from unbroken.store.directory import Store
from unbroken.store.keep import Candidate
from unbroken.store.names import scratch
from unbroken.store.scan import newest_first, read_quietly, scan

_log = logger(__name__)
# What Lightning writes, in the folder of a checkpoint.
FILE: Final = "lightning.ckpt"
# In the manifest: the name that a ModelCheckpoint gave the save.
SAVED_AS: Final = "saved_as"
_LONGEST_CHAIN: Final = 4


@dataclass(frozen=True)
class Linked:
    """Keeps the checkpoints to which a link of a ``ModelCheckpoint`` leads."""

    links: Mapping[str, str]

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        return {each.name: self.links[each.name] for each in newest_first if each.name in self.links}


class Links:
    """The links in the folders of a trainer's ``ModelCheckpoint`` callbacks; used by rank 0."""

    def __init__(self, store: Store, folders: Collection[Path], *, job: str) -> None:
        # Lightning resolves its folders: a link from there is relative only to a resolved path.
        self._store, self._job = Store(_resolved(store.root), store.files), job
        self._folders = {_resolved(folder) for folder in folders}

    def holds(self, path: Path) -> bool:
        """Whether a path is in the folder of a ``ModelCheckpoint``."""
        return _resolved(path.parent) in self._folders

    def point(self, path: Path, name: str) -> bool:
        """Make a path lead to a committed checkpoint; False where the file system has no symbolic links.

        Raises:
            StorageFailed: an I/O error; the old link is intact.
        """
        files = self._store.files
        files.make_directory(path.parent)
        target = os.path.relpath(self._store.path(name) / FILE, _resolved(path.parent))
        # crash here: the checkpoint without its link, which the next job makes again.
        return files.swap_link(path, target, scratch=scratch(self._job, "link"))

    def name_of(self, path: Path) -> str | None:
        """The checkpoint to which a path leads; None for anything else."""
        end = self._end_of(path)
        return end.parent.name if end.name == FILE and end.parent.parent == self._store.root else None

    def _end_of(self, path: Path) -> Path:
        """Where a path leads: ``save_last="link"`` makes a link to a link."""
        path = _resolved(path.parent) / path.name
        for _ in range(_LONGEST_CHAIN):
            target = self._store.files.read_link(path) if self._is_link(path) else None
            if target is None:
                break
            path = Path(os.path.normpath(path.parent / target))
        return path

    def _is_link(self, path: Path) -> bool:
        found = self._store.files.find(path)
        return found is not None and found.kind is NodeKind.LINK

    def _exists(self, path: Path) -> bool:
        return self._store.files.find(self._end_of(path)) is not None

    def remove(self, path: Path) -> bool:
        """Remove a link of ours; False if the path is something else.

        Raises:
            StorageFailed: an I/O error.
        """
        if not self._is_link(path) or self.name_of(path) is None:
            return False
        # crash here: the link is there or not; its checkpoint stays until the next sweep.
        self._store.files.remove_file(path)
        return True

    def all(self) -> dict[str, str]:
        """The checkpoints to which links lead, each with the name of one link."""
        return {name: path.name for path in self._paths() if (name := self.name_of(path)) is not None}

    def _paths(self) -> Iterator[Path]:
        files = self._store.files
        for folder in sorted(self._folders):
            yield from (folder / each.name for each in files.list_present(folder) if each.kind is NodeKind.LINK)

    def mend(self, wanted: Collection[Path]) -> set[str]:
        """Make links again whose checkpoints are there, and remove those that lead nowhere; returns what exists."""
        saved_as = self._saved_as()
        for path in self._paths():
            if self.name_of(path) is not None and not self._exists(path):
                self._try(lambda path=path: self.remove(path))  # type: ignore[misc]
        for path in wanted:
            if not self._exists(path) and path.name in saved_as:
                self._try(lambda path=path: self.point(path, saved_as[path.name]))  # type: ignore[misc]
        return {str(path) for path in wanted if self._exists(path)}

    def _saved_as(self) -> dict[str, str]:
        """The checkpoints by the names that a ``ModelCheckpoint`` gave them; of one name, the newest."""
        found: dict[str, str] = {}
        for name in newest_first(self._store, scan(self._store).committed):
            manifest = read_quietly(self._store, name)
            saved_as = manifest.metadata.get(SAVED_AS) if manifest is not None else None
            if isinstance(saved_as, str):
                found.setdefault(saved_as, name)
        return found

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except StorageFailed as refused:
            _log.warning("%s", refused.headline())


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


# ---- the state of a ModelCheckpoint ----


def moved(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """The saved state of a ``ModelCheckpoint`` with its paths in another folder: the run was moved, or renamed."""
    before = str(state.get("dirpath") or "")

    def at(path: str) -> str:
        if not path or not Path(path).is_relative_to(before):
            return path
        now = Path(folder) / Path(path).relative_to(before)
        # A logger names another folder in each job: what Lightning wrote into the one of an earlier job is still there.
        is_there = not os.path.lexists(now) and Path(path).is_file() and not Path(path).is_symlink()
        return path if is_there else str(now)

    if not before or before == folder:
        return state
    paths = {key: at(state[key]) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
    return {
        **state,
        **paths,
        "best_k_models": {at(path): v for path, v in state["best_k_models"].items()},
        "dirpath": folder,
    }


def savers_of(trainer: Any) -> list[Any]:  # noqa: ANN401 - a Trainer of one package or the other
    """The ``ModelCheckpoint`` callbacks of a trainer; our own answers like one, and is none."""
    return [
        each
        for each in trainer.checkpoint_callbacks
        if not getattr(each, "is_of_run", False) and hasattr(each, "best_k_models")
    ]


def paths_of(callback: Any) -> set[Path]:  # noqa: ANN401 - a ModelCheckpoint of one package or the other
    """The paths that a ``ModelCheckpoint`` holds for saved."""
    return {Path(path) for path in (*callback.best_k_models, callback.best_model_path) if path}


def forget_missing(callback: Any, existing: Collection[str]) -> None:  # noqa: ANN401
    """Let a ``ModelCheckpoint`` forget the paths that do not exist, and find its best among the others."""
    kept = {path: score for path, score in callback.best_k_models.items() if path in existing}
    if len(kept) != len(callback.best_k_models):
        callback.best_k_models = kept
        worst, best = (max, min) if callback.mode == "min" else (min, max)
        callback.kth_best_model_path = worst(kept, key=kept.__getitem__) if kept else ""
        callback.best_model_path = best(kept, key=kept.__getitem__) if kept else ""
        callback.best_model_score = kept.get(callback.best_model_path)
        if kept:
            callback.kth_value = kept[callback.kth_best_model_path]
    elif callback.best_model_path and callback.best_model_path not in existing:
        callback.best_model_path = ""
