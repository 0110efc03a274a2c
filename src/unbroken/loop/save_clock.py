"""When the next checkpoint is due: by steps, or by the measured cost of saves. Owns one job's clock."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from unbroken.records.deadline import REMEMBERED, Reserve
from unbroken.records.interval import Auto, Every, Timings, is_due_by_time


class SaveClock:
    """Counts steps and seconds since the last save, and learns what steps and saves take."""

    def __init__(
        self, cadence: Every | Auto | None, reserve: Reserve, clock: Callable[[], float], timings: Timings | None = None
    ) -> None:
        self.cadence = cadence
        self._reserve = reserve
        self._clock = clock
        self._timings = timings or Timings(0, 0.0)
        # Updated at every step, and therefore here and not in the records that they become.
        self._steps, self._step_s = self._timings.steps, self._timings.step_s
        self._interval_s = self._known_interval_s()
        self._recent_s: deque[float] = deque(reserve.steps_s, maxlen=REMEMBERED)
        self._since_s = self._step_began_s = clock()

    @property
    def reserve(self) -> Reserve:
        """How long before the deadline a last save must start, as far as it is known now."""
        return replace(self._reserve, steps_s=tuple(self._recent_s))

    def step_done(self) -> None:
        """A step is complete."""
        now_s = self._clock()
        took_s = now_s - self._step_began_s
        self._step_began_s = now_s
        self._recent_s.append(took_s)
        # The mean over recent steps: one slow step must not move the cadence far.
        before = self._step_s
        self._step_s = took_s if before is None else 0.9 * before + 0.1 * took_s
        self._steps += 1

    def is_due_by_step(self, step: int) -> bool:
        """Whether this step is saved by its number, which every rank knows by itself."""
        return isinstance(self.cadence, Every) and self.cadence.is_due_at(step)

    def is_due_by_clock(self) -> bool:
        """Whether a save is due by this rank's clock; the ranks agree on it by a vote."""
        if self._interval_s is None or self._steps == 0:
            return False
        elapsed_s = self._clock() - self._since_s
        return is_due_by_time(self._interval_s, steps=self._steps, elapsed_s=elapsed_s, step_s=self._step_s)

    def save_started(self) -> None:
        """A save starts: count from here."""
        self._since_s, self._steps = self._clock(), 0

    def save_ended(self, paused_s: float, total_s: float) -> None:
        """A save was committed; learn what it cost."""
        self._reserve = self._reserve.after_save(total_s)
        self._timings = replace(self._timings, cost_s=paused_s, write_s=total_s)
        self._interval_s = self._known_interval_s()

    def resume_clock(self) -> None:
        """Time spent outside the step, on a save at its edge, is not the next step's."""
        self._step_began_s = self._clock()

    def describe(self) -> str:
        """The cadence in words."""
        return "only at the end" if self.cadence is None else self.cadence.describe(self._now())

    def _known_interval_s(self) -> float | None:
        return self.cadence.interval_s(self._timings) if isinstance(self.cadence, Auto) else None

    def _now(self) -> Timings:
        elapsed_s = self._clock() - self._since_s
        return replace(self._timings, steps=self._steps, elapsed_s=elapsed_s, step_s=self._step_s)
