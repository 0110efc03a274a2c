"""The demo: one tiny GPT trained twice, once left alone and once as a chain of jobs that are killed, and compared.

Owns the order of things and the checks that each job really met the end it was to meet; everything heavy is a command
of its own, started as a user would start it. What is shown is read from the runs' own records afterwards.
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
from unbroken.prove.corpus import BUCKETS, write_corpus
from unbroken.prove.damage import Damage, do_damage
from unbroken.prove.demo_setup import ALONE, CHAIN, STEPS, VALIDATION, VOCABULARY, Act, Places, environment
from unbroken.prove.watched_job import Ended, Job
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
class Voice:
    """What the demo says things through: a line that stays, and a bar that is drawn only on a terminal."""

    line: Callable[[str, str], None]
    bar: Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class Torn:
    """What a job that was killed while it saved left behind: a draft that no reader trusts."""

    name: str
    step: int
    files: int
    size_bytes: int

    def sentence(self) -> str:
        """What it is, in one line."""
        held = f"{amounts.plural(self.files, 'file')}, {amounts.size(self.size_bytes)}"
        return f"step {amounts.count(self.step)} was never committed: {self.name} ({held})"


@dataclass(frozen=True)
class Played:
    """The demo when all jobs have ended: where it is, and what was done to the chained run besides ending its jobs."""

    places: Places
    torn: Torn
    damage: Damage
    seconds: float


def play(places: Places, voice: Voice, environ: Mapping[str, str]) -> Played:
    """Everything up to the last step of the chained run.

    Raises:
        DemoFailed: a command ended otherwise than it was to.
        SourcesMissing: there is nothing to make a corpus of.
        StorageFailed: the system refused.
    """
    started_s = time.monotonic()
    stage = _Stage(places, voice, environment(environ))
    stage.make_data()
    stage.job("alone", ALONE, places.alone)
    for number, act in enumerate(CHAIN[:-1], start=1):
        stage.job(f"job {number}", act, places.chained)
    torn = _torn(places, CHAIN[-2])
    voice.line("torn", torn.sentence())
    damage = _damaged(places)
    voice.line("damage", f"{damage.words}; it is the newest there is")
    stage.job(f"job {len(CHAIN)}", CHAIN[-1], places.chained)
    return Played(places, torn, damage, time.monotonic() - started_s)


@dataclass(frozen=True)
class _Stage:
    """Where commands are started, one after the other."""

    places: Places
    voice: Voice
    env: Mapping[str, str]

    def make_data(self) -> None:
        """Text, a tokenizer learned from it, and shards in both splits."""
        places = self.places
        corpus = write_corpus(places.text)
        sizes = ", ".join(f"{bucket} {amounts.size(corpus.size_bytes[bucket])}" for bucket in BUCKETS)
        self.voice.line("corpus", f"{corpus.modules} modules of Python's own library: {sizes}")
        words = ["tokenizer", "train", str(places.text), "-o", str(places.tokenizer), "--vocab-size", str(VOCABULARY)]
        self._call("tokenizer", "learn a tokenizer", words)
        words = ["tokenize", "--input-dir", str(places.text), "--output-dir", str(places.data), "--num-workers", "1"]
        words += ["--tokenizer-path", str(places.tokenizer), "--val-fraction", VALIDATION]
        self._call("tokens", "tokenize the corpus", words)

    def _call(self, label: str, was_to: str, words: Sequence[str]) -> None:
        """A command that is to end well, and whose first line is worth showing."""
        log = self.places.log(label)
        with self._started(words, log, self.places.folder) as job:
            ended = _ended(f"unbroken {words[0]}", was_to, job)
            if ended.code != 0:
                raise _failed(f"unbroken {words[0]}", was_to, ended, job)
            first = job.said(_SHOWN_LINES)[:1]
        self.voice.line(label, "  ".join(first).split("  ", maxsplit=2)[-1])

    def job(self, label: str, act: Act, run: Path) -> None:
        """One job of a run, to the end that it is to meet."""
        started_s = time.monotonic()
        words = ["train", str(self.places.config), f"training.output_dir={run}", f"data.num_workers={act.workers}"]
        words += ["--nproc-per-node", str(act.ranks)]
        env = dict(self.env)
        if (drill := act.drill()) is not None:
            write_drill(self.places.drill, drill)
            env[ENVIRONMENT] = str(self.places.drill)
        with self._started(words, self.places.log(label.replace(" ", "-")), run, env) as job:
            self._followed(job, act, f"{label}, {amounts.plural(act.ranks, 'rank')}")
            ended = _ended(label, act.was_to(), job)
            _require_end(act, label, ended, job)
            at = amounts.count(job.step() or 0)
        took = amounts.duration(time.monotonic() - started_s)
        self.voice.line(label, f"{amounts.plural(act.ranks, 'rank')}, to step {at}: {act.ending()}  ({took})")

    def _followed(self, job: Job, act: Act, title: str) -> None:
        """Watch a job to its end, which is brought about when it is due; its steps are shown on the way."""
        shown, is_left_alone = 0, act.end == "completed"
        with self.voice.bar(title, STEPS) as advance:
            for at in job.steps(PATIENCE_S):
                advance(at - shown)
                shown = at
                if not is_left_alone and _is_due(act, at, job):
                    is_left_alone = True
                    job.stop(PATIENCE_S) if act.end == "stopped" else job.kill()

    def _started(self, words: Sequence[str], log: Path, run: Path, env: Mapping[str, str] | None = None) -> Job:
        command = [sys.executable, "-m", "unbroken", *words]
        return Job.started(command, env=self.env if env is None else env, log=log, run=run, cwd=self.places.folder)


def _is_due(act: Act, at: int, job: Job) -> bool:
    """Whether a job is to be ended now; who dies while it saves dies by itself, and the machine goes down with it."""
    return job.has_lost_holder() if act.end == "killed-saving" else at >= act.after


def _ended(what: str, was_to: str, job: Job) -> Ended:
    try:
        return job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        told = f"it has not ended after {amounts.duration(PATIENCE_S)}"
        raise DemoFailed(what=what, was_to=was_to, ended=told, log=job.log, said=job.said(_SHOWN_LINES)) from None


def _require_end(act: Act, label: str, ended: Ended, job: Job) -> None:
    """Pass if a job met the end it was to meet; a demo that shows another one shows nothing."""
    wanted = {"killed": "crashed", "stopped": "stopped", "killed-saving": "crashed", "completed": "completed"}[act.end]
    found = ended.outcome.status if ended.outcome is not None else None
    if found != wanted:
        raise _failed(label, act.was_to(), ended, job)


def _failed(what: str, was_to: str, ended: Ended, job: Job) -> DemoFailed:
    status = f" ({ended.outcome.status})" if ended.outcome is not None else ""
    told = f"it ended with exit code {ended.code}{status}"
    return DemoFailed(what=what, was_to=was_to, ended=told, log=job.log, said=job.said(_SHOWN_LINES))


def _torn(places: Places, act: Act) -> Torn:
    """The draft that the job before the last has left, which was killed while it saved."""
    store = Store(Layout(places.chained).checkpoints)
    for draft in scan(store).torn:
        files, size_bytes = draft.weigh(store)
        return Torn(str(draft.name), draft.name.step, files, size_bytes)
    raise _shows_nothing(places, act.was_to(), "no half-written checkpoint was left behind")


def _damaged(places: Places) -> Damage:
    store = Store(Layout(places.chained).checkpoints)
    damage = do_damage(store, "flip", _WHERE, job=len(CHAIN) - 1)
    if damage.name is None:
        raise _shows_nothing(places, "leave a checkpoint that can be damaged", damage.words)
    return damage


def _shows_nothing(places: Places, was_to: str, ended: str) -> DemoFailed:
    number = len(CHAIN) - 1
    return DemoFailed(what=f"job {number}", was_to=was_to, ended=ended, log=places.log(f"job-{number}"))
