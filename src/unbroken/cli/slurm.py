"""``unbroken slurm``: jobs of SLURM that go on by themselves, one file per command."""

from typing import Final

from unbroken.cli.commands import Entry
from unbroken.cli.group import command_group

_HEADING: Final = "Commands"
_IN_JOB: Final = "Inside a job"

TABLE: Final = {
    "init": Entry("unbroken.cli.slurm_init:command", "Write a batch script for a config or a script.", _HEADING),
    "submit": Entry("unbroken.cli.slurm_submit:command", "Submit it; its jobs queue themselves again.", _HEADING),
    "chain": Entry(
        "unbroken.cli.slurm_submit:chain_command", "Submit several, one after the other, without requeue.", _HEADING
    ),
    "job": Entry("unbroken.cli.slurm_job:command", "What the batch script calls.", _IN_JOB),
}

command = command_group("slurm", TABLE, "Jobs of SLURM that go on by themselves.")
