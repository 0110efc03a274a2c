"""``Run``: the object a training loop holds.

    with unbroken.Run("runs/a", model=model, optimizer=optimizer, data=loader) as run:
        for step in run.steps(10_000):
            loss = train_step(next(run.data))
            run.log(loss=loss)

Entering resumes the run or starts it; ``steps`` saves, stops and commits at the steps' edges, where the state is whole;
leaving records how the job ended. All ranks do the same at the same step. Without ``with``, the run is entered by the
first use and left when the loop ends.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from unbroken.errors import LoopsDisagree, NoEmergencyArea, NotExact, PeerLost, UnbrokenError
from unbroken.loop.carry import CARRIED, Carried
from unbroken.loop.console import show_lines
from unbroken.loop.job import Job
from unbroken.loop.loop_checks import are_equal
from unbroken.loop.opening import open_run
from unbroken.loop.raising import is_raising
from unbroken.loop.settings import Settings
from unbroken.records.layout import absolute_run
from unbroken.records.process import before_exit
from unbroken.records.stop import StopReason
from unbroken.state.audit import calling_frame, remember
from unbroken.state.cursor import Cursor, require_loader
from unbroken.state.rng import capture_rng, rng_devices
from unbroken.world import is_first_process


def _require_target(total: object) -> None:
    """Check a target at the call: a float that is never reached would train for ever, a negative one end at once.

    Raises:
        ValueError: it is not a whole number of steps.
    """
    if isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise ValueError(f"steps({total!r}): the target is a whole number of steps, 0 or more")


def _already_trained(steps: int) -> str:
    return f"this Run already trained {steps} steps in this process, and there is no checkpoint to resume from"


class Run:
    """A training run that resumes where it was left.

    Args:
        directory: the run's directory, the same for every job and every rank.
        settings: how it is saved, kept, resumed and stopped.
        process_group: the ranks that train, if they are not all; the others do not open the run.
        on_commit: called on the first rank with the path of each new checkpoint, at the edge after its commit; an
            error it raises is logged and training continues.
        objects: its state, by name: models, optimizers, schedulers, anything with ``state_dict`` and
            ``load_state_dict``. ``data`` is the loader that ``run.data`` iterates, epoch after epoch.

    Raises:
        NotAnItem: an object has no state that can be saved.
        BadRunPath: the directory is an empty path.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        # Or anything: else a dict of objects, unpacked after them, would not pass a type checker.
        process_group: "dist.ProcessGroup | Any" = None,  # noqa: ANN401
        on_commit: Callable[[Path], object] | Any = None,  # noqa: ANN401
        **objects: object,
    ) -> None:
        self.directory = absolute_run(directory)
        self.settings = settings or Settings()
        loader = objects.get("data")
        self._cursor: Cursor[Any] | None = None
        if loader is not None:
            self._cursor = loader if isinstance(loader, Cursor) else Cursor(require_loader(loader))
            objects["data"] = self._cursor
        self._objects = objects
        self._given = (self.directory, self.settings)
        self._process_group = process_group
        self._on_commit = on_commit
        # The job of this handle, the last one once it has ended.
        self._job: Job | None = None
        self._is_open = self._is_self_entered = False
        # Known from here on: another run of this process is not to miss what belongs to this one.
        remember(objects.values())
        self._rng = capture_rng(rng_devices())

    # ---- entering and leaving ----

    def __enter__(self) -> "Run":
        if not self._is_open:
            self._enter(calling_frame(1))
        self._is_self_entered = False
        return self

    def _enter(self, frame: FrameType | None) -> Job:
        self.directory, self.settings = self._given
        # A loop without `with` that ended in an exception still holds its run, in a notebook for example.
        for other in [each for each in _SELF_ENTERED if each._job is not None and each._job.is_in_body]:
            if other.directory.absolute() == self.directory.absolute():
                other._abandon()
        carried, group = Carried(), self._process_group
        # Without `with` a script that prefetches does it before the run is entered.
        is_rng_moved = not are_equal(self._rng, capture_rng(rng_devices()))
        hide_lines = show_lines(is_wanted=self.settings.console, is_first=is_first_process(group))
        try:
            opened = open_run(self.directory, self._objects, self.settings, frame, carried=carried, process_group=group)
        except BaseException:
            hide_lines()
            raise
        self._hide_lines, self._is_open = hide_lines, True
        self.directory, self.settings = opened.layout.run, opened.settings
        trained = 0 if self._job is None else self._job.step
        self._job = Job(opened, self._cursor, carried, self._on_commit, is_rng_moved=is_rng_moved)
        if opened.restored is None and trained > 0:
            untrue = NotExact(differences=(("model", _already_trained(trained)),))
            self._leave(untrue)
            raise untrue
        return self._job

    def _entered(self, frame: FrameType | None) -> Job:
        """The open job; the run is entered if it was not."""
        if self._is_open:
            return self._open
        job = self._enter(frame)
        self._is_self_entered = True
        _SELF_ENTERED.add(self)
        return job

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        job = self._open
        if isinstance(error, SystemExit) and not error.code:
            # An orderly end by the script: what it has computed is for the next job.
            job.opened.stops.ask("sys.exit by the script")
        if job.is_in_body and (error is None or (isinstance(error, SystemExit) and not error.code)):
            # The loop was left, and its iterator may still be held.
            job.end_by_loop()
        if isinstance(error, RuntimeError) and job.votes.has_anybody_left():
            # A collective of the script failed because another rank has left the loop: that is the cause.
            left = LoopsDisagree(run=self.directory, step=job.step)
            self._leave(left)
            raise left from error
        self._leave(error)

    def _leave(self, error: BaseException | None = None) -> None:
        job, self._is_open = self._open, False
        _SELF_ENTERED.discard(self)
        try:
            job.leave(error)
        finally:
            self._hide_lines()

    def _leave_by_itself(self, error: BaseException | None = None) -> None:
        """Without a ``with`` block the end of the loop is the end of the job."""
        if self._is_self_entered and self._is_open:
            self._leave(error)

    def _abandon(self) -> None:
        """End a job whose loop was left by an exception, or never started; the interpreter knows the exception."""
        if not self._is_open:
            return
        job, error = self._open, getattr(sys, "last_value", None)
        if error is None and job.is_in_body:
            if job.is_raised:
                job.ending = StopReason("asked", f"an exception or sys.exit left the loop inside step {job.step + 1:,}")
            else:
                # Its iterator was kept and never used up: left as by `break`.
                job.end_by_loop()
        with contextlib.suppress(UnbrokenError):
            self._leave(error)

    @property
    def _open(self) -> Job:
        if self._job is None or not self._is_open:
            raise RuntimeError("this Run is not open: iterate `run.steps(n)`, or use it inside its `with` block")
        return self._job

    # ---- what the loop uses ----

    @property
    def step(self) -> int:
        """How many steps are complete."""
        return self._entered(calling_frame(1)).step if self._job is None else self._job.step

    @property
    def counters(self) -> dict[str, Any]:
        """Plain values of the loop's own, saved with every checkpoint; restored when the run is entered."""
        return self._entered(calling_frame(1)).counters if self._job is None else self._job.counters

    @property
    def data(self) -> Cursor[Any]:
        """The batches of the loader that was passed as ``data``, epoch after epoch."""
        if self._cursor is None:
            raise AttributeError("this Run has no loader: pass one as data=loader")
        return self._cursor

    @property
    def is_stopped(self) -> bool:
        """Whether the loop ended before its target; the same command resumes from here."""
        ending = None if self._job is None else self._job.ending
        return ending is not None and ending.kind != "done"

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint this job resumed from; None if it started the run."""
        return self._open.opened.resumed_from

    @property
    def job(self) -> int:
        """Which job of the run this is, from 1."""
        return self._open.opened.lease.number

    def open(self) -> "Run":
        """Enter the run now, without ``with``, for a script that needs its step or counters before the loop."""
        self._entered(calling_frame(1))
        return self

    def carry(self, name: str, make: object) -> Any:  # noqa: ANN401 - whatever the loop carries
        """Carry a value from one step to the next: a prefetched batch, a hidden state.

        ``make`` is the value, or a function that returns it. After a resume the first call for a name returns the value
        that was carried when the checkpoint was saved, and ``make`` is not called.

        Raises:
            NeedsPickle: the value is of a type that a checkpoint cannot store.
        """
        job = self._entered(calling_frame(1))
        with job.checks.carrying(name):
            return job.carried.carry(name, make, is_pickle_allowed=CARRIED in self.settings.allow_pickle)

    def event(self, kind: str, /, **values: object) -> None:
        """Write an event of the loop's own to the run's journal, at once; rank 0 writes it."""
        self._open.opened.recorder.event(kind, **values)

    def log(self, **metrics: object) -> None:
        """Record metrics of the step that is being computed; tensors are read later, all at once.

        Raises:
            TypeError: a value is neither a number nor a tensor of one element.
        """
        # At every step: the check of `_open`, without its call.
        job = self._job if self._is_open else None
        (self._open if job is None else job).logged.log(metrics)

    def stop(self, reason: str = "") -> None:
        """Stop at the edge of this step, for another job to resume; several ranks stop one edge later."""
        self._open.opened.stops.ask(reason)

    def finish(self, reason: str = "") -> None:
        """End the run as done at the edge of this step; among several ranks all follow at the edge of the next.

        The end is saved as if the target was reached, and the outcome is ``completed``: no further job is started.
        """
        self._open.opened.noticed = StopReason("done", reason or "finished by the training loop")

    def halt(self, reason: str) -> None:
        """Stop for a cause that you must look at, such as exhausted data: saved, and never resubmitted.

        The loop raises ``Halted`` where ``stop`` would end it, on all ranks, after the state is saved.
        """
        job = self._open
        job.halting = job.halting or reason
        job.opened.stops.ask(reason)

    def save(self, *, by_all: bool = False) -> None:
        """Save a checkpoint at the edge of this step, where the state is whole. Any rank may call it.

        Among several ranks it is saved at the edge of the next step, when all have agreed on it, unless every rank
        calls it at this step (``by_all``): then it is of this step, with the metrics logged for it.
        """
        job = self._open
        job.is_save_requested = job.is_save_requested or not by_all
        job.is_save_agreed = job.is_save_agreed or by_all

    def save_emergency(self) -> None:
        """Dump this rank's state to ``emergency_dir`` at the edge of this step; waits for no other rank.

        The dumps are a checkpoint once every rank has made one of the same step.

        Raises:
            NoEmergencyArea: the settings name no directory for it.
        """
        if not self._open.opened.emergency.is_ready:
            raise NoEmergencyArea
        self._open.is_dump_requested = True

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the remaining steps, each as the number of steps before it; ends early on a stop request.

        After the body of each step comes its edge: metrics are written, stops agreed, checkpoints saved. A loop that
        is left by ``break`` or ``return`` ends the run as done, saved at the last completed step.

        Raises:
            ValueError: the target is not a number of steps.
            Halted: ``halt`` was called, or the data is exhausted; the state is saved.
            NonFiniteLoss: the logged loss is NaN or infinite; the state is not saved.
            LeaseLost: another job has taken the run.
            StorageFailed: the last save failed; the last commit is intact.
            PeerLost: another rank is gone; the last commit is intact.
            LoopsDisagree: another rank has left the loop.
        """
        _require_target(total)
        job = self._entered(calling_frame(1))
        if job.is_in_body and not job.is_raised:
            raise RuntimeError("run.steps is being iterated already: one loop at a time")
        return self._steps(job, total)

    def _steps(self, job: Job, total: int) -> Iterator[int]:
        try:
            job.start_loop(total)
            while job.step < total and job.ending is None:
                job.body.begin(job.counters)
                job.is_in_body = True
                yield job.step
                job.is_in_body = False
                job.step += 1
                try:
                    job.edge(total)
                except PeerLost:
                    # The state is whole here, and with the others' dumps it may be the newest there is.
                    job.dump(why="another rank is gone")
                    raise
            job.end_loop()
        except GeneratorExit:
            # `break`, `return`, or an exception in the body on its way up: the last is for the caller.
            job.is_raised = job.is_in_body and is_raising(sys._getframe(1))
            if job.is_in_body and not job.is_raised:
                job.end_by_loop()
                with contextlib.suppress(UnbrokenError):
                    # Logged and recorded; Python would only print that it is ignored.
                    self._leave_by_itself()
            raise
        except BaseException as error:
            self._leave_by_itself(error)
            raise
        self._leave_by_itself()


# Entered without `with`: nothing else would end them if their loop is left by an exception, or never starts.
_SELF_ENTERED: set[Run] = set()


before_exit(_SELF_ENTERED, Run._abandon)
