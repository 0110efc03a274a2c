"""How long before its end SLURM is to warn a job: learned from what the saves of its run have cost."""

from pathlib import Path
from typing import Final

from unbroken import amounts
from unbroken.errors import BadUsage, StorageFailed
from unbroken.launch.slurm.script import whole_lead
from unbroken.run.deadline import learned_reserve
from unbroken.run.journal import read_history
from unbroken.run.layout import Layout

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
        facts = read_history(Layout(run)).facts
    except StorageFailed:
        # Then the usual time is right: the job itself will say what is wrong with its directory.
        facts = ()
    return whole_lead(learned_reserve(facts).seconds(limit_s), LEAST_S)
