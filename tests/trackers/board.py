"""A tracker of the tests' own, in memory."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.patience import PATIENCE_S
from unbroken.records.metrics import Row
from unbroken.trackers.tracker import Ending, TrackedRun


@dataclass
class Board:
    """A tracker that keeps what it is sent, by the id of the run; it can lose rows, fail and hang."""

    runs: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    ends: list[Ending] = field(default_factory=list)
    started: list[TrackedRun] = field(default_factory=list)
    failing: Callable[[], bool] = lambda: False
    hangs: threading.Event | None = None
    tells: bool = True
    name: str = "board"

    def start(self, run: TrackedRun) -> None:
        if self.failing():
            raise ConnectionError(f"no answer with {os.environ.get('BOARD_API_KEY')}\nand more")
        if self.hangs is not None:
            self.hangs.wait(PATIENCE_S)
        self.started.append(run)
        self.rows = self.runs.setdefault(run.id, [])

    def last_step(self) -> int | None:
        return max((step for step, _ in self.rows), default=-1) if self.tells else None

    def log(self, rows: Sequence[Row]) -> None:
        for at, row in enumerate(rows):
            if self.failing():
                raise ConnectionError(f"gone after {at} rows")
            self.rows.append((row.step, float(row.values["loss"])))

    def finish(self, ending: Ending) -> None:
        self.ends.append(ending)
