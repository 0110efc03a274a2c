"""How a run is saved, kept, resumed and stopped: one frozen record, handed to ``Run``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.store.keep import best_by
from unbroken.store.references import is_bare
from unbroken.store.rewind import without_tag

_SPOT: Final = ("aws", "gcp", "azure", "auto", "off")


@dataclass(frozen=True)
class Settings:
    """Everything about a run that is not state.

    Attributes:
        save_steps: steps between two checkpoints; ``auto`` weighs the measured cost of a save against failures.
        keep_last_k: checkpoints of the newest k steps; None keeps all.
        keep_milestone_every: keep every checkpoint whose step is a multiple of this.
        keep_every_seconds: keep one checkpoint per this many seconds.
        keep_best: keep the best by a metric that was logged for the step it is of, ``loss:min`` or ``accuracy:max``;
            a loop that measures now and then calls ``run.save(by_all=True)`` where it does.
        resume: ``auto`` resumes from the newest usable checkpoint or starts; ``scratch`` starts anew and refuses where
            there are checkpoints; anything else is a checkpoint of this run to go back to: its step, its name,
            ``latest``, or a path such as ``runs/a@1000``. A request is carried out once; the same one in a later job
            continues from the newest checkpoint. ``5#2`` goes back to 5 a second time, on purpose.
        force: with ``scratch``, set the checkpoints that are there aside and start.
        load_path: a checkpoint of another run to start from where this one has none.
        accept: differences that a person accepts by name (an item, a tensor, or all below a name), so that a resume may
            go on without being exact.
        hyperparameters: which values a resume uses where the script constructs optimizers, schedulers or loss scalers
            with others than when the run began: those of the ``checkpoint``, or those of the ``script``. Each
            difference is printed either way.
        audit: what to do about live state that was not handed over: ``warn``, ``error`` or ``off``.
        audit_ignore: names that the audit passes over: variables of the script, or buffers as it names them.
        allow_pickle: items whose values may be stored by pickle.
        max_runtime_s: how long the job may run; else ``SLURM_JOB_END_TIME``, else ``UNBROKEN_MAX_RUNTIME``.
        reserve_s: how long before that to stop; None learns it from measured saves.
        non_finite: what to do when the logged loss is no number: ``stop``, or ``allow``.
        finite: the logged metrics that this is about.
        shared_generators: the global generators are alike on every rank and nothing draws from them, as with
            the lanes of ``unbroken.exact``: a checkpoint keeps one state of them, for any number of ranks.
        log_steps: steps between two reads of logged tensors, each of which waits for the device.
        files_per_rank: parts that each rank writes side by side.
        catch_signals: save and stop on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.
        spot: save and stop when this cloud says that it takes the machine away: ``aws``, ``gcp``, ``azure``; ``auto``
            knows the cloud by the names its firmware gives, ``off`` is none; None leaves it to ``UNBROKEN_SPOT``.
        emergency_dir: a directory on a fast disk of each host; a stop without time for a save dumps there, each rank.
        console: print what happens to stderr, on the first rank, where nobody has set up logging; ``UNBROKEN_QUIET=1``
            in the environment turns it off as well.
        persistent_dir: a directory that every host sees; a dump is copied there, so that another host can resume.
        grace_s: seconds between a signal and the kill; None if nobody knows, then every stop saves.
    """

    save_steps: int | Literal["auto"] | None = "auto"
    keep_last_k: int | None = 3
    keep_milestone_every: int | None = None
    keep_every_seconds: float | None = None
    keep_best: str | None = None
    resume: str = "auto"
    force: bool = False
    load_path: str | None = None
    accept: tuple[str, ...] = ()
    hyperparameters: Literal["checkpoint", "script"] = "checkpoint"
    audit: Literal["warn", "error", "off"] = "warn"
    audit_ignore: tuple[str, ...] = ()
    allow_pickle: tuple[str, ...] = ()
    max_runtime_s: float | None = None
    reserve_s: float | None = None
    non_finite: Literal["stop", "allow"] = "stop"
    finite: tuple[str, ...] = ("loss",)
    shared_generators: bool = False
    log_steps: int = 10
    files_per_rank: int = 1
    catch_signals: bool = True
    spot: Literal["aws", "gcp", "azure", "auto", "off"] | None = None
    emergency_dir: str | None = None
    persistent_dir: str | None = None
    grace_s: float | None = None
    console: bool = True

    def __post_init__(self) -> None:
        """Refuse what could only go wrong hours later."""
        for name in ("save_steps", "keep_last_k", "keep_milestone_every", "log_steps", "files_per_rank"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"Settings.{name} is {value}; it counts from 1")
        if isinstance(self.save_steps, str) and self.save_steps != "auto":
            raise ValueError(f"Settings.save_steps is {self.save_steps!r}, not 'auto', None or a number of steps")
        for name in ("keep_every_seconds", "max_runtime_s", "reserve_s", "grace_s"):
            _require_seconds(name, getattr(self, name), may_be_zero=name in ("reserve_s", "grace_s"))
        if self.persistent_dir is not None and self.emergency_dir is None:
            raise ValueError(
                "Settings.persistent_dir is for copies of what stands in emergency_dir, and that is not set"
            )
        if self.keep_best is not None:
            try:
                best_by(self.keep_best)
            except ValueError as wrong:
                raise ValueError(f"Settings.keep_best: {wrong}") from wrong
        choices = {
            "audit": ("warn", "error", "off"),
            "non_finite": ("stop", "allow"),
            "hyperparameters": ("checkpoint", "script"),
        }
        for name, words in choices.items():
            if getattr(self, name) not in words:
                raise ValueError(f"Settings.{name} is {getattr(self, name)!r}, not one of {', '.join(words)}")
        if self.spot not in (None, *_SPOT):
            raise ValueError(f"Settings.spot is {self.spot!r}, not one of {', '.join(_SPOT)}")
        for name in ("load_path", "emergency_dir", "persistent_dir"):
            self._make_absolute(name)
        # A step may be given as a number.
        object.__setattr__(self, "resume", str(self.resume))
        asked = without_tag(self.resume)
        if asked not in ("auto", "scratch") and not is_bare(asked):
            self._make_absolute("resume")
        for name in ("accept", "allow_pickle", "audit_ignore", "finite"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"Settings.{name} is a tuple of names, not one text")

    def _make_absolute(self, name: str) -> None:
        """Settle now where a relative path leads: the script may change its working directory before it is used."""
        value = getattr(self, name)
        if value is None:
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
    least = "0 or more" if may_be_zero else "more than 0"
    raise ValueError(f"Settings.{name} is {value!r}; it is a number of seconds, {least}")
