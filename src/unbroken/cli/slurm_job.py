"""``unbroken slurm job``: what a batch script becomes: the step's parent, which decides whether it is queued again."""

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import click

from unbroken.cli.arguments import run_path
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage, StorageFailed
from unbroken.launch.slurm.job import JobContext, JobOptions, run_job

PROGRAM: Final = "unbroken slurm job"


@as_command("job", context_settings={"allow_interspersed_args": True})
@click.argument("run", metavar="RUN", callback=run_path)
@click.argument("words", metavar="-- SRUN...", nargs=-1, type=click.UNPROCESSED)
@click.option("--script", type=click.Path(path_type=Path), metavar="FILE", help="What a follower is submitted from.")
@click.option("--link", is_flag=True, help="Start nothing if the run is done, held, or for a person to look at.")
@click.option("--chained", is_flag=True, help="Queue nothing again: another job of the chain follows.")
@click.option("--in-vain", type=click.IntRange(0), default=0, metavar="N", help="Jobs before it never took their run.")
def command(
    output: Output, run: Path, words: tuple[str, ...], script: Path | None, link: bool, chained: bool, in_vain: int
) -> int:
    """What the batch script calls.

    It starts the step of a SLURM job, passes SLURM's warning on to RUN, and queues the job again if RUN is to go on.
    `unbroken slurm init` writes a script that ends in it.
    """
    if not words:
        raise BadUsage(
            command=PROGRAM, complaint="the step is missing; it stands last: -- srun unbroken train run.yaml"
        )
    if not os.environ.get("SLURM_JOB_ID"):
        raise BadUsage(command=PROGRAM, complaint="this is no job of SLURM: SLURM_JOB_ID is not set")

    def say(message: str) -> None:
        # The log may be on a full disk; the decision stands all the same.
        with contextlib.suppress(StorageFailed, BrokenPipeError):
            output.note(f"{PROGRAM}: {message}")

    context = JobContext(os.environ, time.monotonic, time.sleep, say)
    return run_job(JobOptions(run, words, script, link, chained, in_vain), context)
