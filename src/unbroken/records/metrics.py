"""Step metrics of every job, with the bits of every number, and what they say when read together.

A job that is killed loses the steps after its last commit, and the next job computes them again. Both wrote what they
computed, so every crash is a free proof: the two must agree bit for bit. ``Recheck`` compares during training,
``read_metrics`` does the same for the whole run afterwards.
"""

import contextlib
import functools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.records.jsonl import LineWriter, TornLines, Values, job_file, jobs_in, read_last_lines, read_lines
from unbroken.records.layout import Layout
from unbroken.store.fields import MOST_WHOLE, as_whole, parsed


@dataclass(frozen=True)
class Mismatch:
    """One metric of one step that two jobs computed differently."""

    step: int
    metric: str
    first_job: int
    first_bits: str
    second_job: int
    second_bits: str

    def sentence(self) -> str:
        """What differs, and the causes to check."""
        return (
            f"step {amounts.count(self.step)} was computed twice and does not agree: {self.metric} was "
            f"{self.first_bits} in job {self.first_job} and is {self.second_bits} in job {self.second_job}; "
            "causes to check, in this order: config or hyperparameters that the script changed between the two jobs, "
            "state that was not passed to the run, a nondeterministic kernel, silent data corruption"
        )

    def as_json(self) -> dict[str, Any]:
        """The values of its journal event, ``mismatch``."""
        return asdict(self)


@dataclass(frozen=True)
class Recomputed:
    """How many steps were computed again after they had been lost, and how many of them agree bit for bit."""

    compared: int = 0
    agreeing: int = 0
    mismatches: tuple[Mismatch, ...] = ()

    def sentence(self) -> str | None:
        """The proof in one line; None where nothing was computed twice."""
        if not self.compared:
            return None
        was = "was" if self.compared == 1 else "were"
        verb = "agrees" if self.compared == 1 else "agree"
        proof = (
            f"{amounts.plural(self.compared, 'step')} {was} computed twice; "
            f"{amounts.count(self.agreeing)} of {amounts.count(self.compared)} {verb} bit for bit"
        )
        return f"{proof}; {self.mismatches[0].sentence()}" if self.mismatches else proof


__all__ = [
    "MOST_WAITING",
    "JobRows",
    "MetricsTail",
    "MetricsWriter",
    "Mismatch",
    "Number",
    "Recheck",
    "Recomputed",
    "Row",
    "Stitched",
    "bits_of",
    "compare_recomputed",
    "is_exact",
    "lost_values",
    "read_metrics",
    "stitch",
]

Number = int | float

SCHEMA: Final = "unbroken.metrics/1"
# One line is some microseconds; what the kernel has, a killed process no longer loses.
DEFAULT_FLUSH_STEPS: Final = 1
# Names whose value a step computes from its state and its data alone. Speeds and times are measured, never repeated.
_EXACT_NAMES: Final = frozenset({"loss", "grad_norm", "lr", "learning_rate"})
_MOST_MISMATCHES: Final = 1000
# While storage refuses, lines wait; a disk that stays full must not fill the memory too.
MOST_WAITING: Final = 10_000
_OWN: Final = frozenset({"step", "bits"})
# Some thousand rows: what one look at a growing file reads at most.
_TAIL_BYTES: Final = 1 << 18


def is_exact(name: str) -> bool:
    """Whether a metric of this name must be the same when its step is computed again: losses, norms, rates."""
    last = name.replace(".", "/").rpartition("/")[2]
    return last in _EXACT_NAMES or last.endswith("_loss")


def bits_of(value: Number) -> str:
    """A number as text that is equal exactly when the number is: floats in hexadecimal, whole numbers as they are.

    Raises:
        TypeError: it is not a number.
    """
    if isinstance(value, float):
        return float.hex(value)
    if isinstance(value, int):
        return str(int(value))
    raise TypeError(f"a metric is a number, not a {type(value).__name__}")


class MetricsWriter:
    """Writes the metrics of one job.

    Lines wait in memory and go to the kernel every ``every`` steps; only ``flush(durable=True)`` waits for the disk.

    Args:
        start: the step the job resumes from: what it computes comes after it.
        is_comparable: False for a job that resumed with an accepted difference; what it computes need not equal what
            was computed before it.
        settings: a digest of the config and hyperparameters it computes under; steps under others are not compared.
        every: how many steps wait at most.
        makes_run: False for a job that holds the run: one that was moved or deleted is not created again.
        files: the storage.
    """

    def __init__(
        self,
        layout: Layout,
        job: int,
        *,
        start: int,
        is_comparable: bool = True,
        settings: str | None = None,
        every: int = DEFAULT_FLUSH_STEPS,
        makes_run: bool = True,
        files: Files = LOCAL,
    ) -> None:
        self._lines = LineWriter(job_file(layout.metrics, job), files, within=None if makes_run else layout.run)
        self._every = every
        head = {"schema": SCHEMA, "job": job, "start": start, "is_comparable": is_comparable}
        self._waiting = [json.dumps(head if settings is None else {**head, "settings": settings})]

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Add what one step gave.

        Raises:
            StorageFailed: an I/O error; the lines are kept and tried again at the next flush.
            ValueError: a metric has a name of ours.
            TypeError: a metric is not a number.
        """
        self.write_rows([(step, values)])

    def write_rows(self, rows: Iterable[tuple[int, Mapping[str, Number]]]) -> None:
        """Add what several steps gave; raises as ``write`` does."""
        self._waiting += [_line(step, values) for step, values in rows]
        del self._waiting[:-MOST_WAITING]
        if len(self._waiting) >= self._every:
            self.flush()

    def flush(self, *, durable: bool = False) -> None:
        """Hand all lines to the kernel; ``durable`` waits until they outlive a power cut.

        Raises:
            StorageFailed: an I/O error; the lines are kept and tried again at the next flush.
        """
        # Kept until they are written: a line that is there twice says the same twice.
        self._lines.write_encoded(self._waiting, durable=durable)
        self._waiting = []

    def close(self) -> None:
        """Flush and give the file back.

        Raises:
            StorageFailed: an I/O error.
        """
        self.flush()
        self._lines.close()


def _line(step: int, values: Mapping[str, Number]) -> str:
    """One step as JSON, by hand: this is done for every step, and ``json.dumps`` takes four times as long."""
    if not _OWN.isdisjoint(values):
        raise ValueError(f"a metric cannot be called {' or '.join(sorted(_OWN & values.keys()))}")
    metrics, bits = "", []
    for name, value in values.items():
        quoted = _quoted(name)
        # Most are plain floats, and are recognized without a call; infinity minus itself is NaN.
        if type(value) is float and value - value == 0.0:
            metrics += f", {quoted}: {value!r}"
            bits.append(f'{quoted}: "{value.hex()}"')
        else:
            metrics += f", {quoted}: {_json_number(value)}"
            bits.append(f'{quoted}: "{bits_of(value)}"')
    return f'{{"step": {step}{metrics}, "bits": {{{", ".join(bits)}}}}}'


@functools.lru_cache(4096)
def _quoted(name: str) -> str:
    return json.dumps(name)


def _json_number(value: Number) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # The plain form, also of another library's number that is a float or an int.
    if isinstance(value, float):
        return float.__repr__(value) if math.isfinite(value) else f'"{float.__repr__(value)}"'
    return int.__repr__(value)


@dataclass(frozen=True, slots=True)
class Row:
    """What one job computed at one step, under which settings."""

    step: int
    job: int
    values: Mapping[str, Number]
    bits: Mapping[str, str]
    settings: str | None = None


@dataclass(frozen=True)
class JobRows:
    """What one job computed, in the order in which it did; read as it is asked for."""

    job: int
    start: int | None
    is_comparable: bool
    rows: Iterable[Row]
    settings: str | None = None


@dataclass
class Recheck:
    """Compares steps as they are computed again with what was computed before, under the same settings.

    It keeps only the steps still to come.
    """

    job: int
    lost: dict[int, Row] = field(default_factory=dict)
    settings: str | None = None
    compared: int = 0
    agreeing: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether no lost step is still to come."""
        return not self.lost

    @property
    def result(self) -> Recomputed:
        """What was found so far."""
        return Recomputed(self.compared, self.agreeing, tuple(self.mismatches))

    def as_json(self) -> dict[str, Any]:
        """The values of the journal event ``recomputed``, written when all lost steps were compared or the job ends."""
        return {"compared": self.compared, "agreeing": self.agreeing}

    def check(self, step: int, values: Mapping[str, Number]) -> Mismatch | None:
        """Compare one step; gives the first metric that differs, None where all agree or nothing was lost."""
        return self.check_bits(step, {name: bits_of(value) for name, value in values.items()})

    def check_bits(self, step: int, bits: Mapping[str, str]) -> Mismatch | None:
        """The same for values that are bits already."""
        before = self.lost.pop(step, None)
        if before is None or before.settings != self.settings:
            # Other settings give other numbers, and nobody is to take that for silent data corruption.
            return None
        names = [name for name in bits if name in before.bits and is_exact(name)]
        if not names:
            return None
        self.compared += 1
        different = [name for name in names if bits[name] != before.bits[name]]
        if not different:
            self.agreeing += 1
            return None
        name = different[0]
        mismatch = Mismatch(step, name, before.job, before.bits[name], self.job, bits[name])
        # After the first difference every later step may differ too: the first ones say it all.
        if len(self.mismatches) < _MOST_MISMATCHES:
            self.mismatches.append(mismatch)
        return mismatch


def lost_values(layout: Layout, *, job: int, start: int, settings: str | None = None, files: Files = LOCAL) -> Recheck:
    """What earlier jobs computed after the step this job resumes from: to be compared when it is computed again.

    Raises:
        StorageFailed: an I/O error.
    """
    lost: dict[int, Row] = {}
    # After a year a run has millions of steps, and nearly all of them are committed.
    for before in _jobs(layout, TornLines(), files, after=start):
        if before.job >= job:
            break
        if not before.is_comparable:
            lost.clear()
        for row in before.rows:
            if row.step > start:
                lost[row.step] = _merged(lost.get(row.step), row)
    return Recheck(job, lost, settings)


@dataclass(frozen=True)
class Stitched:
    """The metrics of a run as one series: for each step what the last job computed, and what was lost on the way."""

    kept: Mapping[int, Row]
    lost: tuple[Row, ...]
    recomputed: Recomputed
    torn: int = 0

    def series(self, name: str) -> list[tuple[int, Number]]:
        """One metric over the steps, in order."""
        return [(step, row.values[name]) for step, row in sorted(self.kept.items()) if name in row.values]


def read_metrics(layout: Layout, files: Files = LOCAL) -> Stitched:
    """The metrics of all jobs, stitched.

    Raises:
        StorageFailed: an I/O error.
    """
    torn = TornLines()
    found = stitch(_jobs(layout, torn, files))
    return Stitched(found.kept, found.lost, found.recomputed, torn.lines)


def compare_recomputed(jobs: Iterable[JobRows]) -> Recomputed:
    """Compare every step that was computed more than once with the time before."""
    return stitch(jobs).recomputed


def stitch(jobs: Iterable[JobRows]) -> Stitched:
    """One series from what each job computed: where a job starts, all that was computed after that step is lost."""
    kept: dict[int, Row] = {}
    before: dict[int, Row] = {}
    lost: list[Row] = []
    # A job writes its steps in order; a file that was put together by hand may have others.
    is_ordered = True
    compared = agreeing = 0
    mismatches: list[Mismatch] = []
    for job in jobs:
        if not job.is_comparable:
            before.clear()
        recheck: Recheck | None = None
        for row in job.rows:
            if recheck is None:
                start = row.step - 1 if job.start is None else job.start
                kept = kept if is_ordered else dict(sorted(kept.items()))
                gone, is_ordered = _taken_out(kept, start), True
                lost += gone.values()
                before.update(gone if job.is_comparable else {})
                recheck = Recheck(job.job, before, job.settings)
            recheck.check_bits(row.step, row.bits)
            is_ordered = is_ordered and (not kept or row.step > next(reversed(kept)) or row.step in kept)
            kept[row.step] = _merged(kept.get(row.step), row)
        if recheck is not None:
            compared, agreeing = compared + recheck.compared, agreeing + recheck.agreeing
            mismatches += recheck.mismatches
    return Stitched(kept, tuple(lost), Recomputed(compared, agreeing, tuple(mismatches)))


class MetricsTail:
    """Reads the metrics of one job while they are written: each row once, in the order of the file."""

    def __init__(self, layout: Layout, job: int, files: Files = LOCAL) -> None:
        self._path, self._job, self._files = job_file(layout.metrics, job), job, files
        self._offset, self._rest = 0, b""
        self._waiting: deque[Row] = deque()

    def read(self, *, up_to: int | None = None, most: int = 1000) -> list[Row]:
        """The next rows, up to a step if one is named; a later row stays for the next call.

        Raises:
            StorageFailed: an I/O error.
        """
        rows: list[Row] = []
        while len(rows) < most and (self._waiting or self._fill()):
            if up_to is not None and self._waiting and self._waiting[0].step > up_to:
                break
            if self._waiting:
                rows.append(self._waiting.popleft())
        return rows

    def _fill(self) -> bool:
        """Read on; whether there was anything."""
        if self._files.find(self._path) is None:
            return False
        buffer = bytearray(_TAIL_BYTES)
        with self._files.reading(self._path) as source:
            taken = source.fill(self._offset, memoryview(buffer))
        self._offset += taken
        # What has no end yet is still being written.
        *whole, self._rest = (self._rest + bytes(memoryview(buffer)[:taken])).split(b"\n")
        self._waiting.extend(_rows(self._job, _objects(whole), TornLines(), None))
        return taken > 0


def _objects(lines: Iterable[bytes]) -> Iterator[Values]:
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(found := parsed(line), dict):
                yield found


def _taken_out(kept: dict[int, Row], start: int) -> dict[int, Row]:
    """Remove what comes after a step, and return it; ``kept`` is in the order of its steps, so the rest is not read."""
    gone: list[tuple[int, Row]] = []
    while kept and next(reversed(kept)) > start:
        gone.append(kept.popitem())
    return dict(reversed(gone))


def _merged(before: Row | None, row: Row) -> Row:
    # Two writes of the same step by one job are merged; another job replaces them.
    if before is None or before.job != row.job:
        return row
    return Row(row.step, row.job, {**before.values, **row.values}, {**before.bits, **row.bits}, row.settings)


def _jobs(layout: Layout, torn: TornLines, files: Files, *, after: int | None = None) -> Iterator[JobRows]:
    """All jobs; with ``after``, rows up to that step may be left out."""

    def is_early(line: Values) -> bool:
        step = as_whole(line.get("step"))
        return after is not None and step is not None and step <= after

    for job in jobs_in(layout.metrics, files):
        path = job_file(layout.metrics, job)
        lines = read_lines(path, torn, files)
        first = next(lines, {})
        is_head = first.get("schema") == SCHEMA
        start = first.get("start") if is_head else None
        written = first.get("settings") if is_head else None
        settings = written if isinstance(written, str) else None
        wanted = lines if is_head else _chained(first, lines)
        if after is not None:
            # A job writes its steps in order; the head, if it comes again, is no row.
            wanted = read_last_lines(path, torn, is_early, files)
        yield JobRows(
            job,
            as_whole(start),
            is_comparable=not is_head or first.get("is_comparable") is not False,
            rows=_rows(job, wanted, torn, settings),
            settings=settings,
        )


def _chained(first: Values, lines: Iterator[Values]) -> Iterator[Values]:
    if first:
        yield first
    yield from lines


def _rows(job: int, lines: Iterator[Values], torn: TornLines, settings: str | None) -> Iterator[Row]:
    for line in lines:
        step, bits = as_whole(line.pop("step", None)), line.pop("bits", {})
        if "schema" in line:
            continue
        if step is None or not isinstance(bits, dict):
            torn.lines += 1
            continue
        values = {name: _number(value) for name, value in line.items()}
        said = {name: text for name, text in bits.items() if isinstance(text, str)}
        yield Row(step, job, {name: value for name, value in values.items() if value is not None}, said, settings)


_NAMED: Final[Mapping[str, Callable[[], float]]] = {
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
}


def _number(value: Any) -> Number | None:  # noqa: ANN401 -- whatever JSON held
    if isinstance(value, str) and value in _NAMED:
        return _NAMED[value]()
    if isinstance(value, int) and not -MOST_WHOLE <= value <= MOST_WHOLE:
        # No plot or table holds it; its bits are compared all the same.
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
