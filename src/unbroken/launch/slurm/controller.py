"""Running SLURM's commands with a timeout: sbatch, squeue, scontrol.

An overloaded controller lets ``squeue`` hang for minutes; a command that exceeds its timeout is killed.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from unbroken.errors import SlurmMissing, SlurmRefused

TIMEOUT_S: Final = 20.0
SUBMIT_TIMEOUT_S: Final = 120.0
NO_ANSWER: Final = 124
NOT_FOUND: Final = 127
# Seconds since 1970 if this squeue supports it, so that time zones and daylight saving do not matter.
_EPOCH: Final = {"SLURM_TIME_FORMAT": "%s"}
# What squeue prints for a job without a time limit.
_ENDLESS: Final = frozenset({"NONE", "N/A", "UNLIMITED", "INVALID"})


@dataclass(frozen=True)
class CommandResult:
    """Exit code, standard output and standard error of a command."""

    code: int
    stdout: str
    stderr: str = ""


RunCommand = Callable[[Sequence[str]], CommandResult]


def run_command(command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run a command of SLURM; after ``timeout_s`` it is killed and the exit code is ``NO_ANSWER``."""
    environ = {**os.environ, **_EPOCH}
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return CommandResult(NO_ANSWER, "", f"{command[0]} did not answer within {timeout_s:g} s")
    except OSError as refusal:
        return CommandResult(NOT_FOUND, "", f"{command[0]}: {refusal.strerror or refusal}")
    return CommandResult(ended.returncode, ended.stdout.strip(), ended.stderr.strip())


def run_sbatch(command: Sequence[str]) -> CommandResult:
    """The same for ``sbatch``, which waits longer for a busy controller."""
    return run_command(command, timeout_s=SUBMIT_TIMEOUT_S)


def submitted(command: Sequence[str], run: RunCommand = run_sbatch) -> str:
    """Submit a job with ``sbatch --parsable …``; returns the job id.

    Raises:
        SlurmMissing: sbatch is not installed.
        SlurmRefused: sbatch failed; its message is in the error.
    """
    result = run(command)
    if result.code == NOT_FOUND:
        raise SlurmMissing(command=command[0])
    # With several clusters it is `12;cluster`.
    number = result.stdout.partition(";")[0].strip()
    if result.code != 0 or not number:
        raise SlurmRefused(command=tuple(command), code=result.code, words=result.stderr or result.stdout)
    return number


def end_time(environ: Mapping[str, str], run: RunCommand = run_command) -> float | str | None:
    """The end of this job in seconds since 1970; None for never; a text is an error, then try again later."""
    result = run(["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%e"])
    if result.code != 0:
        return result.stderr or f"squeue exited with {result.code}"
    return parsed_end(result.stdout)


def parsed_end(said: str) -> float | str | None:
    """Parse ``%e`` of squeue: seconds since 1970, or a local time from older versions."""
    lines = said.splitlines()
    word = lines[0].strip() if lines else ""
    if not word:
        return "squeue does not list this job"
    if word.upper() in _ENDLESS:
        return None
    if word.isdecimal():
        return float(word)
    try:
        # Without a zone it is local time, as squeue prints it.
        return datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        return f"squeue prints the end time {word!r}, which cannot be parsed"


def job_state(job: str, run: RunCommand = run_command) -> tuple[str, str]:
    """State and reason of a job, such as ``COMPLETING`` and ``TimeLimit``; empty if unknown."""
    result = run(["squeue", "-h", "-j", job, "-o", "%T %r"])
    lines = result.stdout.splitlines()
    state, _, reason = lines[0].strip().partition(" ") if result.code == 0 and lines else ("", "", "")
    return state, reason


def requeue(job: str, run: RunCommand = run_command) -> str | None:
    """Requeue a running job; None on success, else SLURM's message. SLURM then ends the job itself."""
    result = run(["scontrol", "requeue", job])
    return None if result.code == 0 else result.stderr or result.stdout or f"scontrol exited with {result.code}"
