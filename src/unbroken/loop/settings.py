"""``Settings``: how a run is saved, kept, resumed and stopped. One frozen object, passed to ``Run``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.mirror.address import addresses_in, is_url, parse_address
from unbroken.mirror.transfer import LEAST_MEMORY_BYTES, MEMORY_BYTES
from unbroken.state.planners import DEFAULT, SavePlanner
from unbroken.store.keep import best_by
from unbroken.store.references import is_bare
from unbroken.store.rewind import without_tag
from unbroken.trackers.following import Mode
from unbroken.trackers.named import parse_tracker, trackers_in
from unbroken.trackers.tracker import Tracker

_SPOT: Final = ("aws", "gcp", "azure", "auto", "off")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is saved, kept, resumed and stopped.

    Relative paths are resolved when the object is made. A field that a config file has too has the same name there.

    Attributes:
        save_steps: Steps between two checkpoints. ``auto`` weighs the measured cost of a save against the failure
            rate; None saves only at the end and at a stop.
        files_per_rank: Files that each rank writes in parallel; None: up to 2, by the size of the state.
        staging_memory_bytes: Host memory per rank to make ready for the copies of saves beside the first steps; the
            first save makes what is left. None: what a save needs, at most half of the free memory.
        planner: Which rank writes which replicated tensor: ``BalanceBytes()`` gives all ranks as many bytes,
            ``BalanceTime()`` gives fewer to ranks whose writes were measured to be slower.
        allow_pickle: Items whose values may be stored with pickle.

        keep_last_k: Newest steps whose checkpoints are kept; None keeps all.
        keep_milestone_every: Keep every checkpoint whose step is a multiple of this.
        keep_every_seconds: Keep one checkpoint per this many seconds.
        keep_best: Keep the best checkpoint by a logged metric: ``loss:min``, ``accuracy:max``. The metric must be
            logged for the step that is saved; a loop that evaluates now and then calls ``run.save(by_all=True)``
            after it has logged.

        resume: ``auto`` resumes from the newest usable checkpoint, or starts where there is none. ``scratch`` starts
            from step 0 and raises if the run has checkpoints. Anything else names a checkpoint of this run to go back
            to: its step, its name, ``latest``, or a path such as ``runs/a@1000``. That happens once: a later job with
            the same value continues from the newest checkpoint. ``5#2`` goes back to step 5 a second time.
        force: With ``resume="scratch"``: abandon the existing checkpoints and start.
        load_path: Checkpoint of another run to start from, here or in a mirror, or of another tool; ignored once this
            run has its own.
        accept: Names of differences to accept (an item, a tensor, or a prefix of names), so that a resume continues
            although it is not exact.
        hyperparameters: Which values a resume uses if the script constructs optimizers, schedulers or loss scalers
            with other values than those saved: those of the ``checkpoint`` or those of the ``script``. Every
            difference is printed.

        checkpoints: Save straight to an object store, ``s3://BUCKET/PREFIX`` and the like, and resume from there. The
            run directory then holds only small records; it may be another one for each rank, and may be empty when the
            run is resumed. None: checkpoints are saved in the run directory.
        mirror: Second stores, to which every checkpoint is copied and verified beside training: ``s3://BUCKET/PREFIX``,
            ``gs://…``, ``az://CONTAINER/PREFIX`` or ``file:///DIRECTORY``; several are separated by commas. A run whose
            local checkpoints are missing or damaged resumes from there. What is not mirrored yet is never deleted.
        mirror_memory_bytes: Bytes that uploads may hold in memory; of each rank, if it saves straight to a store.
        mirror_bytes_per_second: Bandwidth of uploads to each mirror; None: as fast as possible.
        mirror_wait_seconds: How long a job that ends waits for uploads. What is left then, the next job uploads.

        audit: What to do about live state that was not passed to ``Run``: ``warn``, ``error`` or ``off``.
        audit_ignore: Names that the audit ignores: variables of the script, or buffers as the audit prints them.
        shared_rng: The global RNG states are equal on all ranks and nothing draws from them, as with the lanes of
            ``unbroken.exact``. A checkpoint then stores one state, for any number of ranks.

        max_runtime_seconds: Walltime of one job; None: ``SLURM_JOB_END_TIME``, else ``UNBROKEN_MAX_RUNTIME``.
        walltime_reserve_seconds: Stop this many seconds before the walltime ends; None: learned from measured saves.
        catch_signals: Save and stop on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.
        spot: Save and stop when this cloud reclaims the machine: ``aws``, ``gcp`` or ``azure``. ``auto`` detects the
            cloud from the firmware, ``off`` is none, None reads ``UNBROKEN_SPOT``.
        grace_seconds: Seconds between a signal and the kill. If they are too few for a save, each rank writes a dump
            to ``emergency_dir``. None: every stop saves.
        emergency_dir: Directory on a fast local disk of each host, for the dump that each rank writes when there is no
            time for a save.
        persistent_dir: Directory that all hosts share. Dumps are copied there, so that another host can resume.

        trackers: Where the metrics are shown, too: ``wandb``, ``trackio``, ``tensorboard``, ``mlflow``, each with or
            without ``:PROJECT``; one text separated by commas, or a tuple of names and of your own ``Tracker`` objects.
            One run there over all jobs; a tracker that fails never stops the training.
        tracker_mode: ``live`` sends steps as they are logged; a step that is computed again after a kill is not sent
            twice. ``committed`` sends them when a checkpoint commits them: no step is shown that is computed again.
        tracker_run_name: What the trackers call the run; None: the name of its directory.
        tracker_config: Values that the trackers show beside the run; names that look like secrets are left out.

        non_finite: What to do when a metric is NaN or infinite: ``stop`` or ``allow``.
        non_finite_metrics: Logged metrics that are checked.
        logging_steps: Steps between two reads of logged tensors. Each read waits for the device.
        console: Print progress to stderr on rank 0 if the script has not set up logging. ``UNBROKEN_QUIET=1`` turns it
            off as well.
    """

    save_steps: int | Literal["auto"] | None = "auto"
    files_per_rank: int | None = None
    staging_memory_bytes: int | None = None
    planner: SavePlanner = DEFAULT
    allow_pickle: tuple[str, ...] = ()

    keep_last_k: int | None = 3
    keep_milestone_every: int | None = None
    keep_every_seconds: float | None = None
    keep_best: str | None = None

    resume: str = "auto"
    force: bool = False
    load_path: str | None = None
    accept: tuple[str, ...] = ()
    hyperparameters: Literal["checkpoint", "script"] = "checkpoint"

    checkpoints: str | None = None
    mirror: str | None = None
    mirror_memory_bytes: int = MEMORY_BYTES
    mirror_bytes_per_second: float | None = None
    mirror_wait_seconds: float = 300.0

    audit: Literal["warn", "error", "off"] = "warn"
    audit_ignore: tuple[str, ...] = ()
    shared_rng: bool = False

    max_runtime_seconds: float | None = None
    walltime_reserve_seconds: float | None = None
    catch_signals: bool = True
    spot: Literal["aws", "gcp", "azure", "auto", "off"] | None = None
    grace_seconds: float | None = None
    emergency_dir: str | None = None
    persistent_dir: str | None = None

    trackers: str | tuple[str | Tracker, ...] = ()
    tracker_mode: Mode = "live"
    tracker_run_name: str | None = None
    tracker_config: Mapping[str, object] | None = None

    non_finite: Literal["stop", "allow"] = "stop"
    non_finite_metrics: tuple[str, ...] = ("loss",)
    logging_steps: int = 10
    console: bool = True

    def __post_init__(self) -> None:
        """Reject values that would fail only hours later."""
        for name in ("save_steps", "keep_last_k", "keep_milestone_every", "logging_steps", "files_per_rank"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"Settings.{name} is {value}; it must be at least 1")
        if self.staging_memory_bytes is not None and self.staging_memory_bytes < 0:
            raise ValueError(f"Settings.staging_memory_bytes is {self.staging_memory_bytes}; it must be at least 0")
        if isinstance(self.save_steps, str) and self.save_steps != "auto":
            raise ValueError(f"Settings.save_steps is {self.save_steps!r}, not 'auto', None or a number of steps")
        for name in ("keep_every_seconds", "max_runtime_seconds", "walltime_reserve_seconds", "grace_seconds"):
            _require_seconds(
                name, getattr(self, name), may_be_zero=name in ("walltime_reserve_seconds", "grace_seconds")
            )
        if self.persistent_dir is not None and self.emergency_dir is None:
            raise ValueError("Settings.persistent_dir is set and emergency_dir is not: there is nothing to copy")
        if self.keep_best is not None:
            try:
                best_by(self.keep_best)
            except ValueError as wrong:
                raise ValueError(f"Settings.keep_best: {wrong}") from wrong
        choices = {
            "audit": ("warn", "error", "off"),
            "non_finite": ("stop", "allow"),
            "hyperparameters": ("checkpoint", "script"),
            "tracker_mode": ("live", "committed"),
        }
        for name, words in choices.items():
            if getattr(self, name) not in words:
                raise ValueError(f"Settings.{name} is {getattr(self, name)!r}, not one of {', '.join(words)}")
        if not isinstance(self.planner, SavePlanner):
            raise ValueError(f"Settings.planner is a {type(self.planner).__name__}, which has no writers() and learn()")
        if self.spot not in (None, *_SPOT):
            raise ValueError(f"Settings.spot is {self.spot!r}, not one of {', '.join(_SPOT)}")
        self._require_mirrors()
        self._require_trackers()
        for name in ("load_path", "emergency_dir", "persistent_dir"):
            self._make_absolute(name)
        # A step may be given as a number.
        object.__setattr__(self, "resume", str(self.resume))
        asked = without_tag(self.resume)
        if asked not in ("auto", "scratch") and not is_bare(asked):
            self._make_absolute("resume")
        for name in ("accept", "allow_pickle", "audit_ignore", "non_finite_metrics"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"Settings.{name} must be a tuple of names, not a string")

    @property
    def mirrors(self) -> tuple[str, ...]:
        """The addresses in ``mirror``."""
        return tuple(str(parse_address(each)) for each in addresses_in(self.mirror or ""))

    def _require_mirrors(self) -> None:
        _ = self.mirrors
        if self.checkpoints is not None:
            object.__setattr__(self, "checkpoints", str(parse_address(self.checkpoints)))
            for name in ("mirror", "emergency_dir"):
                if getattr(self, name) is not None:
                    raise ValueError(f"Settings.checkpoints and {name} are both set: {name} is for local checkpoints")
        _require_seconds("mirror_wait_seconds", self.mirror_wait_seconds, may_be_zero=True)
        if self.mirror_memory_bytes < LEAST_MEMORY_BYTES:
            raise ValueError(
                f"Settings.mirror_memory_bytes is {self.mirror_memory_bytes}; it must be at least {LEAST_MEMORY_BYTES}"
            )
        if self.mirror_bytes_per_second is not None and not self.mirror_bytes_per_second > 0:
            raise ValueError(f"Settings.mirror_bytes_per_second is {self.mirror_bytes_per_second}; it must be above 0")

    def _require_trackers(self) -> None:
        given = trackers_in(self.trackers) if isinstance(self.trackers, str) else self.trackers
        for each in given:
            if isinstance(each, str):
                try:
                    parse_tracker(each)
                except ValueError as wrong:
                    raise ValueError(f"Settings.trackers: {wrong}") from wrong
            elif not isinstance(each, Tracker):
                raise ValueError(
                    f"Settings.trackers has a {type(each).__name__}, which is neither a name nor a Tracker"
                )
        names = [str(parse_tracker(each)) if isinstance(each, str) else each.name for each in given]
        if len(set(names)) < len(names):
            raise ValueError(f"Settings.trackers names one twice: {', '.join(names)}")
        object.__setattr__(self, "trackers", tuple(given))

    def _make_absolute(self, name: str) -> None:
        """Resolve a relative path now: the script may change its working directory before it is used."""
        value = getattr(self, name)
        if value is None or is_url(value):
            return
        if not value:
            raise ValueError(f"Settings.{name} is an empty path")
        object.__setattr__(self, name, str(Path(value).absolute()))


def _require_seconds(name: str, value: object, *, may_be_zero: bool) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > 0 or (may_be_zero and value == 0)):  # type: ignore[operator]
        return
    least = "at least 0" if may_be_zero else "above 0"
    raise ValueError(f"Settings.{name} is {value!r}; it must be a number of seconds {least}")
