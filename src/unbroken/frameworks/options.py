"""The options of a run whose loop belongs to a framework, the same for all of them.

``RunOptions`` leave out what a framework decides itself: how often it saves, and how many checkpoints it keeps. Loops
without a framework that decides this have ``LoopOptions``.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict

from unbroken.loop.settings import Settings
from unbroken.trackers.following import Mode
from unbroken.trackers.tracker import Tracker

__all__ = ["LoopOptions", "RunOptions"]


class RunOptions(TypedDict, total=False):
    """How a run is mirrored, stopped and shown; each option means what ``unbroken.Settings`` says of it.

    Attributes:
        mirror: Second stores, to which every checkpoint is copied beside training.
        mirror_memory_bytes: Bytes that uploads may hold in memory.
        mirror_bytes_per_second: Bandwidth of uploads to each mirror; None: as fast as possible.
        mirror_wait_seconds: How long a job that ends waits for uploads.
        max_runtime_seconds: Walltime of one job; None: ``SLURM_JOB_END_TIME``, else ``UNBROKEN_MAX_RUNTIME``.
        walltime_reserve_seconds: Stop this many seconds before the walltime ends; None: learned from measured saves.
        catch_signals: Save and stop on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.
        spot: Save and stop when this cloud reclaims the machine.
        accept: Names of differences to accept, so that a resume continues although it is not exact.
        trackers: Where the logged metrics are shown: ``wandb``, ``trackio``, ``tensorboard``, ``mlflow``. Turn those of
            the framework off (``report_to``, ``logger``, ``log_with``): they show the steps that a kill lost twice.
        tracker_mode: ``live`` sends steps as they are logged, ``committed`` when a checkpoint commits them.
        tracker_run_name: What the trackers call the run; None: the name of its directory.
        tracker_config: Values that the trackers show beside the run; names that look like secrets are left out.
        console: Print progress to stderr on rank 0 if the script has not set up logging.
    """

    mirror: str | None
    mirror_memory_bytes: int
    mirror_bytes_per_second: float | None
    mirror_wait_seconds: float
    max_runtime_seconds: float | None
    walltime_reserve_seconds: float | None
    catch_signals: bool
    spot: Literal["aws", "gcp", "azure", "auto", "off"] | None
    accept: tuple[str, ...]
    trackers: str | tuple[str | Tracker, ...]
    tracker_mode: Mode
    tracker_run_name: str | None
    tracker_config: Mapping[str, object] | None
    console: bool


class LoopOptions(RunOptions, total=False):
    """``RunOptions``, and how a loop that the script has written is saved and kept.

    Attributes:
        save_steps: Steps between two checkpoints; ``auto`` by the measured cost of a save, None only when the script
            or a stop asks for it. Default: ``auto`` with Accelerate, else None.
        keep_last_k: Newest steps whose checkpoints are kept; None keeps all. Default: 3, with Accelerate the
            ``total_limit`` of its ``ProjectConfiguration``.
        keep_milestone_every: Keep every checkpoint whose step is a multiple of this.
        keep_every_seconds: Keep one checkpoint per this many seconds.
        keep_best: Keep the best checkpoint by a logged metric: ``loss:min``.
    """

    save_steps: int | Literal["auto"] | None
    keep_last_k: int | None
    keep_milestone_every: int | None
    keep_every_seconds: float | None
    keep_best: str | None


def settings_of(options: Mapping[str, Any], known: Collection[str], *, called: str, **default: object) -> Settings:
    """The settings of a run with these options.

    Args:
        options: what the script has given.
        known: the names of all there are.
        called: what takes the options, for the error.
        default: values of options that were not given, where they are not those of ``Settings``.

    Raises:
        TypeError: there is no such option.
        ValueError: an option is wrong.
    """
    if unknown := options.keys() - known:
        raise TypeError(f"{called} has no option {', '.join(sorted(unknown))}")
    return Settings(**{**default, **options})
