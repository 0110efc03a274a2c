"""When the next checkpoint is due: by steps, or by the measured cost of saves. Owns one job's clock."""

from collections.abc import Callable
from dataclasses import replace

from unbroken.records.deadline import Reserve
from unbroken.records.interval import Auto, Every, Timings


class SaveClock:
    """Counts steps and seconds since the last save, and learns what steps and saves take."""

    def __init__(
        self, cadence: Every | Auto | None, reserve: Reserve, clock: Callable[[], float], timings: Timings | None = None
    ) -> None:
        self.cadence = cadence
        self.reserve = reserve
        self._clock = clock
        self._timings = timings or Timings(0, 0.0)
        self._since_s = self._step_began_s = clock()

    def step_done(self) -> None:
        """A step is complete."""
        now_s = self._clock()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        self.reserve = self.reserve.after_step(took_s)
        # The mean over recent steps: one slow step must not move the cadence far.
        before = self._timings.step_s
        mean_s = took_s if before is None else 0.9 * before + 0.1 * took_s
        self._timings = replace(self._timings, steps=self._timings.steps + 1, step_s=mean_s)

    def is_due_by_step(self, step: int) -> bool:
        """Whether this step is saved by its number, which every rank knows by itself."""
        return isinstance(self.cadence, Every) and self.cadence.is_due_at(step)

    def is_due_by_clock(self) -> bool:
        """Whether a save is due by this rank's clock; the ranks agree on it by a vote."""
        return isinstance(self.cadence, Auto) and self.cadence.is_due(self._now())

    def save_started(self) -> None:
        """A save starts: count from here."""
        self._since_s = self._clock()
        self._timings = replace(self._timings, steps=0)

    def save_ended(self, paused_s: float, total_s: float) -> None:
        """A save was committed; learn what it cost."""
        self.reserve = self.reserve.after_save(total_s)
        self._timings = replace(self._timings, cost_s=paused_s, write_s=total_s)

    def resume_clock(self) -> None:
        """Time spent outside the step, on a save at its edge, is not the next step's."""
        self._step_began_s = self._clock()

    def describe(self) -> str:
        """The cadence in words."""
        return "only at the end" if self.cadence is None else self.cadence.describe(self._now())

    def _now(self) -> Timings:
        return replace(self._timings, elapsed_s=self._clock() - self._since_s)
