"""The exactness checker: whether two runs are equal, bit for bit.

It compares all metrics of all steps, as the bits that were logged, and the state of the last checkpoints. Measured
metrics such as times and speeds are left out by name. Two runs without anything to compare are not equal. Needs no
torch.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.quoting import amounts
from unbroken.records.layout import Layout
from unbroken.records.metrics import Mismatch, Row, Stitched, bits_of, read_metrics
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, read_quietly, scan
from unbroken.testing.states import StateComparison, compare_checkpoints, drawn_generators

__all__ = [
    "Comparison",
    "FirstDifference",
    "MetricsComparison",
    "StateComparison",
    "compare_checkpoints",
    "compare_metrics",
    "compare_runs",
    "drawn_generators",
    "is_measured",
]

FIRST: Final = "the first run"
SECOND: Final = "the second run"
_WORD: Final = re.compile(r"[^a-z0-9]+")
_MEASURED: Final = frozenset(
    {"time", "times", "dt", "eta", "mfu", "hfu", "speed", "throughput", "elapsed", "memory", "mem", "utilization"}
    | {"seconds", "second", "secs", "sec", "ms", "minutes", "hours"}
)
_UNITS: Final = frozenset({"s", "us", "ns", "bytes", "kb", "mb", "gb", "kib", "mib", "gib", "tflops", "flops"})


def is_measured(name: str) -> bool:
    """Whether a metric of this name is measured, not computed: times, speeds, memory."""
    words = [word for word in _WORD.split(name.lower()) if word]
    return bool(words) and (words[-1] in _UNITS or not _MEASURED.isdisjoint(words))


@dataclass(frozen=True)
class FirstDifference:
    """The first step at which two runs differ; without a metric, only one run has the step."""

    step: int
    metric: str | None
    bits_a: str | None
    bits_b: str | None
    job_a: int | None
    job_b: int | None

    def sentence(self, a: str = FIRST, b: str = SECOND) -> str:
        """Where the runs differ, and both values; ``a`` and ``b`` are the names of the runs."""
        at = f"step {amounts.count(self.step)}"
        if self.metric is None:
            here, there = (a, b) if self.job_b is None else (b, a)
            return f"{at} is in {here} and not in {there}"
        return (
            f"{at} is the first that differs: {self.metric} is {_shown(self.bits_a, self.job_a)} in {a}, "
            f"{_shown(self.bits_b, self.job_b)} in {b}"
        )


def _shown(bits: str | None, job: int | None) -> str:
    return "missing" if bits is None else f"{bits} (job {job})"


@dataclass(frozen=True)
class MetricsComparison:
    """How many steps have metrics that were compared, how many agree in every bit, and the first that does not.

    ``names`` are the metrics that were compared, ``left_out`` those that were not.
    """

    steps: int = 0
    agreeing: int = 0
    first: FirstDifference | None = None
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def lines(self, a: str = FIRST, b: str = SECOND) -> list[str]:
        """The result as text; ``a`` and ``b`` are the names of the runs."""
        others = [f"measured or ignored, so not compared: {', '.join(self.left_out)}"] if self.left_out else []
        if not self.steps:
            return ["no step has metrics: no loss was compared", *others]
        said = f"{amounts.count(self.agreeing)} of {amounts.plural(self.steps, 'step')} agree bit for bit"
        lines = [f"{said} ({', '.join(self.names)})"]
        return [*lines, *([self.first.sentence(a, b)] if self.first is not None else []), *others]


@dataclass(frozen=True)
class Comparison:
    """Whether two runs are equal.

    Attributes:
        metrics: what the steps say.
        state: what the checkpoints of the last step in both say; None if there is none.
        ends: the last step of which each run has a checkpoint.
        corrupt: steps that one run computed twice, after a crash, with different results.
    """

    metrics: MetricsComparison
    state: StateComparison | None
    ends: tuple[int | None, int | None]
    corrupt: tuple[Mismatch, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps were compared."""
        return self.metrics.steps

    @property
    def agreeing(self) -> int:
        """How many of them agree in every bit."""
        return self.metrics.agreeing

    @property
    def first(self) -> FirstDifference | None:
        """The first step that does not."""
        return self.metrics.first

    @property
    def tensors_differing(self) -> tuple[str, ...]:
        """The tensors of the last checkpoint that differ."""
        return self.state.tensors_differing if self.state else ()

    @property
    def values_differing(self) -> tuple[str, ...]:
        """The values of the last checkpoint that differ: generators, the position in the data, counters."""
        return self.state.values_differing if self.state else ()

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not self.steps and (self.state is None or self.state.is_empty)

    @property
    def is_equal(self) -> bool:
        """Whether everything compared is equal, and something was compared."""
        is_state_equal = self.state.is_equal if self.state else self.ends == (None, None)
        is_one_end = self.ends[0] == self.ends[1]
        return not self.is_empty and self.first is None and is_state_equal and is_one_end and not self.corrupt

    def lines(self, a: str = FIRST, b: str = SECOND) -> list[str]:
        """The result as text; ``a`` and ``b`` are the names of the runs."""
        if self.is_empty:
            return ["nothing to compare: the runs share no step with metrics and no checkpoint of the same step"]
        said = self.metrics.lines(a, b)
        if self.ends[0] != self.ends[1]:
            first, second = (f"step {amounts.count(end)}" if end is not None else "nowhere" for end in self.ends)
            said.append(f"the last checkpoint of {a} is at {first}, that of {b} at {second}")
        said += self.state.lines() if self.state else []
        said += [each.sentence() for each in self.corrupt[:1]]
        if (more := len(self.corrupt) - 1) > 0:
            verb = "does" if more == 1 else "do"
            said.append(f"{amounts.plural(more, 'further step')} computed twice {verb} not agree")
        return said

    def json_fields(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "is_equal": self.is_equal,
            "steps": self.steps,
            "agreeing": self.agreeing,
            "metrics": list(self.metrics.names),
            "metrics_left_out": list(self.metrics.left_out),
            "first": asdict(self.first) if self.first else None,
            "state": asdict(self.state) if self.state else None,
            "ends": list(self.ends),
            "corrupt": [asdict(each) for each in self.corrupt],
        }


def compare_runs(
    a: Path | str, b: Path | str, *, ignore: Collection[str] = (), idle: Collection[str] | None = None
) -> Comparison:
    """Compare every logged bit of every step of two runs, and the state of their last checkpoints.

    An RNG that was not used in either run is ignored: it was never seeded, and nothing depends on it.

    Args:
        a: a run's directory.
        b: the other's.
        ignore: metrics to leave out, besides the measured ones.
        idle: the only RNGs that may be ignored, if it is known which differ between uninterrupted runs; an RNG that was
            last used long ago looks like an unused one otherwise.

    Raises:
        ManifestDamaged: a manifest is damaged.
        DamagedCheckpoint: a checkpoint is damaged.
        StorageFailed: an I/O error.
    """
    layouts = Layout(Path(a)), Layout(Path(b))
    first, second = (read_metrics(layout) for layout in layouts)
    store_a, store_b = (Store(layout.checkpoints) for layout in layouts)
    names_a, names_b = _by_step(store_a), _by_step(store_b)
    step = max(names_a.keys() & names_b.keys(), default=None)
    state: StateComparison | None = None
    if step is not None:
        drawn = drawn_generators(store_a, names_a.values()) | drawn_generators(store_b, names_b.values())
        state = compare_checkpoints(store_a, names_a[step], store_b, names_b[step], drawn=drawn, idle=idle)
    return Comparison(
        metrics=compare_metrics(first, second, ignore=ignore),
        state=state,
        ends=(max(names_a, default=None), max(names_b, default=None)),
        corrupt=(*first.recomputed.mismatches, *second.recomputed.mismatches),
    )


def compare_metrics(
    a: Stitched, b: Stitched, *, after: int = 0, until: int | None = None, ignore: Collection[str] = ()
) -> MetricsComparison:
    """Compare the bits of the steps after ``after``, up to ``until``, that either run has."""
    wanted = [step for step in {*a.kept, *b.kept} if step > after and (until is None or step <= until)]
    steps = agreeing = 0
    first: FirstDifference | None = None
    names: set[str] = set()
    logged: set[str] = set()
    for step in sorted(wanted):
        row_a, row_b = a.kept.get(step), b.kept.get(step)
        bits_a, bits_b = _computed(row_a, ignore), _computed(row_b, ignore)
        names |= bits_a.keys() | bits_b.keys()
        logged |= {name for row in (row_a, row_b) if row is not None for name in (*row.bits, *row.values)}
        if not bits_a and not bits_b:
            # Times alone: nothing of this step can agree or differ.
            continue
        steps += 1
        if row_a is not None and row_b is not None and bits_a == bits_b:
            agreeing += 1
        elif first is None:
            first = _first_difference(step, row_a, row_b, bits_a, bits_b)
    return MetricsComparison(steps, agreeing, first, tuple(sorted(names)), tuple(sorted(logged - names)))


def _first_difference(
    step: int, row_a: Row | None, row_b: Row | None, bits_a: Mapping[str, str], bits_b: Mapping[str, str]
) -> FirstDifference:
    job_a, job_b = (row.job if row else None for row in (row_a, row_b))
    if row_a is None or row_b is None:
        return FirstDifference(step, None, None, None, job_a, job_b)
    # In the order of logging: a different loss says more than the norm that follows from it.
    name = next(name for name in (*bits_a, *bits_b) if bits_a.get(name) != bits_b.get(name))
    return FirstDifference(step, name, bits_a.get(name), bits_b.get(name), job_a, job_b)


def _computed(row: Row | None, ignore: Collection[str]) -> dict[str, str]:
    """The computed metrics of a step, by name."""
    if row is None:
        return {}
    names = [*row.bits, *(name for name in row.values if name not in row.bits)]
    return {name: _both(row, name) for name in names if not is_measured(name) and name not in ignore}


def _both(row: Row, name: str) -> str:
    """A metric's bits; if the number next to them differs, it was edited, and both are given."""
    bits, value = row.bits.get(name), row.values.get(name)
    said = bits if value is None else bits_of(value)
    return str(bits or said) if bits is None or bits == said else f"{bits}, written next to it as {said}"


def _by_step(store: Store) -> dict[int, str]:
    """The newest readable checkpoint of each step."""
    found: dict[int, str] = {}
    for name in newest_first(store, scan(store).committed):
        manifest = read_quietly(store, name)
        if manifest is not None:
            found.setdefault(manifest.step, name)
    return found
