"""The demo: a tiny GPT trained twice, once uninterrupted and once as a chain of killed jobs, then compared.

This module runs the steps and checks that each job ended as planned; each job is a command of its own, as a user would
start it. The report is read from the runs' records afterwards.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import DemoFailed
from unbroken.prove.damage import Damage, do_damage
from unbroken.prove.demo_corpus import BUCKETS, write_corpus
from unbroken.prove.demo_setup import ALONE, CHAIN, STEPS, VALIDATION, VOCABULARY, DemoFolder, DemoJob, environment
from unbroken.prove.job_process import JobEnd, JobProcess
from unbroken.quoting import amounts
from unbroken.records.drill import ENVIRONMENT, write_drill
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.scan import scan

PATIENCE_S: Final = 600.0
_SHOWN_LINES: Final = 12
# In the middle of the tensors.
_WHERE: Final = (0.6, 0.5)

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Console:
    """The output of the demo: lines, and a progress bar on a terminal."""

    line: Callable[[str, str], None]
    bar: Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class TornDraft:
    """What a job that was killed during a save left: a draft, which readers ignore."""

    name: str
    step: int
    files: int
    size_bytes: int

    def sentence(self) -> str:
        """One line that describes it."""
        held = f"{amounts.plural(self.files, 'file')}, {amounts.size(self.size_bytes)}"
        return f"step {amounts.count(self.step)} was never committed: {self.name} ({held})"


@dataclass(frozen=True)
class DemoResult:
    """The finished demo: its folder, and the damage to the chained run."""

    places: DemoFolder
    torn: TornDraft
    damage: Damage
    seconds: float


def run_demo(places: DemoFolder, console: Console, environ: Mapping[str, str]) -> DemoResult:
    """Run both trainings up to the last step.

    Raises:
        DemoFailed: a command did not end as planned.
        SourcesMissing: there are no sources for a corpus.
        StorageFailed: an I/O error.
    """
    started_s = time.monotonic()
    stage = _Commands(places, console, environment(environ))
    stage.make_data()
    stage.job("alone", ALONE, places.alone)
    for number, planned in enumerate(CHAIN[:-1], start=1):
        stage.job(f"job {number}", planned, places.chained)
    torn = _torn(places, CHAIN[-2])
    console.line("torn", torn.sentence())
    damage = _damaged(places)
    console.line("damage", f"{damage.words}; it is the newest checkpoint")
    stage.job(f"job {len(CHAIN)}", CHAIN[-1], places.chained)
    return DemoResult(places, torn, damage, time.monotonic() - started_s)


@dataclass(frozen=True)
class _Commands:
    """Starts commands, one after the other."""

    places: DemoFolder
    console: Console
    env: Mapping[str, str]

    def make_data(self) -> None:
        """Write text, train a tokenizer, and tokenize both splits."""
        places = self.places
        corpus = write_corpus(places.text)
        sizes = ", ".join(f"{bucket} {amounts.size(corpus.size_bytes[bucket])}" for bucket in BUCKETS)
        self.console.line("corpus", f"{corpus.modules} modules of Python's own library: {sizes}")
        words = ["tokenizer", "train", str(places.text), "-o", str(places.tokenizer), "--vocab-size", str(VOCABULARY)]
        self._call("tokenizer", "learn a tokenizer", words)
        words = ["tokenize", "--input-dir", str(places.text), "--output-dir", str(places.data), "--num-workers", "1"]
        words += ["--tokenizer-path", str(places.tokenizer), "--val-fraction", VALIDATION]
        self._call("tokens", "tokenize the corpus", words)

    def _call(self, label: str, expected: str, words: Sequence[str]) -> None:
        """Run a command that must succeed, and show its first line."""
        log = self.places.log(label)
        with self._started(words, log, self.places.folder) as job:
            ended = _ended(f"unbroken {words[0]}", expected, job)
            if ended.code != 0:
                raise _failed(f"unbroken {words[0]}", expected, ended, job)
            first = job.said(_SHOWN_LINES)[:1]
        self.console.line(label, "  ".join(first).split("  ", maxsplit=2)[-1])

    def job(self, label: str, planned: DemoJob, run: Path) -> None:
        """Run one job to its planned end."""
        started_s = time.monotonic()
        words = ["train", str(self.places.config), f"training.output_dir={run}", f"data.num_workers={planned.workers}"]
        words += ["--nproc-per-node", str(planned.ranks)]
        env = dict(self.env)
        if (drill := planned.drill()) is not None:
            write_drill(self.places.drill, drill)
            env[ENVIRONMENT] = str(self.places.drill)
        with self._started(words, self.places.log(label.replace(" ", "-")), run, env) as job:
            self._followed(job, planned, f"{label}, {amounts.plural(planned.ranks, 'rank')}")
            ended = _ended(label, planned.expected(), job)
            _require_end(planned, label, ended, job)
            at = amounts.count(job.step() or 0)
        took = amounts.duration(time.monotonic() - started_s)
        self.console.line(label, f"{amounts.plural(planned.ranks, 'rank')}, to step {at}: {planned.ending()}  ({took})")

    def _followed(self, job: JobProcess, planned: DemoJob, title: str) -> None:
        """Watch a job and its steps, and end it at the planned step."""
        shown, is_left_alone = 0, planned.end == "completed"
        with self.console.bar(title, STEPS) as advance:
            for at in job.steps(PATIENCE_S):
                advance(at - shown)
                shown = at
                if not is_left_alone and _is_due(planned, at, job):
                    is_left_alone = True
                    job.stop(PATIENCE_S) if planned.end == "stopped" else job.kill()

    def _started(self, words: Sequence[str], log: Path, run: Path, env: Mapping[str, str] | None = None) -> JobProcess:
        command = [sys.executable, "-m", "unbroken", *words]
        return JobProcess.started(
            command, env=self.env if env is None else env, log=log, run=run, cwd=self.places.folder
        )


def _is_due(planned: DemoJob, at: int, job: JobProcess) -> bool:
    """Whether to end a job now; one that is killed during a save is killed by its drill."""
    return job.has_lost_holder() if planned.end == "killed-saving" else at >= planned.after


def _ended(stage: str, expected: str, job: JobProcess) -> JobEnd:
    try:
        return job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        ended_as = f"it did not end within {amounts.duration(PATIENCE_S)}"
        raise DemoFailed(
            stage=stage, expected=expected, ended=ended_as, log=job.log, log_tail=job.said(_SHOWN_LINES)
        ) from None


def _require_end(planned: DemoJob, label: str, ended: JobEnd, job: JobProcess) -> None:
    """Raise unless a job ended as planned."""
    wanted = {"killed": "crashed", "stopped": "stopped", "killed-saving": "crashed", "completed": "completed"}[
        planned.end
    ]
    found = ended.outcome.status if ended.outcome is not None else None
    if found != wanted:
        raise _failed(label, planned.expected(), ended, job)


def _failed(stage: str, expected: str, ended: JobEnd, job: JobProcess) -> DemoFailed:
    status = f" ({ended.outcome.status})" if ended.outcome is not None else ""
    ended_as = f"it exited with code {ended.code}{status}"
    return DemoFailed(stage=stage, expected=expected, ended=ended_as, log=job.log, log_tail=job.said(_SHOWN_LINES))


def _torn(places: DemoFolder, planned: DemoJob) -> TornDraft:
    """The draft of the second-to-last job, which was killed during a save."""
    store = Store(Layout(places.chained).checkpoints)
    for draft in scan(store).torn:
        files, size_bytes = draft.weigh(store)
        return TornDraft(str(draft.name), draft.name.step, files, size_bytes)
    raise _shows_nothing(places, planned.expected(), "no half-written checkpoint was left behind")


def _damaged(places: DemoFolder) -> Damage:
    store = Store(Layout(places.chained).checkpoints)
    damage = do_damage(store, "flip", _WHERE, job=len(CHAIN) - 1)
    if damage.name is None:
        raise _shows_nothing(places, "leave a checkpoint that can be damaged", damage.words)
    return damage


def _shows_nothing(places: DemoFolder, expected: str, ended: str) -> DemoFailed:
    number = len(CHAIN) - 1
    return DemoFailed(stage=f"job {number}", expected=expected, ended=ended, log=places.log(f"job-{number}"))
