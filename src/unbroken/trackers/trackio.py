"""Trackio: one run of a fixed name. Trackio's own variables set the database."""

from collections.abc import Sequence
from typing import Any, Final

import trackio

from unbroken.records.metrics import Row
from unbroken.trackers.tracker import Ending, TrackedRun

# Trackio has no default of its own.
PROJECT: Final = "unbroken"


class TrackioTracker:
    """Shows a run in a project of trackio, as ``NAME-ID``: trackio finds a run by its name."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Any = None
        self._shown: int | None = None

    @property
    def name(self) -> str:
        """The project is part of it."""
        return f"trackio:{self._project}" if self._project else "trackio"

    def start(self, run: TrackedRun) -> None:
        """Start or resume the run."""
        self._run = trackio.init(
            project=self._project or PROJECT,
            name=f"{run.name}-{run.id}",
            # Names with a leading underscore are trackio's own.
            config={key.lstrip("_"): value for key, value in run.config.items()},
            resume="allow",
            embed=False,
            # Metrics of the run alone: a step of the machine's is none of its steps.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Trackio writes what was logged every half second; how far it came, it reads when it resumes a run.
        following = getattr(self._run, "_next_step", None)
        self._shown = following - 1 if isinstance(following, int) else None

    def last_step(self) -> int | None:
        """The last step that was stored when the run was started."""
        return self._shown

    def log(self, rows: Sequence[Row]) -> None:
        """Hand the steps to trackio's own thread."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def finish(self, ending: Ending) -> None:
        """Wait until trackio has stored everything."""
        self._run.finish()


def make(target: str) -> TrackioTracker:
    """The tracker of a project; empty for ``unbroken``."""
    return TrackioTracker(target)
