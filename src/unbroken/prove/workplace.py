"""Where a proof is made: a folder with the runs it makes, and how a job of the user's command is started in it."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from unbroken.files import LOCAL
from unbroken.launch import job_files
from unbroken.launch.command import THREADS_VARIABLE
from unbroken.prove.command import Command
from unbroken.prove.watched_job import Ended, Job
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill

# What a launcher above the prover told its own job is not for the jobs below it.
_NOT_PASSED_ON: Final = (job_files.ENVIRONMENT, job_files.LAUNCHER)
LOG_LINES: Final = 12


@dataclass(frozen=True)
class Bench:
    """One proof's folder and command.

    Attributes:
        command: what is proven.
        folder: where every run of the proof is made; nothing is written anywhere else.
        cwd: where the command is started.
        environ: the environment of its jobs, but for the drill.
        limit_s: how long one job may take before it is taken to hang.
    """

    command: Command
    folder: Path
    cwd: Path
    environ: Mapping[str, str]
    limit_s: float

    def run(self, name: str) -> Path:
        """The directory of one run of the proof."""
        return self.folder / name

    def start(self, run: Path, drill: Drill, ranks: int | None) -> Job:
        """Start one job of the command, sent to a run of the proof.

        Raises:
            StorageFailed: the folder could not be written.
            OSError: there is no such program.
        """
        place = self.folder / f"{run.name}.drill.json"
        marks = self.folder / f"{run.name}.struck"
        LOCAL.remove_tree(marks)
        LOCAL.make_directory(marks)
        # Sent there even where a word of the command says so: whatever else the script names, it is a real run.
        write_drill(place, replace(drill, directory=run, marks=marks))
        environ = {**self.environ, ENVIRONMENT: str(place)}
        words = self.command.words_for(run, ranks)
        return Job.started(words, env=environ, log=self.folder / f"{run.name}.log", run=run, cwd=self.cwd)

    def struck(self, run: Path, drill: Drill) -> tuple[Fault, ...]:
        """The faults of a drill that really struck in the last job of a run.

        Raises:
            StorageFailed: the folder could not be read.
        """
        return replace(drill, marks=self.folder / f"{run.name}.struck").struck()

    def wait(self, job: Job) -> Ended | None:
        """How a job ended; None, and it is killed, where it takes longer than a job may."""
        try:
            return job.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
            return None


def environment(before: Mapping[str, str], *, is_resized: bool) -> dict[str, str]:
    """The environment of every job of a proof, the uninterrupted ones too.

    Where the number of ranks changes, each process has one thread: on a CPU the bits depend on how many there are.
    """
    passed = {name: value for name, value in before.items() if name not in _NOT_PASSED_ON}
    return {THREADS_VARIABLE: "1", **passed} if is_resized else passed


@dataclass
class Folder:
    """The folder of a proof; a temporary one goes when all is well."""

    path: Path
    is_kept: bool


@contextlib.contextmanager
def proof_folder(asked: Path | None, seed: int) -> Iterator[Folder]:
    """A folder for one proof: a new one inside the one that was asked for, or a temporary one.

    Raises:
        StorageFailed: the system refused.
    """
    if asked is None:
        folder = Folder(Path(tempfile.mkdtemp(prefix="unbroken-prove-")), is_kept=False)
    else:
        folder = Folder(_free(asked.absolute(), f"prove-{seed}"), is_kept=True)
        LOCAL.make_directory(folder.path)
    try:
        yield folder
    finally:
        if not folder.is_kept:
            LOCAL.remove_tree(folder.path)


def _free(above: Path, name: str) -> Path:
    """A name that nothing has: what an earlier proof left is evidence."""
    names = (name if copy == 1 else f"{name}.{copy}" for copy in range(1, 1 << 20))
    return next(above / each for each in names if not (above / each).exists())
