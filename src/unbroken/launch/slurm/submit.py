"""Submitting a script once, or as a chain of jobs for sites that let no job be queued again."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage, PathMissing, SlurmRefused, StorageFailed
from unbroken.files import LOCAL
from unbroken.launch.slurm.ask import Ask, ask_to_submit, submitted
from unbroken.launch.slurm.script import further_options, learned_runs, time_limit_s, told_lead_s, told_time, whole_lead
from unbroken.quoting import amounts
from unbroken.records.deadline import learned_reserve
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

# ---- how early SLURM warns ----

# SLURM looks at its limits every 30 s, so a shorter warning may come when the time is over.
LEAST_S: Final = 60


def lead_s(runs: list[Path], limit_s: float | None) -> int:
    """The longest that any of these runs needs; a run that has not saved yet needs what is usual."""
    return max((_of_run(run, limit_s) for run in runs), default=LEAST_S)


def require_lead(lead: int, limit_s: float | None, *, command: str) -> None:
    """Pass if a job that is warned so early has done something by then.

    Raises:
        BadUsage: the warning would come with its first step, or before it.
    """
    if limit_s is not None and lead >= limit_s:
        complaint = f"a job of {amounts.duration(limit_s)} cannot be warned {amounts.duration(lead)} before its end"
        raise BadUsage(command=command, complaint=f"{complaint}; give it more --time, or less --lead")


def _of_run(run: Path, limit_s: float | None) -> int:
    try:
        facts = read_history(Layout(run)).events
    except StorageFailed:
        # Then the usual time is right: the job itself will say what is wrong with its directory.
        facts = ()
    return whole_lead(learned_reserve(facts).seconds(limit_s), LEAST_S)


# ---- submitting ----

_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Submitted:
    """A job that SLURM has taken; ``lead_s`` is how long before its end it will be warned, None: as the script says."""

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
    asked: Ask = ask_to_submit,
) -> Submitted:
    """Submit a script; the warning comes as early as the saves of its run have taught by now.

    Args:
        script: the file; it is read here, and by sbatch.
        asked: how sbatch is called.
        after: the job that must have ended before, however it did.
        is_link: the job does nothing if the run needs nobody: it is done, held, or for a person to look at.
        is_chained: the job is not queued again by itself, since another one follows.
        in_vain: how many jobs in a row, up to the one before it, never took their run.
        options: further ``KEY=VALUE`` words for sbatch.

    Raises:
        PathMissing: there is no such script.
        SlurmMissing: there is no sbatch here.
        SlurmRefused: sbatch said no.
        BadUsage: the script is a directory, an option is no option, or the warning would come as the job begins.
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
    told = lead if lead is not None else told_lead_s(text)
    if told is not None:
        require_lead(told, limit_s, command=command_line)
    command = ["sbatch", "--parsable"]
    command += [f"--signal=B:USR1@{lead}"] if lead is not None else []
    command += [f"--dependency=afterany:{after}"] if after else []
    command += ["--no-requeue"] if is_chained else []
    command += [f"--{key}={value}" for key, value in further]
    words = ["--link"] * is_link + ["--chained"] * is_chained
    words += ["--in-vain", str(in_vain)] if in_vain else []
    return Submitted(submitted([*command, str(script), *words], asked), lead)


def _limit_s(further: Mapping[str, str], text: str) -> float | None:
    """How long the job may take, by what sbatch heeds first; None if nobody says so, or not as we can read it."""
    time = further.get("time") or os.environ.get("SBATCH_TIMELIMIT") or told_time(text)
    try:
        return time_limit_s(time) if time else None
    except BadUsage:
        # Judged by sbatch, in its own words.
        return None


def _have_saved(runs: Sequence[Path]) -> bool:
    return any(LOCAL.find(Layout(run).journal) is not None for run in runs)


def chain(
    script: Path, links: int, *, after: str | None = None, options: Sequence[str] = (), asked: Ask = ask_to_submit
) -> tuple[Submitted, ...]:
    """Submit a script so many times, each link waiting for the end of the one before, whatever that was.

    Raises:
        SlurmRefused: a link was refused; those before it stand, and are named.
    """
    jobs: list[Submitted] = []
    for number in range(links):
        last = jobs[-1].job if jobs else after
        try:
            jobs.append(submit(script, after=last, is_link=number > 0, is_chained=True, options=options, asked=asked))
        except SlurmRefused as refusal:
            raise SlurmRefused(
                command=refusal.command,
                code=refusal.code,
                words=refusal.words,
                before=tuple(each.job for each in jobs),
            ) from refusal
    return tuple(jobs)
