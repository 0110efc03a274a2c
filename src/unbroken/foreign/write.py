"""An imported checkpoint committed into the store of a new run, by the same code that saves a run.

It has no RNG state and no data position: a run that continues from it names both as differences, to be accepted.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.errors import CannotImport, Help
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL
from unbroken.foreign.items import Contents, ForeignItem
from unbroken.records.layout import Layout, require_reachable
from unbroken.records.run_references import is_run
from unbroken.state.items import ObjectItem, State
from unbroken.state.save import Request, SaveContext, Saver
from unbroken.store.directory import Store
from unbroken.store.foreign import Foreign
from unbroken.store.names import PERIODIC
from unbroken.world import World

_JOB: Final = "import"


class _Held:
    """Stands for the object whose state was read."""

    def state_dict(self) -> State:
        """Nothing: the item has the state."""
        return {}

    def load_state_dict(self, state: Any, /) -> None:  # noqa: ANN401 -- as every item
        """Nothing is loaded into it."""


@dataclass(frozen=True)
class _ReadItem(ObjectItem):
    """An item with the state that was read."""

    state: State | None = None

    def take(self) -> State:
        return dict(self.state or {})


def require_new(run: Path) -> None:
    """Pass if a path can become a new run.

    Raises:
        BadRunPath: no run can be at this path.
        CannotImport: it is a file, or a directory that is not empty.
    """
    require_reachable(str(run))
    layout = Layout(run)
    if run.exists() and not run.is_dir():
        problem = f"{run} is a file; name the directory of a new run"
    elif is_run(layout):
        problem = f"{run} is a run already"
    elif run.is_dir() and (held := sorted(node.name for node in LOCAL.list_directory(run))):
        problem = f"{run} is not empty: {', '.join(held[:3])}"
    else:
        return
    remedy = Help(f"ls -A {quoted(run)}", "list what is there; then name another directory")
    raise CannotImport(path=run, problems=(problem,), remedy=remedy)


def commit_import(run: Path, source: Foreign, contents: Contents, *, step: int) -> tuple[Store, str]:
    """Commit what was read as the first checkpoint of a run; returns its store and name.

    Raises:
        UnbrokenError: as ``commit_contents`` raises it.
    """
    store = Store(Layout(run).checkpoints)
    return store, commit_contents(store, source, contents, step=step)


def commit_contents(store: Store, source: Foreign, contents: Contents, *, step: int) -> str:
    """Commit what was read into a store; returns the checkpoint's name.

    Raises:
        NeedsPickle: a value can only be stored by pickle.
        TensorUnsupported: a tensor is of a kind that a checkpoint cannot hold.
        NoRoom: the disk is too full.
        StorageFailed: I/O error.
    """
    items = [_item(name, item) for name, item in contents.items.items()]
    saver = Saver(items, World(0, 1), SaveContext(store, _JOB), shares_rng=True)
    try:
        metadata = {"imported_from": str(source.path.absolute()), "imported_format": f"{source.tool}, {source.kind}"}
        saver.start(Request(step, PERIODIC, counters=contents.counters, metadata=metadata), dict)
        saver.wait()
        saved = saver.collect()
    finally:
        saver.close()
    assert saved is not None
    if saved.error is not None:
        raise saved.error
    assert saved.name is not None
    return saved.name


def _item(name: str, item: ForeignItem) -> ObjectItem:
    return _ReadItem(name, _Held(), item.kind, item.state)
