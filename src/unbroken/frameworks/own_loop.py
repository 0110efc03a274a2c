"""A run of a script that has its own loop, and saves by the means of a framework: DCP, DeepSpeed.

It takes the run and chooses the newest usable checkpoint; the script says at every step that it is done, and asks
whether to save and whether to stop. How a checkpoint is written and loaded, the framework's module adds.
"""

import time
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from unbroken.errors import NotAllRanks, StartsOver
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, open_framework_run
from unbroken.frameworks.left_training import what_left
from unbroken.frameworks.options import LoopOptions, settings_of
from unbroken.loop.console import show_lines
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.layout import absolute_run
from unbroken.records.process import before_exit
from unbroken.records.stop import StopReason
from unbroken.store.keep import compose
from unbroken.world import World, is_first_process

_log = logger(__name__)
_NUMBERS: Final = (int, float)
_POLL_S: Final = 0.05
# A script may save once before it trains.
_SAVES_UNASKED: Final = 2


class OwnLoop:
    """A run that this job holds, on one rank, for a loop that the script has written."""

    def __init__(
        self,
        directory: str | PathLike[str],
        options: LoopOptions,
        *,
        resume: str | int | None,
        require: Callable[[Path], None],
        origin: str,
        version: str,
        position: str = "the script has to skip the batches of",
    ) -> None:
        """Take the run and choose its checkpoint.

        Args:
            directory: the run.
            options: how the run is saved, kept and stopped.
            resume: another checkpoint to go back to.
            require: raises if a folder is no checkpoint that can be resumed from.
            origin: the framework, as manifests name it.
            version: the framework and its version, for the records.
            position: what a resumed script has to do about the data; empty if the framework saves the position.
        """
        known = LoopOptions.__optional_keys__
        settings = settings_of(options, known, called="Checkpoints", save_steps=None, keep_last_k=3)
        run_directory = absolute_run(directory)
        # A loop that an exception left still holds its run, in a notebook for example.
        for other in [each for each in _open_loops if each._is_in(run_directory)]:
            other._abandon()
        self._hide_lines = show_lines(is_wanted=settings.console, is_first=is_first_process())
        self._origin = origin
        self._run: FrameworkRun | None = None
        self._stop: StopReason | None = None
        self._metrics: dict[str, float] = {}
        self._metrics_step = -1
        self._is_loaded = False
        self._step = self._saved_step = 0
        self._is_asking, self._saves_unasked = False, 0
        try:
            # Signals are left alone until the loop asks whether to stop: they would not end one that never asks.
            self._run = run = open_framework_run(run_directory, settings, origin=origin, catches_now=False)
            _open_loops.add(self)
            self._point = run.find_resume_point(None if resume is None else str(resume), require)
            self._step = self._saved_step = 0 if self._point.manifest is None else self._point.manifest.step
            run.begin(self._step, self._point, is_comparable=True, origin=version)
        except BaseException as refused:
            self._end(refused)
            raise
        run.recorder.snapshot(step=self._step)
        if self._step and position and run.world.is_first:
            # Not silent: a shuffled loader would begin its epoch again, in another order.
            done = amounts.plural(self._step, "step")
            _log.info("the position in the data is not saved by %s: %s %s", origin, position, done)

    # ---- what the loop asks ----

    @property
    def step(self) -> int:
        """The last step that is done: that of the checkpoint at first; 0 where the run has none."""
        return self._step

    @property
    def path(self) -> Path | None:
        """The checkpoint that this job continues from; None where it starts at step 0."""
        return self._point.path

    @property
    def is_stopping(self) -> bool:
        """Whether the job has to end now: a signal, the walltime, ``unbroken stop``. The same command resumes it."""
        return self._stop is not None

    def _edge(self, step: int, metrics: Mapping[str, object]) -> bool:
        run = self._open_run
        self._require_loaded(step)
        run.catch_signals()
        self._is_asking = True
        self._step = step
        if metrics:
            self._log(step, metrics)
        self._stop = self._stop or run.step_done(step)
        return run.clock.is_due_by_step(step) or run.is_save_due or self._stop is not None

    def _require_loaded(self, step: int) -> None:
        manifest = self._point.manifest
        if step <= self._step or (manifest is not None and not self._is_loaded):
            path = self._point.path
            newest = path.name if path is not None else f"step {self._step:,}"
            raise StartsOver(store=self._open_run.store.root, step=step - 1, newest=newest)

    def _log(self, step: int, metrics: Mapping[str, object]) -> None:
        found: dict[str, float] = {}
        for name, value in metrics.items():
            number = value.item() if isinstance(value, torch.Tensor) else value
            if not isinstance(number, _NUMBERS):
                raise TypeError(f"the metric {name} is a {type(value).__name__}, not a number")
            found[name] = number
        self._metrics, self._metrics_step = found, step
        recorder = self._open_run.recorder
        recorder.metrics(step, found)
        recorder.flush(durable=False)
        if "loss" in found:
            recorder.snapshot(loss=found["loss"], loss_step=step)

    def _folder(self, step: int, metadata: Mapping[str, object]) -> Folder:
        """What is said of a save in its manifest, and what is kept after it."""
        run = self._open_run
        settings = run.settings
        self._saved_step = step
        self._saves_unasked += not self._is_asking
        if not self._is_asking and self._saves_unasked == _SAVES_UNASKED and run.world.is_first:
            _log.warning(
                "saved %d times without step_done: signals end this job at once, and the walltime limit and "
                "`unbroken stop` are not noticed; call step_done(step) after every step and end if is_stopping is true",
                _SAVES_UNASKED,
            )
        policies = compose(
            settings.keep_last_k, settings.keep_milestone_every, settings.keep_every_seconds, settings.keep_best
        )
        # Of this step alone: an earlier value would make a later checkpoint the best.
        metrics = self._metrics if self._metrics_step == step else {}
        return Folder(step, self._origin, metrics, {"world_size": run.world.size, **metadata}, policies)

    # ---- ending ----

    @property
    def _open_run(self) -> FrameworkRun:
        if self._run is None:
            raise RuntimeError("the checkpoints of this run were closed")
        return self._run

    def close(self) -> None:
        """End the job: records its outcome, waits for uploads and releases the run. Wait for async saves before."""
        unsaved = self._step - self._saved_step
        if self._run is not None and self._run.world.is_first and unsaved > 0:
            _log.warning(
                "the last %s (of %s) are in no checkpoint, and the next job computes them again: save after the loop",
                amounts.plural(unsaved, "step"),
                amounts.count(self._step),
            )
        self._end(self._stop or StopReason("done"))

    def _is_in(self, directory: Path) -> bool:
        return self._run is not None and self._run.layout.run == directory

    def _abandon(self) -> None:
        """End a job that nobody has closed."""
        self._end(self._stop or what_left(self._step, also=", or it ended without close()"))

    def _end(self, ending: StopReason | BaseException) -> None:
        run, self._run = self._run, None
        _open_loops.discard(self)
        try:
            if run is not None:
                run.close(ending, step=max(self._step, self._saved_step))
        finally:
            self._hide_lines()

    def __enter__(self) -> Self:
        """The run is held already; its end is the end of the block."""
        _open_loops.discard(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the job, as done, as stopped, or with its error."""
        if error is None:
            self.close()
        elif isinstance(error, SystemExit) and self._stop is not None and self._saved_step == self._step:
            # It saved and ends as it was asked to; the exit code is for whoever starts it again.
            self._end(self._stop)
        else:
            self._end(error)


# Those that no ``with`` block will end.
_open_loops: set[OwnLoop] = set()
before_exit(_open_loops, OwnLoop._abandon)


def meet(world: World, call: str, *, number: int, longest_s: float) -> None:
    """Wait for the other ranks, but not for ever.

    Args:
        world: the ranks.
        call: what all of them call.
        number: the how-manieth such meeting this is, the same on all ranks.
        longest_s: how long to wait.

    Raises:
        NotAllRanks: one did not come.
    """
    if world.link is None:
        return
    key = f"{call}/{number}"
    world.link.post(f"{key}/{world.rank}", "here")
    until = time.monotonic() + longest_s
    waiting = set(range(world.size)) - {world.rank}
    while waiting := {rank for rank in waiting if world.link.posted(f"{key}/{rank}") is None}:
        if time.monotonic() > until:
            raise NotAllRanks(call=call, rank=world.rank, missing=tuple(sorted(waiting)), seconds=longest_s)
        time.sleep(_POLL_S)
