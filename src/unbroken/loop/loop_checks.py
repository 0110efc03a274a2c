"""Warnings about loops that carry something over a step's edge without saving it.

A batch drawn before the loop, a batch drawn ahead for the next step, a loader that is passed as ``data`` and iterated
elsewhere: each trains well and is silently inexact after a resume. The draws and the RNG state show it, so it is logged
at the first edge, with the line to change.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import torch

from unbroken.errors import NotExact
from unbroken.loop.carry import CARRIED, Carried
from unbroken.loop.opened_run import OpenRun
from unbroken.quoting.log import logger
from unbroken.state.cursor import Cursor
from unbroken.state.items import Item, ModuleItem, OptimizerItem
from unbroken.state.naming import is_flat_sharded, state_names
from unbroken.state.rng import capture_rng, restore_rng, rng_devices

_log = logger(__name__)
# A whole model that is switched has hundreds of parts.
_MODES_LOGGED: Final = 3
_CARRY: Final = 'batch = run.carry("batch", lambda: next(run.data))'


class LoopChecks:
    """Watches a loop from entering the run to its second edge."""

    def __init__(
        self, opened: OpenRun, cursor: Cursor[Any] | None, carried: Carried, *, is_rng_moved: bool = False
    ) -> None:
        self._opened, self._cursor, self._carried = opened, cursor, carried
        self._is_before_loop = True
        self._edges = 0
        self._drawn = self._drawn_at_entry = cursor.drawn if cursor is not None else 0
        self._drawn_before = 0
        self._is_rng_moved = is_rng_moved
        self._late: set[str] = set()
        self._parts = _parts(opened.items)
        self._modes: dict[str, tuple[bool, ...]] = {}
        self._logged_modes: set[str] = set()
        self._rng = capture_rng(rng_devices())

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to see at an edge."""
        return self._edges >= 2

    @contextlib.contextmanager
    def carrying(self, name: str) -> Iterator[None]:
        """What is drawn in here is carried, and needs no warning."""
        if not self._is_before_loop:
            if name not in self._carried.names:
                self._late.add(name)
            yield
            return
        self._look()
        yield
        self._drawn = self._cursor.drawn if self._cursor is not None else 0
        self._rng = capture_rng(rng_devices())

    def _look(self) -> None:
        """Note what was drawn since the last look."""
        if self._cursor is not None:
            self._drawn_before += self._cursor.drawn - self._drawn
        self._is_rng_moved = self._is_rng_moved or not are_equal(self._rng, capture_rng(rng_devices()))

    def loop_starts(self, accept: Collection[str]) -> None:
        """The loop starts; after a resume the RNG state is again the checkpoint's, whatever was drawn before.

        Raises:
            NotExact: a value was carried when the checkpoint was saved, and the loop did not fetch it.
        """
        if not self._is_before_loop:
            return
        if (waiting := self._carried.waiting) and CARRIED not in accept:
            names = ", ".join(waiting)
            what = (
                f"carried in the checkpoint and not fetched before run.steps: {names}; call run.carry before the loop"
            )
            raise NotExact(differences=((CARRIED, what),))
        self._is_before_loop = False
        self._look()
        if self._is_rng_moved and self._opened.restored is not None:
            restore_rng(self._rng)

    def edge_reached(self, draws: Sequence[int]) -> None:
        """Log at the first edges what the draws show; ``draws`` are those of the first bodies."""
        self._edges += 1
        for notice in self._first(draws) if self._edges == 1 else self._second(draws):
            self.say(notice)

    def say(self, notice: str) -> None:
        """Journal and log a notice."""
        self._opened.recorder.event("notice", text=notice)
        if self._opened.world.is_first:
            _log.warning("%s", notice)

    def save_starts(self, step: int) -> None:
        """Log what a resume by the same script would not find as it is now: other parts of a model, other modes."""
        self._look_at_parts(step)
        now = _modes(self._opened.items)
        changed = [name for name, mode in now.items() if self._modes.get(name, mode) != mode]
        self._modes = {**now, **self._modes}
        for name in [each for each in changed if each not in self._logged_modes][:_MODES_LOGGED]:
            notice = (
                f"requires_grad or train/eval mode of {name} changed during the run; checkpoints do not contain "
                "that, so a resume starts with what the script sets. Set it from run.step before the loop, too"
            )
            self.say(notice)
        self._logged_modes.update(changed)

    def _look_at_parts(self, step: int) -> None:
        """Log which model or optimizer has other tensors or groups than when the run was opened, each once."""
        now = _parts(self._opened.items)
        for name, parts in now.items():
            before = self._parts.get(name, parts)
            if changed := [each for each in (*parts, *before) if (each in parts) != (each in before)]:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                self.say(
                    f"{name} has changed since the run was opened ({changed[0]}{more}): a script that builds it as "
                    "before cannot resume from this checkpoint. Make the same change before Run where "
                    f"unbroken.checkpoints(run) has a step of {step:,} or later"
                )
        self._parts = now

    def _first(self, draws: Sequence[int]) -> Iterator[str]:
        if self._drawn_before:
            is_one = self._drawn_before == 1
            count, them = ("a batch was", "it") if is_one else (f"{self._drawn_before} batches were", "them")
            yield f"{count} drawn from run.data before run.steps; a resume skips {them}. Carry {them} instead: {_CARRY}"
        elif self._is_rng_moved:
            yield (
                "random numbers were drawn after the run was made and before run.steps; a resume does not restore "
                'them. If a value drawn there is used in the loop, carry it: value = run.carry("value", fetch); if it '
                "was the iterator of a DataLoader, pass the loader to Run: data=loader"
            )
        if self._cursor is not None and self._cursor.drawn == self._drawn_at_entry:
            yield (
                "`data` was passed to Run, but the first step drew no batch from run.data, so its position is not "
                "saved. Draw from it instead of from the loader: batch = next(run.data)"
            )
        for name in sorted(self._late):
            yield (
                f"{name!r} was carried for the first time inside the loop: after a resume that is too late. Carry "
                f'it before the loop too: value = run.carry("{name}", first_value)'
            )

    def _second(self, draws: Sequence[int]) -> Iterator[str]:
        if len(draws) == 2 and draws[0] == draws[1] + 1 and not self._drawn_before:
            yield (
                f"the first step drew {draws[0]} batches from run.data and the second {draws[1]}: if a batch is drawn "
                f"ahead for the next step, a resume skips it. Carry it instead: {_CARRY}"
            )


def _parts(items: Sequence[Item]) -> dict[str, dict[str, None]]:
    """The tensors of each model, and the parameters of each optimizer with the number of their group."""
    found: dict[str, dict[str, None]] = {}
    for item in items:
        if not isinstance(item, ModuleItem | OptimizerItem) or is_flat_sharded(item.module):
            continue
        if isinstance(item, ModuleItem):
            found[item.name] = dict.fromkeys(state_names(item.module).values())
        else:
            groups = enumerate(item.groups())
            found[item.name] = dict.fromkeys(f"{name} in group {number}" for number, names in groups for name in names)
    return found


def _modes(items: Sequence[Item]) -> dict[str, tuple[bool, ...]]:
    """Of each registered module, by name: its training mode, and which of its own parameters require grad."""
    return {
        f"{item.name}.{name}" if name else item.name: (
            module.training,
            *(parameter.requires_grad for parameter in module.parameters(recurse=False)),
        )
        for item in items
        if isinstance(item, ModuleItem)
        for name, module in item.module.named_modules()
    }


def are_equal(one: object, other: object) -> bool:
    """Whether two RNG states are the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if hasattr(one, "tobytes") and hasattr(other, "tobytes"):
        return bool(one.tobytes() == other.tobytes())
    return bool(one == other)
