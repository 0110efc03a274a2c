"""Where the records of a run stand inside its directory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import NotAStore
from unbroken.store.place import Store

CHECKPOINTS: Final = "checkpoints"


@dataclass(frozen=True)
class Layout:
    """A run directory and the names in it."""

    run: Path

    @property
    def checkpoints(self) -> Path:
        """The store."""
        return self.run / CHECKPOINTS

    @property
    def config(self) -> Path:
        """The config that started the run."""
        return self.run / "config.json"

    @property
    def accepted(self) -> Path:
        """The values that were changed by ``--accept`` since then."""
        return self.run / "accepted.json"

    @property
    def run_state(self) -> Path:
        """The live snapshot for ``status``."""
        return self.run / ".run_state.json"

    @property
    def stop_request(self) -> Path:
        """The flag file by which ``unbroken stop`` asks a job to end."""
        return self.run / ".shutdown_requested"

    @property
    def journal(self) -> Path:
        """The facts of each job."""
        return self.run / "journal"

    @property
    def metrics(self) -> Path:
        """The step metrics of each job."""
        return self.run / "metrics"


def require_directory(run: Path) -> None:
    """Pass if a run can stand at a path: what is there already, at it or above it, is no file.

    Raises:
        NotAStore: it is.
    """
    for place in (run, *run.parents):
        if place.is_file():
            raise NotAStore(path=place, is_directory=False)


def run_of(store: Store) -> Layout:
    """The run a store belongs to; a store that stands alone is its own run."""
    if store.root.name == CHECKPOINTS:
        return Layout(store.root.parent)
    # ".", "..", or a link to it: by its text alone the run's lease would not be found.
    resolved = store.root.resolve()
    return Layout(resolved.parent if resolved.name == CHECKPOINTS else store.root)
