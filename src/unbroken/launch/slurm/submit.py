"""Submitting a batch script once, or as a chain of jobs for sites without requeue."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage, PathMissing, SlurmRefused, StorageFailed
from unbroken.files import LOCAL
from unbroken.launch.slurm.controller import RunCommand, run_sbatch, submitted
from unbroken.launch.slurm.script import (
    further_options,
    learned_runs,
    script_lead_s,
    script_time,
    time_limit_s,
    whole_lead,
)
from unbroken.quoting import amounts
from unbroken.records.deadline import learned_reserve
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

# ---- lead time: how long before the limit SLURM signals the job ----

# SLURM checks limits every 30 s, so a shorter lead time may be too late.
LEAST_S: Final = 60


def lead_s(runs: list[Path], limit_s: float | None) -> int:
    """The longest lead time of these runs; a default for a run that has not saved yet."""
    return max((_of_run(run, limit_s) for run in runs), default=LEAST_S)


def require_lead(lead: int, limit_s: float | None, *, command: str) -> None:
    """Pass if the job has time to train before the signal.

    Raises:
        BadUsage: the lead time is at least the time limit.
    """
    if limit_s is not None and lead >= limit_s:
        complaint = (
            f"a job of {amounts.duration(limit_s)} cannot save {amounts.duration(lead)} before its walltime limit"
        )
        raise BadUsage(command=command, complaint=f"{complaint}; increase --time or reduce --walltime-reserve")


def _of_run(run: Path, limit_s: float | None) -> int:
    try:
        events = read_history(Layout(run)).events
    except StorageFailed:
        # Use the default: the job itself reports what is wrong with its directory.
        events = ()
    return whole_lead(learned_reserve(events).seconds(limit_s), LEAST_S)


# ---- submitting ----

_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Submitted:
    """A submitted job; ``lead_s`` is its lead time, None for that of the script."""

    job: str
    lead_s: int | None


def submit(
    script: Path,
    *,
    after: str | None = None,
    is_link: bool = False,
    is_chained: bool = False,
    in_vain: int = 0,
    options: Sequence[str] = (),
    run: RunCommand = run_sbatch,
) -> Submitted:
    """Submit a script, with the lead time learned from the saves of its run so far.

    Args:
        script: the file, read here and by sbatch.
        run: runs sbatch.
        after: the job that must have ended before, whatever its result.
        is_link: the job exits at once if the run is done, held, or needs attention.
        is_chained: the job does not requeue itself, since another one follows.
        in_vain: the number of earlier jobs in a row that never opened their run.
        options: more ``KEY=VALUE`` options for sbatch.

    Raises:
        PathMissing: the script does not exist.
        SlurmMissing: sbatch is not installed.
        SlurmRefused: sbatch failed.
        BadUsage: the script is a directory, an option is invalid, or the lead time exceeds the time limit.
    """
    if LOCAL.find(script) is None:
        raise PathMissing(path=script, purpose="script")
    command_line = f"unbroken slurm {'chain' if is_chained else 'submit'}"
    if script.is_dir():
        raise BadUsage(command=command_line, complaint=f"SCRIPT is a directory, not a batch script: {script}")
    text = LOCAL.read_bytes(script, limit_bytes=_LIMIT_BYTES).decode("utf-8", "replace")
    runs = learned_runs(text)
    further = further_options(options)
    limit_s = _limit_s(dict(further), text)
    lead = lead_s(runs, limit_s) if _have_saved(runs) else None
    lead_given = lead if lead is not None else script_lead_s(text)
    if lead_given is not None:
        require_lead(lead_given, limit_s, command=command_line)
    command = ["sbatch", "--parsable"]
    command += [f"--signal=B:USR1@{lead}"] if lead is not None else []
    command += [f"--dependency=afterany:{after}"] if after else []
    command += ["--no-requeue"] if is_chained else []
    command += [f"--{key}={value}" for key, value in further]
    words = ["--link"] * is_link + ["--chained"] * is_chained
    words += ["--in-vain", str(in_vain)] if in_vain else []
    return Submitted(submitted([*command, str(script), *words], run), lead)


def _limit_s(further: Mapping[str, str], text: str) -> float | None:
    """The time limit, in sbatch's order of precedence; None if there is none or it cannot be parsed."""
    time = further.get("time") or os.environ.get("SBATCH_TIMELIMIT") or script_time(text)
    try:
        return time_limit_s(time) if time else None
    except BadUsage:
        # sbatch will report it.
        return None


def _have_saved(runs: Sequence[Path]) -> bool:
    return any(LOCAL.find(Layout(run).journal) is not None for run in runs)


def chain(
    script: Path, links: int, *, after: str | None = None, options: Sequence[str] = (), run: RunCommand = run_sbatch
) -> tuple[Submitted, ...]:
    """Submit a script ``links`` times, each job waiting for the end of the one before, whatever its result.

    Raises:
        SlurmRefused: a submission failed; lists the jobs submitted before.
    """
    jobs: list[Submitted] = []
    for number in range(links):
        last = jobs[-1].job if jobs else after
        try:
            jobs.append(submit(script, after=last, is_link=number > 0, is_chained=True, options=options, run=run))
        except SlurmRefused as refusal:
            raise SlurmRefused(
                command=refusal.command,
                code=refusal.code,
                words=refusal.words,
                before=tuple(each.job for each in jobs),
            ) from refusal
    return tuple(jobs)
