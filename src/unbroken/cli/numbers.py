"""Numbers as commands take them: within bounds, and numbers at all; durations as people write them."""

import math
import re
from typing import Any

import click

_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_UNITS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_SECONDS = (86_400, 3_600, 60, 1)


class FiniteRange(click.FloatRange):
    """A range that ``nan`` and ``inf`` are not in; click's own lets ``nan`` pass, which no bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """The number that a word means."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"must be a finite number, is {value}", param, ctx)
        return found


def seconds_in(text: str) -> float | None:
    """The seconds that a duration has: ``90``, ``4h``, ``1h30m``, ``04:00:00``, ``1-12:00:00``; None if it is none."""
    text = text.strip()
    try:
        return float(text)
    except ValueError:
        pass
    found = _CLOCK.fullmatch(text) or (_UNITS.fullmatch(text.replace(" ", "").lower()) if text else None)
    if found is None:
        return None
    return sum(float(number) * unit for number, unit in zip(found.groups(), _SECONDS, strict=True) if number)


class Duration(click.types.FloatParamType):
    """A duration in seconds, or as people and schedulers write it."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """The seconds that a word means."""
        found = value if isinstance(value, float) else seconds_in(str(value))
        if found is None:
            self.fail(f"{value!r} is no duration: give seconds, 4h, 90m, 1h30m, HH:MM:SS or D-HH:MM:SS", param, ctx)
        return found
