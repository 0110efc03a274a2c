"""Records what the body of a step has done since the last edge.

A loop may be left in the middle of a body, and a body may end without an optimizer step. Both decide what can be saved:
a body that made its optimizer steps is a completed step; one that made none leaves the state of the last edge, if what
else it changed can be put back; a resume cannot continue from anything between. Gradients that no step has used yet
belong to the state only while they are pending.
"""

import operator
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from unbroken import torch_private
from unbroken.loop.carry import Carried
from unbroken.loop.standing_gradients import StandingGradients, Versions, sharing, versions_of
from unbroken.state.cursor import Cursor, Mark
from unbroken.state.items import GradientsItem, Item, ModuleItem, ObjectItem, OptimizerItem, State
from unbroken.state.rng import Glanced, RngGlance, capture_rng, glance_at_numpy, glance_at_rng, rng_devices

# A save waits this many edges for an optimizer step, or twice the longest gap between two steps seen so far.
LEAST_PATIENCE_STEPS: Final = 8
# Enough to see a forward pass in training mode: all running statistics move together.
_BUFFERS_WATCHED: Final = 8


@dataclass(frozen=True)
class Left:
    """How a body was left: after all of its optimizer steps, before any, or between them (None).

    ``moved`` names what an unfinished body changed and cannot be put back.
    """

    is_complete: bool | None
    moved: tuple[str, ...] = ()


class _Edge(NamedTuple):
    """What was true at the last edge."""

    rng: Glanced
    mark: Mark | None
    drawn: int
    schedulers: tuple[int, ...]
    buffers: tuple[int, ...]
    carried: dict[str, object]
    counters: dict[str, Any]


class StepBody:
    """Watches one body at a time, from entering the run to leaving it."""

    def __init__(
        self, items: Sequence[Item], cursor: Cursor[Any] | None, carried: Carried, *, accept: Collection[str] = ()
    ) -> None:
        self._items, self._cursor, self._carried = items, cursor, carried
        self._optimizers = [item.optimizer for item in items if isinstance(item, OptimizerItem)]
        self.gradients = next(item for item in items if isinstance(item, GradientsItem))
        objects = [item.stateful for item in items if isinstance(item, ObjectItem)]
        self._schedulers: list[Any] = [each for each in objects if isinstance(each, LRScheduler)]
        modules = [item.module for item in items if isinstance(item, ModuleItem)]
        self._buffers = [each for module in modules for each in module.buffers()][:_BUFFERS_WATCHED]
        self._steps = [0] * len(self._optimizers)
        # The optimizer steps of every complete body so far, each combination once.
        self._seen: set[tuple[int, ...]] = set()
        self._last_steps: list[int] | None = None
        self._gap = self._longest_gap = 0
        # Where optimizers take turns, the gradients that each has used in its last step. Those that share parameters
        # do, or all but one of them would have nothing to use.
        self._is_alternating = any(len(each) > 1 for each in sharing(self._optimizers))
        self._used: dict[int, Versions] = {}
        # The fields of an ``_Edge``, which is made where one is needed: noting them at every edge must be cheap.
        self._noted: tuple[Any, ...] | None = None
        # No optimizer, or bodies without a step: then what a body changed is never put back.
        self._may_be_complete_without_steps = not self._optimizers
        self._drawn = 0
        self.draws: list[int] = []
        self.standing = StandingGradients(self.gradients, accept=accept)
        self._undo = [self.standing.close]
        self._undo += [self._count(number, each) for number, each in enumerate(self._optimizers)]
        self._undo += [
            _count_attempts(each, self._attempted) for each in objects if isinstance(each, torch.amp.GradScaler)
        ]

    def loop_starts(self) -> None:
        """The loop starts, for the first time or again."""
        self.standing.loop_starts()
        for number in self.standing.have_stand_ins():
            # They stand for gradients of a step that was made.
            self._used[number] = versions_of(self._optimizers[number])

    def close(self) -> None:
        """Remove every hook."""
        while self._undo:
            self._undo.pop()()

    # ---- counting ----

    def _count(self, number: int, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def stepped(*_: object) -> None:
            self._steps[number] += 1
            self.standing.stepped(number)
            if self._is_alternating:
                self._used[number] = versions_of(optimizer)

        return optimizer.register_step_post_hook(stepped).remove

    def _attempted(self, optimizer: object) -> Callable[[], None]:
        """A loss scaler is about to step; what it returns counts the step if the scaler skipped it."""
        for number, each in enumerate(self._optimizers):
            if each is optimizer or each is getattr(optimizer, "optimizer", None):
                before = self._steps[number]

                def settle(number: int = number, before: int = before) -> None:
                    # A step skipped for an overflow used its gradients all the same.
                    self._steps[number] = max(self._steps[number], before + 1)

                return settle
        return lambda: None

    def begin(self, counters: dict[str, Any]) -> None:
        """A body starts; note what it could change."""
        self.standing.body_begins(self._steps)
        self._steps = [0] * len(self._optimizers)
        if self._cursor is not None:
            self._cursor.step_begins()
            self._drawn = self._cursor.drawn
        if self._may_be_complete_without_steps:
            # If it is left in its middle, it cannot be known whether it was complete: nothing is put back.
            self._noted = None
            return
        self._noted = (
            glance_at_rng(),
            self._cursor.mark() if self._cursor is not None else None,
            self._drawn,
            tuple([each.last_epoch for each in self._schedulers]) if self._schedulers else (),
            self._versions() if self._buffers else (),
            self._carried.at_edge(),
            dict(counters),
        )

    def end(self) -> None:
        """The body has reached its edge."""
        if self.standing.is_busy:
            self.standing.edge_reached()
        # Nearly every body steps as the one before it did: then there is nothing to note.
        if (steps := self._steps) != self._last_steps or self._gap:
            self._note(steps)
        if self._cursor is not None and len(self.draws) < 2:
            self.draws.append(self._cursor.drawn - self._drawn)

    def _note(self, steps: list[int]) -> None:
        self._last_steps = steps
        self._seen.add(tuple(steps))
        if any(steps):
            self._is_alternating = self._is_alternating or not all(steps)
            self._longest_gap, self._gap = max(self._longest_gap, self._gap), 0
        else:
            self._gap += 1
            self._may_be_complete_without_steps = True

    def _versions(self) -> tuple[int, ...]:
        return tuple(-1 if each.is_inference() else each._version for each in self._buffers)

    # ---- gradients ----

    @property
    def has_pending_gradients(self) -> bool:
        """Whether an optimizer holds gradients and made no step with them in this body."""
        return any(
            not steps and self.gradients.are_pending(item) and not self._are_used(item)
            for steps, item in zip(self._steps, self.gradients.optimizers, strict=True)
        )

    def _are_used(self, item: OptimizerItem) -> bool:
        """Whether a step has used an optimizer's gradients, untouched since, as where two take turns.

        It may be the step of another that shares its parameters; what this one does with them then, is watched.
        """
        if torch_private.has_unreduced_gradients(item.module):
            return False
        used = {id(grad()): (grad, count) for each in self._used.values() for grad, count in each}
        return all(
            (known := used.get(id(grad()))) is not None and known[0]() is grad() and known[1] == count
            for grad, count in versions_of(item.optimizer)
        )

    @property
    def patience_steps(self) -> int:
        """For how many edges a save may wait for an optimizer step."""
        return max(LEAST_PATIENCE_STEPS, 2 * self._longest_gap)

    # ---- leaving in the middle ----

    @property
    def _edge(self) -> _Edge | None:
        return None if self._noted is None else _Edge(*self._noted)

    def left(self) -> Left:
        """How the body was left, when it is left before its edge."""
        made = tuple(self._steps)
        if not self._optimizers:
            return Left(None)
        if not any(made):
            # Where bodies without a step are usual, this one may have been complete: it cannot be known.
            return Left(None) if made in self._seen else Left(False, self._moved())
        if not self._seen:
            return Left(True if all(made) else None)
        # Where some bodies make more steps, this one may have been left before the others.
        has_more = any(each != made and all(map(operator.ge, each, made)) for each in self._seen)
        return Left(True if made in self._seen and not has_more else None)

    def _moved(self) -> tuple[str, ...]:
        edge = self._edge
        if edge is None:
            return ()
        found = []
        if self._cursor is not None and self._cursor.drawn != edge.drawn and edge.mark is None:
            found.append("data position")
        numpy, then = sys.modules.get("numpy"), RngGlance(*edge.rng).numpy
        if numpy is not None and then is not None and glance_at_numpy(numpy) != then:
            found.append("numpy RNG state")
        if tuple(each.last_epoch for each in self._schedulers) != edge.schedulers:
            found.append("scheduler")
        if self._versions() != edge.buffers:
            found.append("buffers")
        if self.standing.is_moved:
            found.append("gradients")
        return tuple(found)

    def rewind(self) -> dict[str, Any]:
        """Put back what the unfinished body moved; returns the counters of the last edge."""
        edge = self._edge
        assert edge is not None
        if edge.mark is not None and self._cursor is not None:
            self._cursor.stand_at(edge.mark)
        self._carried.put_back(edge.carried)
        return edge.counters

    def rng_at_edge(self) -> State:
        """The RNG state of the last edge; numpy's as it is now, which ``left`` has found unchanged or named."""
        edge = self._edge
        assert edge is not None
        return {**capture_rng(rng_devices()), **RngGlance(*edge.rng).state()}


def _count_attempts(
    scaler: torch.amp.GradScaler, attempted: Callable[[object], Callable[[], None]]
) -> Callable[[], None]:
    """Watch every step that a loss scaler makes or skips; returns what ends that."""
    original = scaler.step

    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:  # noqa: ANN401 - as torch has it
        settle = attempted(optimizer)
        result = original(optimizer, *args, **kwargs)
        settle()
        return result

    scaler.step = step  # type: ignore[method-assign]

    def undo() -> None:
        vars(scaler).pop("step", None)

    return undo
