"""The command that made a run, told by the run itself: the config of the jobs that computed some of its steps.

A run of ``unbroken train`` keeps the config it was started with; its journal tells what later jobs changed. From both
comes the config that the steps in question were computed with. A run of any other script keeps no such record.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.config import Config, compare, from_json
from unbroken.config.resume import with_values
from unbroken.errors import BadUsage
from unbroken.files import LOCAL
from unbroken.run.journal import History, read_history
from unbroken.run.layout import Layout

PROGRAM: Final = "unbroken replay"
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Elsewhere:
    """What a recomputation has otherwise than the run: its directory, and its data where that was moved."""

    output_dir: Path
    data_path: Path | None = None

    def changes(self) -> dict[str, Any]:
        """The fields of the config that say it."""
        changed: dict[str, Any] = {"training.output_dir": str(self.output_dir), "training.resume": "auto"}
        return changed if self.data_path is None else {**changed, "data.path": str(self.data_path)}


def recorded_config(layout: Layout) -> Config | None:
    """The config that started a run; None if no ``unbroken train`` did.

    Raises:
        RunRecordDamaged: the record is damaged, or was changed after it was written.
        StorageFailed: the system refused.
    """
    if LOCAL.find(layout.config) is None:
        return None
    text = LOCAL.read_bytes(layout.config, limit_bytes=_LIMIT_BYTES).decode("utf-8", "replace")
    return from_json(text, str(layout.config)).config


def config_of_jobs(layout: Layout, started: Config, jobs: Iterable[int]) -> Config:
    """The config that these jobs had in all that bits depend on.

    Raises:
        BadUsage: they did not have the same one, so no single recomputation can follow them.
        StorageFailed: the system refused.
    """
    history = read_history(layout)
    by_job = {job: with_values(started, _changes(history, job)) for job in sorted(set(jobs))}
    if not by_job:
        return started
    (first, config), *others = by_job.items()
    for job, other in others:
        found = compare(config, other)
        if differing := [each.field for each in (*found.fixed, *found.declared)]:
            complaint = (
                f"jobs {first} and {job} of {layout.run} had another {' and another '.join(differing)}; "
                "take A and B where it did not change"
            )
            raise BadUsage(command=PROGRAM, complaint=complaint)
        config = other
    return config


def _changes(history: History, job: int) -> dict[str, Any]:
    """What a job's config had otherwise than the run's record, by field."""
    fact = history.last("config", job=job)
    told = fact.values.get("changes") if fact is not None else None
    if not isinstance(told, dict) or fact is None or fact.values.get("is_replaced"):
        return {}
    return {name: pair[1] for name, pair in told.items() if isinstance(pair, list) and len(pair) == 2}
