"""The setup of a proof: its folder of runs, and how a job of the user's command is started in it."""

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from unbroken.files import LOCAL
from unbroken.launch import job_files, start_clock
from unbroken.launch.command import THREADS_VARIABLE
from unbroken.prove.drilled_command import DrilledCommand
from unbroken.prove.job_process import JobEnd, JobProcess
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, write_drill

# Variables from a launcher above the prover must not reach the jobs below it.
_NOT_PASSED_ON: Final = (job_files.ENVIRONMENT, job_files.LAUNCHER, start_clock.LAUNCHED)
LOG_LINES: Final = 12


@dataclass(frozen=True)
class ProofSetup:
    """One proof's folder and command.

    Attributes:
        command: the command to prove.
        folder: the folder of all runs of the proof; nothing is written elsewhere.
        cwd: the working directory of the command.
        environ: the environment of its jobs, without the drill.
        limit_s: a job that takes longer counts as hanging.
    """

    command: DrilledCommand
    folder: Path
    cwd: Path
    environ: Mapping[str, str]
    limit_s: float

    def run(self, name: str) -> Path:
        """The directory of one run of the proof."""
        return self.folder / name

    def start(self, run: Path, drill: Drill, ranks: int | None) -> JobProcess:
        """Start one job of the command, redirected to a run of the proof.

        Raises:
            StorageFailed: the folder could not be written.
            OSError: the program does not exist.
        """
        place = self.folder / f"{run.name}.drill.json"
        marks = self.folder / f"{run.name}.struck"
        LOCAL.remove_tree(marks)
        LOCAL.make_directory(marks)
        # Redirected even if the command contains {run}: any other directory in the script would be a real run.
        write_drill(place, replace(drill, directory=run, marks=marks))
        environ = {**self.environ, ENVIRONMENT: str(place)}
        words = self.command.words_for(run, ranks)
        return JobProcess.started(words, env=environ, log=self.folder / f"{run.name}.log", run=run, cwd=self.cwd)

    def struck(self, run: Path, drill: Drill) -> tuple[Fault, ...]:
        """The faults of a drill that occurred in the last job of a run.

        Raises:
            StorageFailed: the folder could not be read.
        """
        return replace(drill, marks=self.folder / f"{run.name}.struck").struck()

    def wait(self, job: JobProcess) -> JobEnd | None:
        """How a job ended; None if it exceeded the limit and was killed."""
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
class ProofFolder:
    """The folder of a proof; a temporary one is removed if the proof succeeds."""

    path: Path
    is_kept: bool


@contextlib.contextmanager
def proof_folder(asked: Path | None, seed: int) -> Iterator[ProofFolder]:
    """A folder for one proof: a new one inside the given one, or a temporary one.

    Raises:
        StorageFailed: an I/O error.
    """
    if asked is None:
        folder = ProofFolder(Path(tempfile.mkdtemp(prefix="unbroken-prove-")), is_kept=False)
    else:
        folder = ProofFolder(_free(asked.absolute(), f"prove-{seed}"), is_kept=True)
        LOCAL.make_directory(folder.path)
    try:
        yield folder
    finally:
        if not folder.is_kept:
            LOCAL.remove_tree(folder.path)


def _free(above: Path, name: str) -> Path:
    """An unused name: the files of an earlier proof are evidence."""
    names = (name if copy == 1 else f"{name}.{copy}" for copy in range(1, 1 << 20))
    return next(above / each for each in names if not (above / each).exists())
