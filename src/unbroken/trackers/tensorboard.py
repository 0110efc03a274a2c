"""TensorBoard: event files in one directory; every job adds a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter

from unbroken.records.metrics import Row
from unbroken.trackers.tracker import Ending, TrackedRun

FOLDER: Final = "tensorboard"
# A larger file is not read: then what was written down counts.
_MOST_BYTES: Final = 1 << 28


class TensorBoardTracker:
    """Writes scalars to ``DIRECTORY/NAME-ID``; the default directory is ``tensorboard`` in that of the run."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writer: Any = None
        self._shown: int | None = None

    @property
    def name(self) -> str:
        """The directory is part of it."""
        return f"tensorboard:{self._directory}" if self._directory else "tensorboard"

    def start(self, run: TrackedRun) -> None:
        """Begin an event file beside those of earlier jobs."""
        above = Path(self._directory) if self._directory else run.directory / FOLDER
        folder = above / f"{run.name}-{run.id}"
        self._shown = last_step_in(folder)
        # Flushed by `log`, and not by a clock.
        self._writer = SummaryWriter(str(folder), flush_secs=3600)

    def last_step(self) -> int | None:
        """The last step that was stored when the run was started."""
        return self._shown

    def log(self, rows: Sequence[Row]) -> None:
        """Write the steps and flush them to the kernel, so that a kill does not lose them."""
        for row in rows:
            # One event for the whole step: a kill in the middle leaves a step, or none of it.
            parts = [Summary.Value(tag=name, simple_value=float(value)) for name, value in row.values.items()]
            self._writer.file_writer.add_summary(Summary(value=parts), row.step)
        self._writer.flush()

    def finish(self, ending: Ending) -> None:
        """Close the file."""
        self._writer.close()


def make(target: str) -> TensorBoardTracker:
    """The tracker of a directory; empty for the one in the run's."""
    return TensorBoardTracker(target)


def last_step_in(folder: Path) -> int | None:
    """The last step in the event files of a directory, -1 if they have none; None if there are no files to read."""
    files = sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []
    if not files or sum(file.stat().st_size for file in files) > _MOST_BYTES:
        return None
    last = -1
    for file in files:
        for data in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(data)
            if event.HasField("summary"):
                last = max(last, event.step)
    return last
