"""``unbroken slurm``: the group of commands for SLURM, one file per command."""

from typing import Final

from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group

_HEADING: Final = "Commands"
_IN_JOB: Final = "Inside a job"

TABLE: Final = {
    "init": Entry("unbroken.cli.slurm_init:command", "Write a batch script.", _HEADING),
    "submit": Entry("unbroken.cli.slurm_submit:command", "Submit a batch script that requeues itself.", _HEADING),
    "chain": Entry(
        "unbroken.cli.slurm_submit:chain_command", "Submit a chain of jobs, for sites without requeue.", _HEADING
    ),
    "job": Entry("unbroken.cli.slurm_job:command", "Run one job; called by the batch script.", _IN_JOB),
}

command = command_group("slurm", TABLE, "Run as SLURM jobs that requeue themselves.")
