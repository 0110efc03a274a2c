"""The report of the demo: a row per job, the verdict, and what to try next.

Everything is read from the records of the two runs: the table shows what happened, not what was planned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.errors.tree import quoted
from unbroken.prove.demo import DemoResult
from unbroken.prove.demo_setup import CHAIN, DemoJob
from unbroken.quoting import amounts
from unbroken.records.journal import History, read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import Recomputed, read_metrics
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, scan
from unbroken.testing.exactness import Comparison, compare_runs

EXIT_DIFFERS: Final = 3
_LABEL: Final = 9


@dataclass(frozen=True)
class JobRow:
    """One job of the chained run: the steps it computed, on how many ranks, and how it ended."""

    job: int
    ranks: int
    workers: int
    start: int
    end: int
    ending: str


@dataclass(frozen=True)
class DemoVerdict:
    """The comparison of the two runs, and of the steps that the chained one computed twice."""

    comparison: Comparison
    recomputed: Recomputed

    @property
    def is_equal(self) -> bool:
        """Whether both runs are equal, bit for bit."""
        return self.comparison.is_equal

    @property
    def exit_code(self) -> int:
        """0, or the exit code for a difference."""
        return 0 if self.is_equal else EXIT_DIFFERS

    def text(self, style: Style) -> str:
        """The verdict, and what was compared."""
        verdict = style.good("equal, bit for bit") if self.is_equal else style.bad("NOT EQUAL")
        lines = [("verdict", f"the uninterrupted run and the chain of jobs are {verdict}")]
        lines += [("", line) for line in self.comparison.lines("the run left alone", "the chain")]
        if sentence := self.recomputed.sentence():
            lines.append(("crashes", sentence))
        return labelled(lines, style)


def prove_demo(alone: Path, chained: Path) -> DemoVerdict:
    """Compare the uninterrupted run with the chained one.

    Raises:
        CheckpointError: a checkpoint of the two is damaged.
        StorageFailed: an I/O error.
    """
    return DemoVerdict(compare_runs(alone, chained), read_metrics(Layout(chained)).recomputed)


def rows(run: Path, planned_jobs: Sequence[DemoJob] = CHAIN) -> list[JobRow]:
    """The jobs of the chained run, from its records and the planned endings.

    Raises:
        StorageFailed: an I/O error.
    """
    history, metrics = read_history(Layout(run)), read_metrics(Layout(run))
    ends: dict[int, int] = {}
    for row in (*metrics.lost, *metrics.kept.values()):
        ends[row.job] = max(ends.get(row.job, 0), row.step)
    return [_row(history, job, planned, ends) for job, planned in zip(history.jobs, planned_jobs, strict=False)]


def _row(history: History, job: int, planned: DemoJob, ends: Mapping[int, int]) -> JobRow:
    started, resumed = history.last("job-start", job=job), history.last("resume", job=job)
    start = (resumed.whole("step") if resumed is not None else None) or 0
    ranks = (started.whole("world_size") if started is not None else None) or planned.ranks
    passed = [str(fact.text("name")) for fact in history.of_kind("checkpoint-skipped") if fact.job == job]
    ending = f"{planned.ending()}, after skipping the damaged {', '.join(passed)}" if passed else planned.ending()
    return JobRow(job, ranks, planned.workers, start, ends.get(job, start), ending)


def labelled(lines: Sequence[tuple[str, str]], style: Style) -> str:
    """Lines with a column of labels."""
    return "\n".join(f"{style.dim(label.ljust(_LABEL))}  {line}".rstrip() for label, line in lines)


def json_fields(result: DemoResult, found: Sequence[JobRow], proof: DemoVerdict) -> dict[str, Any]:
    """The demo as JSON."""
    return {
        "folder": result.places.folder,
        "alone": result.places.alone,
        "chained": result.places.chained,
        "seconds": round(result.seconds, 1),
        "jobs": [asdict(row) for row in found],
        "torn": asdict(result.torn),
        "damage": asdict(result.damage),
        "comparison": proof.comparison.json_fields(),
        "recomputed": {"compared": proof.recomputed.compared, "agreeing": proof.recomputed.agreeing},
    }


def jobs_table(found: Sequence[JobRow], style: Style) -> str:
    """The jobs under their headings."""
    columns = [
        Column("job", is_number=True),
        Column("ranks", is_number=True),
        Column("workers", is_number=True),
        Column("from step", is_number=True),
        Column("to step", is_number=True),
        Column("how it ended"),
    ]
    cells = [[*map(amounts.count, (row.job, row.ranks, row.workers, row.start, row.end)), row.ending] for row in found]
    return table(columns, cells, style=style)


def next_steps(result: DemoResult, program: str, style: Style) -> str:
    """Commands that work when pasted, each with what it shows."""
    places = result.places
    run = quoted(places.chained.relative_to(places.folder))
    store = Store(Layout(places.chained).checkpoints)
    last, before = newest_first(store, scan(store).committed)[:2]
    commands = [
        (f"ls {run}", "its checkpoints"),
        (f"verify {run} --full", "verify all checksums"),
        (f"replay {run} {before} {last}", "compute its last steps again"),
        (f"generate {run} --prompt 'def ' --seed 1", "what it says after a minute of training"),
        (f"prove --minutes 1 -- {program} train {quoted(places.config.name)}", "chance instead of a plan"),
    ]
    lines = [("try next", f"cd {quoted(places.folder)}")]
    for each, why in commands:
        # Above the command: next to it, a narrow terminal would break both.
        lines += [("", style.dim(f"# {why}")), ("", f"{program} {each}")]
    return labelled(lines, style)
