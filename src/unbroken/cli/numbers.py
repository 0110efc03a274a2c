"""Numbers as commands take them: within bounds, and numbers at all."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range that ``nan`` and ``inf`` are not in; click's own lets ``nan`` pass, which no bound refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 -- click's own signature
        """The number that a word means."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number that can be counted to", param, ctx)
        return found
