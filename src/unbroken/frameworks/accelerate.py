"""A training loop with Accelerate as a run: one line before the loop, and the loops taken from the run.

    with unbroken_acc.attach(accelerator, "runs/a", save_steps=100) as run:
        for epoch in run.epochs(3):
            for batch in run.batches(loader):
                ...

Call ``attach`` after ``accelerator.prepare``. It takes the run, chooses the newest usable checkpoint and lets
``accelerator.load_state`` load it. ``batches`` continues inside the epoch. At the end of each step, when all gradients
are used, it answers stop requests and saves: ``accelerator.save_state`` writes into a draft, which becomes
``checkpoint-N`` by one rename. This module restores what Accelerate does not: the RNG states that a pass began with,
the generators of samplers, and the epochs that loaders count.
"""

import os
import sys
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Unpack

from accelerate import Accelerator  # type: ignore[import-untyped]

from unbroken.frameworks.accelerate_job import ORIGIN, AccelerateJob
from unbroken.frameworks.framework_run import open_framework_run
from unbroken.frameworks.left_training import what_left
from unbroken.frameworks.loader_pass import batch_count
from unbroken.frameworks.options import LoopOptions, settings_of
from unbroken.loop.console import show_lines
from unbroken.loop.raising import is_raising
from unbroken.loop.settings import Settings
from unbroken.records.layout import absolute_run
from unbroken.records.process import before_exit
from unbroken.records.stop import StopReason
from unbroken.state.audit import calling_frame
from unbroken.world import is_first_process

__all__ = ["AcceleratorRun", "Options", "attach"]


class Options(LoopOptions, total=False):
    """``LoopOptions``, and what the run reads from the script.

    Attributes:
        audit: What to do about live state that Accelerate does not save: ``warn``, ``error`` or ``off``.
        audit_ignore: Names of variables that the audit ignores.
        logging_steps: Steps between two reads of logged tensors.
    """

    audit: Literal["warn", "error", "off"]
    audit_ignore: tuple[str, ...]
    logging_steps: int


def attach(
    accelerator: Accelerator,
    directory: str | os.PathLike[str] | None = None,
    *,
    resume: str | os.PathLike[str] | int | None = None,
    reread: bool | None = None,
    **options: Unpack[Options],
) -> "AcceleratorRun":
    """Take a run and resume it, after ``accelerator.prepare`` and ``register_for_checkpointing``. Collective.

    Args:
        accelerator: what was prepared with it and registered with it is saved and restored.
        directory: the run's directory; None: ``accelerator.project_dir``.
        resume: another checkpoint to go back to: its step, its name, or the path of a folder. This happens once: a
            later job with the same value continues from the newest checkpoint.
        reread: read the batches of an interrupted epoch again instead of skipping them by index. None: do so if loader
            workers or generators of the data set may draw random numbers for them.
        options: how the run is saved, kept and stopped: ``Options``.

    Raises:
        ValueError: nothing was prepared, there is no directory, or an option is wrong.
        TypeError: there is no such option.
        WeightsOnly: the folder holds weights, and not what a resume needs.
        NotExact: the accelerator differs from that of the checkpoint in what the bits depend on.
        UnsavedState: there is state that Accelerate does not save, and ``audit`` is ``error``.
        RunHeld: another job trains into this directory.
        NoUsableCheckpoint: there are checkpoints, and none can be used.
        UnbrokenError: storage or a mirror refused.
    """
    limit = accelerator.project_configuration.total_limit
    settings = settings_of(options, Options.__optional_keys__, called="attach", keep_last_k=limit)
    home = directory if directory is not None else accelerator.project_dir
    if home is None:
        raise ValueError("attach needs the directory of the run: attach(accelerator, DIRECTORY)")
    asked = None if resume is None else str(resume)
    return AcceleratorRun(accelerator, absolute_run(home), settings, asked, calling_frame(1), reread=reread)


class _Stopped(BaseException):
    """Leaves the ``with`` block of a run that was stopped, past whatever follows the inner loop."""


class AcceleratorRun:
    """A run whose loop uses Accelerate. Made by ``attach``.

    As a context it leaves its block after a stop; used without ``with`` its loops end, and ``is_stopped`` says why.
    """

    _job: AccelerateJob

    def __init__(
        self,
        accelerator: Accelerator,
        directory: Path,
        settings: Settings,
        asked: str | None,
        frame: FrameType | None,
        *,
        reread: bool | None,
    ) -> None:
        # A loop that an exception left still holds its run, in a notebook for example.
        for other in [each for each in _open_runs if each._job.run.layout.run == directory]:
            other._abandon()
        self._hide_lines = show_lines(is_wanted=settings.console, is_first=is_first_process())
        self._ending: StopReason | None = None
        self._is_context = self._is_in_epochs = False
        # Weak: a loop that is left by `break` must end the pass at once.
        self._pass: weakref.ref[Generator[Any, None, None]] | None = None
        try:
            run = open_framework_run(directory, settings, origin=ORIGIN)
        except BaseException:
            self._hide_lines()
            raise
        self._job = AccelerateJob(run, accelerator, reread=reread)
        _open_runs.add(self)
        try:
            self._job.resume(asked, frame)
        except BaseException as refused:
            self._leave(refused)
            raise

    # ---- what the loop uses ----

    @property
    def step(self) -> int:
        """How many steps are complete: updates of the optimizer, also those that a loss scaler skipped."""
        return self._job.place.step

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, from 0."""
        return self._job.place.epoch

    @property
    def batch(self) -> int:
        """How many batches of this pass the loop was given, also by earlier jobs."""
        return self._job.place.batches

    @property
    def is_stopped(self) -> bool:
        """Whether the training ended before its target; the same command resumes it."""
        return self._ending is not None and self._ending.kind != "done"

    def log(self, **metrics: object) -> None:
        """Record metrics of the step that is being computed; tensors are read later, all at once.

        Raises:
            TypeError: a value is neither a number nor a tensor of one element.
        """
        self._job.logged.log(metrics)

    def save(self) -> None:
        """Save at the edge of this step, or of this epoch after its batches; several ranks save one step later.

        A step that is saved already is not saved again.
        """
        self._job.run.wants_save = True

    def stop(self, reason: str = "") -> None:
        """Stop at the edge of this step, for another job to resume; several ranks stop one step later."""
        self._job.run.stops.ask(reason)

    def epochs(self, total: int, *, max_steps: int | None = None) -> Iterator[int]:
        """Iterate over the epochs that are left, from the one that the checkpoint was saved in.

        Args:
            total: how many epochs the training has.
            max_steps: the training is over after so many steps, also inside an epoch.
        """
        if self._is_in_epochs or self._ending is not None:
            raise RuntimeError("run.epochs is iterated once: attach again for another training")
        self._is_in_epochs = True
        return self._epochs(total, max_steps)

    def _epochs(self, total: int, max_steps: int | None) -> Iterator[int]:
        job = self._job
        job.begin(max_steps)
        while job.has_epoch(total) and self._ending is None:
            job.begin_epoch()
            try:
                yield job.place.epoch
            except GeneratorExit:
                # Without a ``with`` block a `break` is the end of the job; an exception is for who opens the run next.
                if self in _open_runs and not self._is_context and not is_raising(sys._getframe(1)):
                    self._finish_early()
                raise
            self._close_pass()
            if self._ending is None:
                self._answer(job.end_epoch(total))
        if self._ending is None:
            # What follows draws what it would have drawn.
            job.begin_epoch()
            self._leave(StopReason("done"))

    def batches(self, loader: Any) -> "Batches":  # noqa: ANN401 - any iterable
        """The batches of a loader that this epoch has not had yet; inside ``for ... in run.epochs(...)``."""
        return Batches(self, loader)

    def _batches(self, loader: Any) -> Generator[Any, None, None]:  # noqa: ANN401
        job = self._job
        if not self._is_in_epochs:
            raise RuntimeError("run.batches is used inside `for epoch in run.epochs(n)`")
        if job.place.is_open:
            raise RuntimeError(
                "run.batches is used inside another run.batches, and a checkpoint holds the place in one loader: "
                "evaluate with `for batch in loader`, and draw a second stream of training data from one loader of both"
            )
        batches = job.begin_pass(loader)
        while self._ending is None and not job.is_complete:
            batch = job.next_batch(batches)
            if batch is None:
                break
            try:
                yield batch[0]
            except GeneratorExit:
                # Left by `break`: an update of this batch counts. By an exception: then it is no more than a number.
                job.count_updates()
                job.end_pass()
                raise
            self._answer(job.end_batch())
        job.end_pass()

    def _close_pass(self) -> None:
        """End the pass of an epoch that is over: by a loop that keeps the iterator, it would end in the next one."""
        opened = self._pass() if self._pass is not None else None
        if opened is not None:
            opened.close()

    def _answer(self, reason: StopReason | None) -> None:
        if reason is None:
            return
        self._leave(reason)
        if self._is_context:
            raise _Stopped

    # ---- entering and leaving ----

    def __enter__(self) -> "AcceleratorRun":
        self._is_context = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, _Stopped):
            return True
        if self not in _open_runs:
            return False
        if error is None:
            self._finish_early()
        elif isinstance(error, SystemExit) and not error.code:
            self._leave(StopReason("asked", "sys.exit by the script"))
        else:
            self._leave(error)
        return False

    def _finish_early(self) -> None:
        """The loop was left by ``break``, or never started: the end as the script wants it."""
        job = self._job
        done = StopReason("done", f"the loop was left at step {job.place.step:,}")
        try:
            if self._is_in_epochs:
                job.save_last()
        except BaseException as refused:
            self._leave(refused)
            raise
        self._leave(done if self._is_in_epochs else StopReason("asked", "the loop was not started"))

    def _leave(self, ending: StopReason | BaseException) -> None:
        _open_runs.discard(self)
        self._ending = ending if isinstance(ending, StopReason) else StopReason("asked", repr(ending))
        try:
            self._job.close(ending)
        finally:
            self._hide_lines()

    def _abandon(self) -> None:
        self._leave(what_left(self._job.place.step))


class Batches:
    """The batches of one pass; as long as the loader, for progress bars."""

    def __init__(self, run: AcceleratorRun, loader: Any) -> None:  # noqa: ANN401
        self._run, self._loader = run, loader

    def __iter__(self) -> Iterator[Any]:
        batches = self._run._batches(self._loader)
        self._run._pass = weakref.ref(batches)
        return batches

    def __len__(self) -> int:
        count = batch_count(self._loader)
        if count is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return count


_open_runs: set[AcceleratorRun] = set()
before_exit(_open_runs, AcceleratorRun._abandon)
