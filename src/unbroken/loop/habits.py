"""What can be seen of a loop that takes something over a step's edge without saying so.

A batch drawn before the loop, a batch drawn ahead for the next step, data that is handed over and iterated elsewhere:
each trains well and is silently inexact after a resume. The draws and the RNG state tell, so it is said at the first
edge, with the line to change.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from unbroken.loop.carry import Carried
from unbroken.loop.opened import Opened
from unbroken.quoting.log import logger
from unbroken.state.cursor import Cursor
from unbroken.state.rng import capture_generators, generator_devices, restore_generators

_log = logger(__name__)
_CARRY: Final = 'batch = run.carry("batch", lambda: next(run.data))'


class Habits:
    """Watches a loop from entering the run to its second edge."""

    def __init__(self, opened: Opened, cursor: Cursor[Any] | None, carried: Carried) -> None:
        self._opened, self._cursor, self._carried = opened, cursor, carried
        self._is_before_loop = True
        self._edges = 0
        self._drawn = self._drawn_at_entry = cursor.drawn if cursor is not None else 0
        self._drawn_before = 0
        self._is_rng_moved = False
        self._rng = capture_generators(generator_devices())

    @contextlib.contextmanager
    def carrying(self) -> Iterator[None]:
        """What is drawn in here is carried, and needs no word."""
        if not self._is_before_loop:
            yield
            return
        self._look()
        yield
        self._drawn = self._cursor.drawn if self._cursor is not None else 0
        self._rng = capture_generators(generator_devices())

    def _look(self) -> None:
        """Note what was drawn since the last look."""
        if self._cursor is not None:
            self._drawn_before += self._cursor.drawn - self._drawn
        self._is_rng_moved = self._is_rng_moved or not _are_equal(self._rng, capture_generators(generator_devices()))

    def loop_begins(self) -> None:
        """The loop begins; after a resume the RNG state is again the checkpoint's, whatever was drawn before."""
        if not self._is_before_loop:
            return
        self._is_before_loop = False
        self._look()
        if self._is_rng_moved and self._opened.restored is not None:
            restore_generators(self._rng)

    def edge_reached(self, draws: Sequence[int]) -> None:
        """Say at the first edges what the draws tell; ``draws`` are those of the first bodies."""
        if self._edges >= 2:
            return
        self._edges += 1
        for notice in self._first(draws) if self._edges == 1 else self._second(draws):
            self._opened.recorder.fact("notice", text=notice)
            if self._opened.world.is_first:
                _log.warning("%s", notice)

    def _first(self, draws: Sequence[int]) -> Iterator[str]:
        if self._drawn_before:
            count = "a batch was" if self._drawn_before == 1 else f"{self._drawn_before} batches were"
            yield f"{count} drawn from run.data before run.steps; a resume skips them. Carry them instead: {_CARRY}"
        elif self._is_rng_moved:
            yield (
                "random numbers were drawn between entering the run and run.steps; a resume does not restore them. "
                'If a value drawn there is used in the loop, carry it: value = run.carry("value", fetch)'
            )
        if self._cursor is not None and self._cursor.drawn == self._drawn_at_entry:
            yield (
                "`data` was handed to the run, but the first step drew no batch from run.data, so its position is not "
                "saved. Draw from it instead of from the loader: batch = next(run.data)"
            )
        if self._carried.waiting:
            names = ", ".join(self._carried.waiting)
            yield f"carried in the checkpoint, but run.carry was not called for it before the first step: {names}"

    def _second(self, draws: Sequence[int]) -> Iterator[str]:
        if len(draws) == 2 and draws[0] == draws[1] + 1 and not self._drawn_before:
            yield (
                f"the first step drew {draws[0]} batches from run.data and the second {draws[1]}: if a batch is drawn "
                f"ahead for the next step, a resume skips it. Carry it instead: {_CARRY}"
            )


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
