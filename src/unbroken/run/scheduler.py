"""Where a scheduler has placed a job: its own number for it, how often it was queued again, which nodes it got.

Read from the environment, written into the journal at a job's start, shown by ``status``. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unbroken import amounts
from unbroken.run.journal import Fact
from unbroken.store.fields import as_whole

SLURM: Final = "slurm"


@dataclass(frozen=True)
class Placement:
    """One start of a job under a scheduler; ``requeues`` counts how often it was queued again before."""

    scheduler: str
    id: str
    requeues: int = 0
    nodes: str | None = None

    def facts(self) -> dict[str, Any]:
        """As the journal keeps it."""
        return {"scheduler": self.scheduler, "id": self.id, "requeues": self.requeues, "nodes": self.nodes}

    def sentence(self) -> str:
        """``4711 on n[1-2], requeued once``."""
        times = {0: "", 1: ", requeued once"}.get(self.requeues, f", requeued {amounts.count(self.requeues)} times")
        return f"{self.id}{f' on {self.nodes}' if self.nodes else ''}{times}"


def placement(environ: Mapping[str, str]) -> Placement | None:
    """Where SLURM has placed this process; None outside of it. A task of an array is called as SLURM does, ``12_3``."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    name = f"{array}_{task}" if array and task else job
    return Placement(SLURM, name, int(restarts) if restarts.isdecimal() else 0, environ.get("SLURM_JOB_NODELIST"))


def placements(facts: Iterable[Fact]) -> tuple[tuple[int, Placement], ...]:
    """The chain: each job of a run that a scheduler started, by its number, and where that was."""
    return tuple(
        (fact.job, found)
        for fact in facts
        if fact.kind == "job-start" and (found := _decoded(fact.values.get("placement"))) is not None
    )


def _decoded(said: object) -> Placement | None:
    if not isinstance(said, Mapping):
        return None
    scheduler, job, nodes = (said.get(name) for name in ("scheduler", "id", "nodes"))
    requeues = as_whole(said.get("requeues"))
    if not isinstance(scheduler, str) or not isinstance(job, str) or requeues is None:
        return None
    return Placement(scheduler, job, requeues, nodes if isinstance(nodes, str) else None)
