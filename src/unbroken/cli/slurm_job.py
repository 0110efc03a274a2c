"""``unbroken slurm job``: the last command of a batch script; runs the step and decides whether to requeue the job."""

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import DiskPath, run_path
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, StorageFailed
from unbroken.launch.slurm.job import JobContext, JobOptions, run_job

PROGRAM: Final = "unbroken slurm job"


@as_command("job", context_settings={"allow_interspersed_args": True})
@click.argument("run", metavar="RUN", callback=run_path)
@click.argument("words", metavar="-- SRUN...", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--script",
    type=DiskPath(),
    metavar="FILE",
    help="Batch script to submit if SLURM does not allow requeue.",
)
@click.option("--link", is_flag=True, help="Exit at once if the run is done, held, or needs attention.")
@click.option("--chained", is_flag=True, help="Do not requeue: the next job of the chain is submitted already.")
@click.option(
    "--in-vain",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Number of earlier jobs in a row that never opened their run.",
)
def command(
    output: Output, run: Path, words: tuple[str, ...], script: Path | None, link: bool, chained: bool, in_vain: int
) -> int:
    """Run one job; called by the batch script.

    Starts the step of a SLURM job, forwards SLURM's signal to RUN, and requeues the job if the run is not done. The
    scripts of `unbroken slurm init` end in this command.
    """
    if not words:
        raise BadUsage(command=PROGRAM, complaint="missing SRUN; it comes last: -- srun unbroken train config.yaml")
    if not os.environ.get("SLURM_JOB_ID"):
        raise BadUsage(command=PROGRAM, complaint="not inside a SLURM job: SLURM_JOB_ID is not set")

    def say(message: str) -> None:
        # The log may be on a full disk; that must not change the decision.
        with contextlib.suppress(StorageFailed, BrokenPipeError):
            output.note(f"{PROGRAM}: {message}")

    context = JobContext(os.environ, time.monotonic, time.sleep, say)
    return run_job(JobOptions(run, words, script, link, chained, in_vain), context)
