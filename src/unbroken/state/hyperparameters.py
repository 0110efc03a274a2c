"""The values a script constructs its optimizers, schedulers and loss scalers with, and what a resume makes of them.

A checkpoint brings back the options of an optimizer and the settings of a scheduler, so a learning rate that was
changed in the script has no effect. That must not be silent. Live values cannot be compared: a schedule moves them at
every step. So each checkpoint also keeps the values *as constructed* when the run began, as text, and a resume compares
those with what the script has constructed now: equal for an unchanged script, whatever its schedule does.
"""

import copy
import functools
import json
import numbers
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unbroken.state.items import Item, ObjectItem, OptimizerItem
from unbroken.store.digest import digest_bytes
from unbroken.torch_private import INNER_SCHEDULES

# Told under the optimizer's name already, or counted by a schedule.
_DERIVED: Final = frozenset({"base_lrs", "last_epoch"})
_NOT_OPTIONS: Final = frozenset({"params", "param_names"})
_MOVED_BY_SCHEDULES: Final = frozenset({"lr", "initial_lr"})
_FUNCTION: Final = ".lr_lambdas["
_LONGEST: Final = 200
_MOST_EXACT: Final = 1 << 53

Options = dict[str, Any]


@dataclass(frozen=True)
class ValueChange:
    """One value that the script constructs otherwise than it did when the checkpoint's run began."""

    name: str
    script: str
    checkpoint: str

    @property
    def is_code(self) -> bool:
        """Whether it is part of a function, which no checkpoint holds: the script's is used in any case."""
        return _FUNCTION in self.name

    def used(self, mode: str) -> str:
        """Which side's value is used under a setting of ``hyperparameters``: ``script`` or ``checkpoint``."""
        return "script" if self.is_code else mode

    def sentence(self, mode: str) -> str:
        """The log line about it."""
        used = self.used(mode)
        value = self.script if used == "script" else self.checkpoint
        said = f"{self.name} is {self.script} in the script and was {self.checkpoint} when the run began: using {value}"
        if self.is_code:
            return f"{said} (functions are not part of a checkpoint)"
        return f'{said}, as Settings(hyperparameters="{mode}") says'


@dataclass(frozen=True)
class _Constructed:
    """One object as the script made it: the options of an optimizer's groups, or a state dict.

    ``functions`` are the numbers that a schedule's own functions use: functions are code, which no checkpoint holds.
    """

    groups: tuple[Options, ...] = ()
    state: Options | None = None
    functions: tuple[Options, ...] = ()


# An object that was trained already, as in a notebook, no longer shows what it was made with.
_first_seen: "WeakKeyDictionary[object, _Constructed]" = WeakKeyDictionary()


class Script:
    """What the script made, taken before anything is restored.

    Objects that are passed to a second run in the same process count as they were made, or as they were when the run
    that they began was started.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        objects = [item for item in items if isinstance(item, ObjectItem)]
        if any(isinstance(item.stateful, Configured) for item in objects):
            # Its config is compared field by field, and every value follows from it.
            items = objects = []
        self._optimizers = {item.name: item.optimizer for item in items if isinstance(item, OptimizerItem)}
        self._objects: dict[str, Any] = {
            item.name: item.stateful for item in objects if _has_chosen_values(item.stateful)
        }
        self._live = {name: _take(owner) for name, owner in self._owners()}
        self._made = {name: _first_seen.get(owner, self._live[name]) for name, owner in self._owners()}
        _first_seen.update({owner: self._made[name] for name, owner in self._owners()})

    def _owners(self) -> Iterator[tuple[str, Any]]:
        yield from self._optimizers.items()
        yield from self._objects.items()

    def values(self) -> dict[str, str]:
        """Every value by its name, as text."""
        return dict(_texts(self._made))

    def start(self) -> dict[str, str]:
        """The same for a run that begins now: the live values are what it begins with."""
        for name, owner in self._owners():
            _first_seen[owner] = self._made[name] = self._live[name]
        return self.values()

    def continued(self, before: Mapping[str, str] | None, mode: str) -> dict[str, str]:
        """The values of a run that resumes from a checkpoint which keeps ``before``, for its own checkpoints."""
        now = self.values()
        if before is None or mode == "script":
            return now
        return {name: text if _FUNCTION in name else before.get(name, text) for name, text in now.items()}

    def changes(self, before: Mapping[str, str]) -> list[ValueChange]:
        """The values that were others when the run began; those that only one side has do not count as changed."""
        now = self.values()
        changed = {name: (text, before[name]) for name, text in now.items() if before.get(name, text) != text}
        return list(_collapsed(changed, {name: len(made.groups) for name, made in self._made.items() if made.groups}))

    def put_in_place(self, before: Mapping[str, str]) -> None:
        """Give the restored objects the changed values, and put each schedule where it would be with them."""
        now = self.values()
        changed = {name for name, text in now.items() if before.get(name, text) != text}
        for name, optimizer in self._optimizers.items():
            schedules = {n: s for n, s in self._objects.items() if getattr(s, "optimizer", None) is optimizer}
            is_moved = any(each.startswith((f"{name}.", *(f"{n}." for n in schedules))) for each in changed)
            replayed = {n: s for n, s in schedules.items() if _is_replayable(s)}
            if is_moved:
                self._set_options(name, optimizer, changed, replayed)
        for name, owner in self._objects.items():
            if not _is_replayable(owner):
                self._set_state(name, owner, changed)

    def _set_options(
        self, name: str, optimizer: torch.optim.Optimizer, changed: set[str], schedules: Mapping[str, LRScheduler]
    ) -> None:
        made = self._made[name].groups
        restored = [_options(group) for group in optimizer.param_groups]
        if schedules:
            self._replay(optimizer, made, schedules)
        for number, group in enumerate(optimizer.param_groups):
            wanted = {key for key in made[number] if f"{name}.param_groups[{number}].{key}" in changed}
            moved = {key for key, value in made[number].items() if schedules and _text(value) != _text(group[key])}
            wanted |= moved | (_MOVED_BY_SCHEDULES & group.keys() if schedules or "lr" in wanted else set())
            source = group if schedules else made[number]
            taken = {key: copy.deepcopy(source[key]) for key in wanted}
            group.update({**restored[number], **taken})

    def _replay(
        self, optimizer: torch.optim.Optimizer, made: Sequence[Options], schedules: Mapping[str, LRScheduler]
    ) -> None:
        """Step the schedules as the script made them as often as the restored ones were stepped."""
        steps = {name: schedule.last_epoch for name, schedule in schedules.items()}
        for group, options in zip(optimizer.param_groups, made, strict=True):
            group.update(copy.deepcopy(options))
        for name, schedule in schedules.items():
            schedule.load_state_dict(copy.deepcopy(self._made[name].state or {}))
            steps[name] -= schedule.last_epoch
        with warnings.catch_warnings():
            # torch warns of a schedule that is stepped before its optimizer.
            warnings.simplefilter("ignore")
            for done in range(max(steps.values())):
                for name, schedule in schedules.items():
                    if done < steps[name]:
                        schedule.step()

    def _set_state(self, name: str, owner: Any, changed: set[str]) -> None:  # noqa: ANN401 -- a user's own scheduler
        made = self._made[name].state or {}
        wanted = {key for key in made if f"{name}.{key}" in changed}
        if wanted:
            owner.load_state_dict({**owner.state_dict(), **{key: copy.deepcopy(made[key]) for key in wanted}})


@runtime_checkable
class Configured(Protocol):
    """An object that knows under which settings a run's steps are computed, as a trainer's config does."""

    def comparable_settings(self) -> Mapping[str, Any]:
        """Those settings, in plain JSON form."""


def digest_of_settings(hyperparameters: Mapping[str, str], items: Sequence[Item]) -> str:
    """A digest that is equal for jobs whose steps are computed alike, as far as the run can see."""
    known = [item.stateful for item in items if isinstance(item, ObjectItem) and isinstance(item.stateful, Configured)]
    # The config was compared field by field: the optimizer that is built from it needs no second check.
    said = [owner.comparable_settings() for owner in known] or hyperparameters
    return digest_bytes(json.dumps(said, sort_keys=True).encode()).hex()


def _has_chosen_values(owner: object) -> bool:
    """Whether an object's state has values a script chooses: a schedule of an optimizer, or a live loss scaler."""
    if isinstance(owner, torch.amp.GradScaler):
        return owner.is_enabled()
    # One of torch, or one like it: any other object may hold an optimizer, and more in its state than what was chosen.
    is_schedule = isinstance(owner, LRScheduler) or (hasattr(owner, "base_lrs") or hasattr(owner, "base_values"))
    if not is_schedule or not isinstance(getattr(owner, "optimizer", None), torch.optim.Optimizer):
        return False
    # What it was made with is kept by a weak reference to it, which a user's own kind may not allow.
    return type(owner).__hash__ is not None and hasattr(owner, "__weakref__")


def _is_replayable(owner: object) -> bool:
    """Whether its position follows from the number of steps; not so for one that follows a metric."""
    return isinstance(owner, LRScheduler) and not isinstance(owner, ReduceLROnPlateau)


def _take(owner: Any) -> _Constructed:  # noqa: ANN401 -- an optimizer, or whatever has a state dict
    if isinstance(owner, torch.optim.Optimizer):
        return _Constructed(groups=tuple(_options(group) for group in owner.param_groups))
    state = owner.state_dict()
    made = copy.deepcopy(dict(state)) if isinstance(state, Mapping) else {}
    functions = getattr(owner, "lr_lambdas", ())
    return _Constructed(state=made, functions=tuple(map(_numbers_in, functions)))


def _numbers_in(function: object) -> Options:
    """The plain values a function was given: bound arguments, defaults, variables around it, globals it names."""
    if isinstance(function, functools.partial):
        bound = {f"argument {number}": value for number, value in enumerate(function.args)}
        return {**_numbers_in(function.func), **bound, **function.keywords}
    if not isinstance(function, FunctionType):
        return {}
    code = function.__code__
    around = zip(code.co_freevars, (function.__closure__ or ()), strict=True)
    globally = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    given = {**globally, **{name: _content(cell) for name, cell in around}, **(function.__kwdefaults__ or {})}
    defaults = function.__defaults__ or ()
    given |= zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    return {name: value for name, value in given.items() if isinstance(value, numbers.Real | str)}


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        # Not assigned yet.
        return None


def _options(group: Mapping[str, Any]) -> Options:
    return {key: copy.deepcopy(value) for key, value in group.items() if key not in _NOT_OPTIONS}


def _texts(made: Mapping[str, _Constructed]) -> Iterator[tuple[str, str]]:
    for name, each in made.items():
        for number, options in enumerate(each.groups):
            for key, value in options.items():
                # A schedule keeps the rate it was given here; `lr` is what it has made of it.
                if key == "lr" and "initial_lr" in options:
                    continue
                if (text := _text(value)) is not None:
                    yield f"{name}.param_groups[{number}].{'lr' if key == 'initial_lr' else key}", text
        yield from _texts_of_state(name, each.state or {})
        for number, given in enumerate(each.functions):
            pairs = ((key, _text(value)) for key, value in given.items())
            yield from ((f"{name}{_FUNCTION}{number}].{key}", text) for key, text in pairs if text is not None)


def _texts_of_state(name: str, state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in state.items():
        if key == INNER_SCHEDULES and isinstance(value, list):
            for number, inner in enumerate(value):
                yield from _texts_of_state(f"{name}.{key}[{number}]", inner if isinstance(inner, Mapping) else {})
        elif not str(key).startswith("_") and key not in _DERIVED and (text := _text(value)) is not None:
            yield f"{name}.{key}", text


def _text(value: object) -> str | None:
    """A value in one spelling; None for anything but a plain value."""
    if isinstance(value, torch.Tensor):
        return _text(value.item()) if value.numel() == 1 else None
    if isinstance(value, bool | str) or value is None:
        return repr(value)[:_LONGEST]
    if isinstance(value, numbers.Integral):
        return str(int(value))[:_LONGEST]
    if isinstance(value, numbers.Real):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < _MOST_EXACT else repr(number)
    if isinstance(value, Mapping):
        parts = [(_text(key), _text(each)) for key, each in value.items()]
        inside = [f"{key}: {each}" for key, each in parts if key is not None and each is not None]
        return "{" + ", ".join(inside) + "}" if len(inside) == len(parts) else None
    if isinstance(value, list | tuple):
        found = [_text(each) for each in value]
        return "(" + ", ".join(each for each in found if each is not None) + ")" if None not in found else None
    return None


def _collapsed(changed: Mapping[str, tuple[str, str]], groups: Mapping[str, int]) -> Iterator[ValueChange]:
    """One change for a value that was changed alike in all groups of an optimizer."""
    seen: set[str] = set()
    for name, (script, checkpoint) in changed.items():
        head, _, rest = name.partition(".param_groups[")
        key = rest.partition("].")[2]
        alike = [f"{head}.param_groups[{number}].{key}" for number in range(groups.get(head, 0))] if rest else []
        if alike and all(changed.get(each) == (script, checkpoint) for each in alike):
            name = f"{head}.{key}"
        if name not in seen:
            seen.add(name)
            yield ValueChange(name, script, checkpoint)
