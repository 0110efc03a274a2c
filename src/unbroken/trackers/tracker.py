"""The protocol of a tracker, and the description of a run that it gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from unbroken.records.metrics import Row

# How the job ended: the run is done, another job resumes it, or it failed.
Ending = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """One run as a tracker shows it.

    Attributes:
        id: made once, the same in all jobs.
        name: what people call it.
        directory: the directory of the run.
        config: values to show beside it; names that look like secrets are left out.
        is_resumed: whether an earlier job has started it.
    """

    id: str
    name: str
    directory: Path
    config: Mapping[str, object] = field(default_factory=dict)
    is_resumed: bool = False


@runtime_checkable
class Tracker(Protocol):
    """Shows the metrics of one run; all calls come from one thread, in the order in which they stand here.

    An error that a method raises is logged and counted; the call is made again later, and training continues.
    """

    @property
    def name(self) -> str:
        """What it is and where it shows the run, such as ``wandb:my-project``: the same in all jobs."""
        ...

    def start(self, run: TrackedRun) -> None:
        """Start the run of this id, or continue it if it is there."""
        ...

    def last_step(self) -> int | None:
        """The last step that is stored, -1 if there is none yet; None if the tracker cannot tell.

        Asked after ``start``, and after a ``log`` that raised.
        """
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Store the metrics of some steps, in order."""
        ...

    def finish(self, ending: Ending) -> None:
        """The job ends: store what is still on its way."""
        ...
