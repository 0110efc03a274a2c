"""Hypothesis strategies for tests of trainers and stores: states, metrics, saves, worlds, faults.

    from hypothesis import given
    from unbroken.testing import strategies

    @given(strategies.chains(steps=20))
    def test_my_records_survive_any_chain_of_jobs(chain): ...

Hypothesis is needed here and nowhere else in the package.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from unbroken.errors import PackageMissing
from unbroken.records.drill import ACTIONS, PHASES
from unbroken.records.drill import Fault as DrillFault
from unbroken.store.names import FINAL, PERIODIC, SHUTDOWN
from unbroken.testing.crashes import ERRORS, KILLS
from unbroken.testing.faults import Fault

try:
    from hypothesis import strategies as st
except ImportError as missing:  # pragma: no cover -- only where hypothesis is not installed
    raise PackageMissing(package="hypothesis", purpose="unbroken.testing.strategies") from missing

__all__ = [
    "JobSpan",
    "chains",
    "disk_faults",
    "drill_faults",
    "losses",
    "metric_values",
    "save_kinds",
    "saves",
    "state_trees",
    "worlds",
]

_WRITING: Final = tuple(phase for phase in PHASES if phase != "edge")


def losses() -> "st.SearchStrategy[float | None]":
    """A loss: finite numbers, equal ones, None, NaN and Inf."""
    return st.sampled_from([0.5, 1.0, 1.5, math.nan, math.inf, None])


def metric_values() -> "st.SearchStrategy[dict[str, int | float]]":
    """The metrics of one step: any float, whole numbers, NaN and Inf."""
    names = st.sampled_from(["loss", "val_loss", "grad_norm", "lr", "tokens", "tokens_per_s"])
    return st.dictionaries(names, st.one_of(st.floats(), st.integers(0, 1 << 53)), min_size=1)


def save_kinds() -> "st.SearchStrategy[str]":
    """Why a checkpoint is saved; periodically, most of the time."""
    return st.sampled_from([PERIODIC, PERIODIC, SHUTDOWN, FINAL])


def saves(*, last_step: int = 12) -> "st.SearchStrategy[list[tuple[int, str]]]":
    """Saves in any order, steps saved twice among them: (step, kind)."""
    return st.lists(st.tuples(st.integers(0, last_step), save_kinds()), max_size=8)


def state_trees(*, leaves: int = 12) -> "st.SearchStrategy[dict[str, Any]]":
    """What a ``state_dict`` may return: tables, lists and tuples of plain values, nested."""
    plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=20))
    keys = st.one_of(st.text(max_size=8), st.integers(-3, 40))

    def above(below: "st.SearchStrategy[Any]") -> "st.SearchStrategy[Any]":
        tables = st.dictionaries(keys, below, max_size=4)
        return st.one_of(st.lists(below, max_size=4), st.lists(below, max_size=4).map(tuple), tables)

    return st.dictionaries(st.text(max_size=8), st.recursive(plain, above, max_leaves=leaves), max_size=4)


def worlds(*, largest: int = 4) -> "st.SearchStrategy[int]":
    """A number of ranks, the smallest first."""
    return st.integers(1, largest)


def disk_faults(faults: Sequence[Fault] = (*KILLS, *ERRORS)) -> "st.SearchStrategy[Fault]":
    """What may strike an operation of a disk."""
    return st.sampled_from(faults)


def drill_faults(*, most: int = 3) -> "st.SearchStrategy[DrillFault]":
    """What may go wrong in a drilled job, at any phase of a save, up to a number of saves."""
    edges = st.builds(DrillFault, st.just("edge"), st.just("kill"), st.integers(1, most))
    actions = st.sampled_from([action for action in ACTIONS if action != "delay"])
    return st.one_of(edges, st.builds(DrillFault, st.sampled_from(_WRITING), actions, st.integers(1, most)))


@dataclass(frozen=True)
class JobSpan:
    """One job of a chain: the step it resumes from, and the last step it computes."""

    start: int
    end: int
    ranks: int = 1


@st.composite
def chains(draw: "st.DrawFn", *, steps: int = 12, largest_world: int = 4) -> list[JobSpan]:
    """The jobs of one run up to its last step: each resumes from some step that the previous one had reached."""
    spans: list[JobSpan] = []
    reached = 0
    while reached < steps:
        start = draw(st.integers(0, reached))
        end = draw(st.integers(start, steps))
        # Five jobs at most: more would show nothing new.
        end = steps if len(spans) == 4 else end
        spans.append(JobSpan(start, end, draw(worlds(largest=largest_world))))
        reached = end
    return spans
