"""The report of a proof, as text and JSON: injected faults, recovery, cost, verdict."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from unbroken.prove.baseline import Baseline
from unbroken.prove.chain import ChainReport, JobReport
from unbroken.quoting import amounts
from unbroken.quoting.shell import shell_line
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.testing.exactness import Comparison

_ALONE: Final = "the uninterrupted run"
_CHAINED: Final = "the chain"
_UNKNOWN: Final = (
    "uninterrupted runs agree, so a resume does not restore some state of the script: "
    "register it with Run, or derive it from the step"
)


@dataclass
class Proof:
    """The results of a proof; ``left_out`` are the faults that could not be tried, each with the reason."""

    words: tuple[str, ...]
    seed: int
    faults: tuple[str, ...]
    ranks: tuple[int, ...]
    folder: Path
    left_out: tuple[tuple[str, str], ...] = ()
    baseline: Baseline | None = None
    uninterrupted: Comparison | None = None
    chains: list[ChainReport] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_proven(self) -> bool:
        """Whether there was a chain, and every one equals the uninterrupted run."""
        return bool(self.chains) and all(chain.is_proven for chain in self.chains)

    @property
    def injected(self) -> int:
        """The number of injected faults."""
        return sum(len(job.injected) for chain in self.chains for job in chain.jobs)

    def rerun(self, chain: ChainReport) -> str:
        """The command that repeats one chain."""
        ranks = ["--ranks", ",".join(map(str, self.ranks))] if len(self.ranks) > 1 else []
        words = ["unbroken", "prove", "--seed", str(self.seed), "--chain", str(chain.number)]
        return shell_line([*words, "--faults", ",".join(self.faults), *ranks, "--", *self.words])

    def json_fields(self) -> dict[str, Any]:
        """The proof as JSON."""
        baseline = self.baseline
        return {
            "command": list(self.words),
            "seed": self.seed,
            "faults": list(self.faults),
            "ranks": list(self.ranks),
            "left_out": [{"fault": fault, "reason": reason} for fault, reason in self.left_out],
            "folder": str(self.folder),
            "uninterrupted": None if baseline is None else {**asdict(baseline), "run": str(baseline.run)},
            "is_proven": self.is_proven,
            "injected": self.injected,
            "seconds": self.seconds,
            "chains": [self._chain_facts(chain) for chain in self.chains],
        }

    def _chain_facts(self, chain: ChainReport) -> dict[str, Any]:
        return {
            "chain": chain.number,
            "run": str(chain.run),
            "is_proven": chain.is_proven,
            "problem": chain.problem,
            "log": list(chain.log),
            "comparison": chain.comparison.json_fields() if chain.comparison else None,
            "seconds": chain.seconds,
            "computed_again": chain.computed_again,
            "unsaved": list(chain.unsaved),
            "jobs": [asdict(job) for job in chain.jobs],
            "rerun": self.rerun(chain),
        }

    # ---- text ----

    def text(self, style: Style) -> str:
        """The proof as text."""
        lines = [self._uninterrupted_line()]
        lines += [f"left out: {fault}: {reason}" for fault, reason in self.left_out]
        for chain in self.chains:
            lines += ["", *self._chain_lines(chain, style)]
        return "\n".join([*lines, "", *self._verdict(style)])

    def _uninterrupted_line(self) -> str:
        baseline = self.baseline
        assert baseline is not None
        took = f"{amounts.plural(baseline.steps, 'step')} in {amounts.duration(baseline.seconds)}"
        cadence = f"chains save every {amounts.plural(baseline.save_steps, 'step')}"
        return f"uninterrupted: {took}, twice, with the same bits; {cadence}"

    def _chain_lines(self, chain: ChainReport, style: Style) -> list[str]:
        columns = [Column("job", is_number=True), Column("ranks", is_number=True), Column("from", is_number=True)]
        columns += [Column("to", is_number=True), Column("what was done to it"), Column("it ended")]
        rows = [_row(number, job) for number, job in enumerate(chain.jobs, 1)]
        lines = [f"chain {chain.number}", table(columns, rows, style=style)]
        for number, job in enumerate(chain.jobs, 1):
            lines += [f"  job {number} skipped {printable(each)}" for each in job.skipped]
            lines += [f"  job {number} ended before: {printable(each)}" for each in job.missed]
            lines += [f"  after job {number}: {printable(job.damage)}"] if job.damage else []
        again = amounts.plural(chain.computed_again, "step")
        cost = f"{again} computed again, {amounts.duration(chain.seconds)} in all"
        return [*lines, *_compared(chain, style), f"  {cost}"]

    def _verdict(self, style: Style) -> list[str]:
        if self.is_proven:
            chains, jobs = len(self.chains), sum(len(chain.jobs) for chain in self.chains)
            done = f"{amounts.plural(chains, 'chain')} of {jobs} jobs, {amounts.plural(self.injected, 'fault')}"
            same = f"every chain equals the uninterrupted run bit for bit (seed {self.seed})"
            return [f"{style.good('proven')}: {done}; {same}"]
        failed = [chain for chain in self.chains if not chain.is_proven]
        lines = [f"{style.bad('not proven')}: {_why(failed[0])}"] if failed else []
        lines += [f"  at   {chain.run}" for chain in failed]
        return lines + [f"  help {self.rerun(chain)}   repeat it" for chain in failed]


def _why(chain: ChainReport) -> str:
    return f"chain {chain.number}: {chain.problem}" if chain.problem else f"chain {chain.number} has other bits"


def _row(number: int, job: JobReport) -> Sequence[str]:
    began = "" if job.went_on_from is None else amounts.count(job.went_on_from)
    reached = "" if job.last_step is None else amounts.count(job.last_step)
    done = printable("; ".join(job.injected) or "left alone")
    return (str(number), "" if job.ranks is None else str(job.ranks), began, reached, done, printable(job.ended))


def _compared(chain: ChainReport, style: Style) -> list[str]:
    if chain.problem is not None:
        tail = [f"  | {printable(line)}" for line in chain.log]
        return [f"  {style.bad('failed')}: {printable(chain.problem)}", *tail]
    assert chain.comparison is not None
    mark = style.good("equal") if chain.comparison.is_equal else style.bad("differs")
    first, *rest = map(printable, chain.comparison.lines(_ALONE, _CHAINED))
    rest += [] if chain.comparison.is_equal else _likely(chain)
    return [f"  {mark}: {first}", *(f"  {line}" for line in rest)]


def _likely(chain: ChainReport) -> list[str]:
    """The likely cause: what the run's audit found, or a general hint."""
    named = [f"likely cause: not registered with Run, so not restored at resume: {each}" for each in chain.unsaved]
    return list(map(printable, named)) or [f"likely cause: {_UNKNOWN}"]
