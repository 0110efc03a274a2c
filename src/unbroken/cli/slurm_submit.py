"""``unbroken slurm submit`` and ``unbroken slurm chain``: hand a batch script to SLURM, once or as a chain."""

from pathlib import Path

import click

from unbroken.cli.output import Output, as_command
from unbroken.errors.tree import quoted
from unbroken.launch.slurm.submit import Submitted, chain, submit
from unbroken.quoting import amounts

_SCRIPT = click.argument("script", metavar="SCRIPT", type=click.Path(path_type=Path))
_OPTIONS = click.option(
    "--sbatch", "options", multiple=True, metavar="KEY=VALUE", help="One more option of sbatch; repeatable."
)
_AFTER = click.option("--after", metavar="JOB", help="Begin only when this job has ended, however it did.")


@as_command("submit")
@_SCRIPT
@_AFTER
@_OPTIONS
def command(output: Output, script: Path, after: str | None, options: tuple[str, ...]) -> None:
    """Submit it; its jobs queue themselves again.

    Until the run is complete, or a person must look at it. The warning before a job's end comes as early as the run's
    saves so far have taught.
    """
    job = submit(script.absolute(), after=after, options=options)
    output.document("unbroken.slurm-submit/1", {"script": str(script), **_fields(job)}, lambda: _said([job]))


@as_command("chain")
@_SCRIPT
@click.option("--links", type=click.IntRange(1, 1000), required=True, metavar="N", help="How many jobs.")
@_AFTER
@_OPTIONS
def chain_command(output: Output, script: Path, links: int, after: str | None, options: tuple[str, ...]) -> None:
    """Submit several, one after the other, without requeue.

    For sites where no job may be queued again: each job waits for the end of the one before. A link does nothing when
    the run is done, held, or a person must look.
    """
    jobs = chain(script.absolute(), links, after=after, options=options)
    fields = {"script": str(script), "jobs": [_fields(job) for job in jobs]}
    output.document("unbroken.slurm-chain/1", fields, lambda: _said(list(jobs)))


def _fields(job: Submitted) -> dict[str, str | int | None]:
    return {"job": job.job, "lead_s": job.lead_s}


def _said(jobs: list[Submitted]) -> str:
    names = ", ".join(job.job for job in jobs)
    lead = jobs[0].lead_s
    learned = "" if lead is None else f"; SLURM warns the job {amounts.duration(lead)} before its end"
    return f"submitted {'job' if len(jobs) == 1 else 'jobs'} {names}{learned}\nnext: squeue -j {quoted(jobs[0].job)}"
