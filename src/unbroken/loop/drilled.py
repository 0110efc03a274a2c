"""A job under a drill: sent elsewhere, saved at another cadence, struck and stopped where the drill says."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.loop.settings import Settings
from unbroken.quoting.log import logger
from unbroken.run.drill import Drill, read_drill
from unbroken.world import World

_log = logger(__name__)


@dataclass(frozen=True)
class Drilled:
    """The drill that a job follows on one rank, its faults let in."""

    drill: Drill
    strike: Callable[[], None] | None = None

    def applied(self, directory: Path, settings: Settings) -> tuple[Path, Settings]:
        """Where the run really is, and its settings."""
        # What is read at once is kept by a kill: every lost step is compared when it is computed again.
        changed = replace(settings, save_steps=self.drill.save_steps or settings.save_steps, log_steps=1)
        return self.drill.directory or directory, changed

    def is_over_at(self, step: int) -> bool:
        """Let faults strike at a step's edge; whether the drill ends the job there, which each rank knows by itself."""
        if self.strike is not None:
            self.strike()
        return self.drill.stop_at == step


def find_drill(world: World) -> Drilled | None:
    """The drill of this job, let in before anything is opened on the disk; None for a real job. Collective.

    Raises:
        DrillUnreadable: this is to be a drill, and nobody can say which.
    """
    drill = world.all_or_none(lambda: read_drill(os.environ))
    if drill is None:
        return None
    if world.is_first:
        _log.warning("this is a drill, not a real job: %s", drill)
    if not drill.faults:
        return Drilled(drill)
    # By name: nothing here may import what breaks things, and a real job never loads it.
    strike: Callable[[], None] = importlib.import_module("unbroken.prove.inside").install(drill, world.rank)
    return Drilled(drill, strike)
