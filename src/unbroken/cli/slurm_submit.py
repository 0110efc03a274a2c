"""``unbroken slurm submit`` and ``unbroken slurm chain``: submit a batch script once, or as a chain of jobs."""

from pathlib import Path

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Output, as_command
from unbroken.errors.tree import quoted
from unbroken.launch.slurm.submit import Submitted, chain, submit
from unbroken.quoting import amounts

_SCRIPT = click.argument("script", metavar="SCRIPT", type=DiskPath())
_OPTIONS = click.option(
    "--sbatch", "options", multiple=True, metavar="KEY=VALUE", help="More options for sbatch; repeatable."
)
_AFTER = click.option("--after", metavar="JOB", help="Start after this job has ended, whatever its result.")


@as_command("submit", examples=(("unbroken slurm submit a.sbatch", "one job that requeues itself"),))
@_SCRIPT
@_AFTER
@_OPTIONS
def command(output: Output, script: Path, after: str | None, options: tuple[str, ...]) -> None:
    """Submit a batch script that requeues itself.

    SCRIPT is a file of `unbroken slurm init`. The job is requeued until the run is done or needs your attention. How
    long before the walltime limit it saves follows from the saves of the run so far.
    """
    job = submit(script.absolute(), after=after, options=options)
    output.document("unbroken.slurm-submit/1", {"script": str(script), **_fields(job)}, lambda: _text([job]))


@as_command("chain", examples=(("unbroken slurm chain a.sbatch --links 5", "5 jobs, one after the other"),))
@_SCRIPT
@click.option("--links", type=click.IntRange(1, 1000), required=True, metavar="N", help="Number of jobs.")
@_AFTER
@_OPTIONS
def chain_command(output: Output, script: Path, links: int, after: str | None, options: tuple[str, ...]) -> None:
    """Submit a chain of jobs, for sites without requeue.

    Each job starts after the one before it has ended. A job exits at once if the run is done, held, or needs your
    attention.
    """
    jobs = chain(script.absolute(), links, after=after, options=options)
    fields = {"script": str(script), "jobs": [_fields(job) for job in jobs]}
    output.document("unbroken.slurm-chain/1", fields, lambda: _text(list(jobs)))


def _fields(job: Submitted) -> dict[str, str | int | None]:
    return {"job": job.job, "lead_s": job.lead_s}


def _text(jobs: list[Submitted]) -> str:
    names = ", ".join(job.job for job in jobs)
    lead = jobs[0].lead_s
    learned = "" if lead is None else f"; it saves {amounts.duration(lead)} before its walltime limit"
    return f"submitted {'job' if len(jobs) == 1 else 'jobs'} {names}{learned}\nnext: squeue -j {quoted(jobs[0].job)}"
