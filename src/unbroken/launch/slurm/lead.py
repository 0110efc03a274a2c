"""How long before its end SLURM is to warn a job: learned from what the saves of its run have cost."""

from pathlib import Path
from typing import Final

from unbroken.errors import StorageFailed
from unbroken.launch.slurm.script import whole_lead
from unbroken.run.deadline import learned_reserve
from unbroken.run.journal import read_history
from unbroken.run.layout import Layout

# SLURM looks at its limits every 30 s, so a shorter warning may come when the time is over.
LEAST_S: Final = 60


def lead_s(runs: list[Path], limit_s: float | None) -> int:
    """The longest that any of these runs needs; a run that has not saved yet needs what is usual."""
    return max((_of_run(run, limit_s) for run in runs), default=LEAST_S)


def _of_run(run: Path, limit_s: float | None) -> int:
    try:
        facts = read_history(Layout(run)).facts
    except StorageFailed:
        # Then the usual time is right: the job itself will say what is wrong with its directory.
        facts = ()
    return whole_lead(learned_reserve(facts).seconds(limit_s), LEAST_S)
