"""Asking SLURM's own commands: each in a process that is killed when it does not answer in time.

A controller that is overloaded lets ``squeue`` hang for minutes; nothing here waits longer than it says.
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
# Seconds since 1970 where this squeue can, so that no time zone and no change of clocks comes in between.
_EPOCH: Final = {"SLURM_TIME_FORMAT": "%s"}
# What squeue says of a job without an end.
_ENDLESS: Final = frozenset({"NONE", "N/A", "UNLIMITED", "INVALID"})


@dataclass(frozen=True)
class CommandResult:
    """What a command said: exit code, standard output, standard error."""

    code: int
    said: str
    complaint: str = ""


RunCommand = Callable[[Sequence[str]], CommandResult]


def run_command(command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run one of SLURM's commands; killed after ``timeout_s``, it counts as one that gave no answer."""
    environ = {**os.environ, **_EPOCH}
    try:
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return CommandResult(NO_ANSWER, "", f"{command[0]} gave no answer in {timeout_s:g} s and was ended")
    except OSError as refusal:
        return CommandResult(NOT_FOUND, "", f"{command[0]}: {refusal.strerror or refusal}")
    return CommandResult(ended.returncode, ended.stdout.strip(), ended.stderr.strip())


def run_sbatch(command: Sequence[str]) -> CommandResult:
    """The same for ``sbatch``, which waits for a busy controller."""
    return run_command(command, timeout_s=SUBMIT_TIMEOUT_S)


def submitted(command: Sequence[str], run: RunCommand = run_sbatch) -> str:
    """Submit a job by ``sbatch --parsable …``; returns its number.

    Raises:
        SlurmMissing: there is no sbatch.
        SlurmRefused: sbatch said no; its own words are shown.
    """
    answer = run(command)
    if answer.code == NOT_FOUND:
        raise SlurmMissing(command=command[0])
    # One that is told of a cluster is `12;cluster`.
    number = answer.said.partition(";")[0].strip()
    if answer.code != 0 or not number:
        raise SlurmRefused(command=tuple(command), code=answer.code, words=answer.complaint or answer.said)
    return number


def end_time(environ: Mapping[str, str], run: RunCommand = run_command) -> float | str | None:
    """When SLURM will end this job, in seconds since 1970; None for never; a text is a complaint: ask again later."""
    answer = run(["squeue", "-h", "-j", environ["SLURM_JOB_ID"], "-o", "%e"])
    if answer.code != 0:
        return answer.complaint or f"squeue ended with {answer.code}"
    return parsed_end(answer.said)


def parsed_end(said: str) -> float | str | None:
    """What squeue's ``%e`` means: seconds since 1970, or a local time where it does not give them."""
    lines = said.splitlines()
    word = lines[0].strip() if lines else ""
    if not word:
        return "squeue did not name this job"
    if word.upper() in _ENDLESS:
        return None
    if word.isdecimal():
        return float(word)
    try:
        # Without a zone it is this machine's own time, as squeue prints it.
        return datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        return f"squeue says it ends at {word!r}, which is no time"


def job_state(job: str, run: RunCommand = run_command) -> tuple[str, str]:
    """SLURM's words for how a job stands and why, ``COMPLETING`` and ``TimeLimit``; empty where it did not say."""
    answer = run(["squeue", "-h", "-j", job, "-o", "%T %r"])
    lines = answer.said.splitlines()
    state, _, reason = lines[0].strip().partition(" ") if answer.code == 0 and lines else ("", "", "")
    return state, reason


def requeue(job: str, run: RunCommand = run_command) -> str | None:
    """Queue a running job again; None if SLURM agreed, its words if not. SLURM then ends the job by itself."""
    answer = run(["scontrol", "requeue", job])
    return None if answer.code == 0 else answer.complaint or answer.said or f"scontrol ended with {answer.code}"
