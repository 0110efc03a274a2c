"""Each way to lose a piece of state at a resume; the exact test must see every one of them."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from unbroken.loop import opening, resume
from unbroken.state import restore as restore_module
from unbroken.state.cursor import Cursor
from unbroken.state.items import Item
from unbroken.state.restore import Restored
from unbroken.state.rng import capture_rng, restore_rng

Mutation = Callable[[dict[str, Any]], None]


def _after_restore(change: Callable[[Sequence[Item], Restored], Restored]) -> None:
    def restore(source: Any, items: Sequence[Item], *rest: Any, **named: Any) -> Restored:  # noqa: ANN401
        return change(items, restore_module.restore(source, items, *rest, **named))

    setattr(resume, "restore", restore)  # noqa: B010 - a patch that lives as long as the child


def drop_item(name: str) -> Mutation:
    """The item is as if it had never been handed over: fresh after the resume."""

    def mutate(objects: dict[str, Any]) -> None:
        def restore(source: Any, items: Sequence[Item], *rest: Any, **named: Any) -> Restored:  # noqa: ANN401
            [item] = [each for each in items if each.name == name]
            fresh = copy.deepcopy(item.take())
            restored = restore_module.restore(source, items, *rest, **named)
            item.give(fresh)
            return restored

        setattr(resume, "restore", restore)  # noqa: B010

    return mutate


def drop_generator(name: str) -> Mutation:
    """One generator continues from where the fresh process has it."""

    def mutate(objects: dict[str, Any]) -> None:
        fresh = capture_rng()[name]
        setattr(opening, "restore_rng", lambda state: restore_rng({**state, name: fresh}))  # noqa: B010

    return mutate


def generators_too_early(objects: dict[str, Any]) -> None:
    """The generators are set, and only then the loader's iterator is made, which draws from them."""
    cursors: list[Cursor[Any]] = []

    def remember(items: Sequence[Item], restored: Restored) -> Restored:
        cursors.extend(item.stateful for item in items if item.name == "data")  # type: ignore[union-attr, misc]
        return restored

    def restore(state: object) -> None:
        restore_rng(state)
        [cursor] = cursors
        cursor.load_state_dict(cursor.state_dict())

    _after_restore(remember)
    setattr(opening, "restore_rng", restore)  # noqa: B010


def forget_step(objects: dict[str, Any]) -> None:
    _after_restore(lambda items, restored: dataclasses.replace(restored, step=restored.step - 1))


def forget_counters(objects: dict[str, Any]) -> None:
    _after_restore(lambda items, restored: dataclasses.replace(restored, counters={}))


MUTATIONS: dict[str, Mutation] = {
    **{f"without {name}": drop_item(name) for name in ("model", "optimizer", "scheduler", "scaler", "ema", "counter")},
    "without the position in the data": drop_item("data"),
    **{f"without {name}'s generator": drop_generator(name) for name in ("python", "numpy", "torch")},
    "generators before the loader": generators_too_early,
    "without the step": forget_step,
    "without the counters": forget_counters,
}
