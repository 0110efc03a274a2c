"""``Run``: the object a training loop holds.

    with unbroken.Run("runs/a", model=model, optimizer=optimizer, data=loader) as run:
        for step in run.steps(10_000):
            loss = train_step(next(run.data))
            run.log(loss=loss)

Entering takes the run and resumes it or starts it; ``steps`` saves, stops and commits at the steps' edges, where the
state is whole; leaving says how the job ended. All ranks do the same at the same step.
"""

import functools
import logging
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from unbroken.errors import (
    Halted,
    NoEmergencyArea,
    NonFiniteLoss,
    PeerLost,
    RankFailed,
    UnbrokenError,
    explain_in_traceback,
)
from unbroken.loop.ballots import Ballots
from unbroken.loop.measures import Measures, NonFinite, first_non_finite
from unbroken.loop.opened import Opened
from unbroken.loop.opening import open_run
from unbroken.loop.saved import LAST_SAVE_WAIT_S, last_wait_s, note_save, require_target, shown
from unbroken.loop.settings import Settings
from unbroken.run.outcome import conclude
from unbroken.run.stop import StopReason
from unbroken.state.audit import calling_frame
from unbroken.state.cursor import Cursor, require_loader
from unbroken.state.rng import capture_generators, generator_devices
from unbroken.state.save import Request, Saved
from unbroken.store.names import FINAL, PERIODIC

_log = logging.getLogger(__name__)
_WORTH_TELLING_S = 1.0


class Run:
    """A training run that goes on where it was left.

    Args:
        directory: the run's directory, the same for every job and every rank.
        settings: how it is saved, kept, resumed and stopped.
        things: what makes up its state, by name: models, optimizers, schedulers, anything with ``state_dict`` and
            ``load_state_dict``. ``data`` is the loader that ``run.data`` iterates, epoch after epoch.

    Raises:
        NotAnItem: something has no state that could be saved.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, settings: Settings | None = None, **things: object
    ) -> None:
        self.directory = Path(directory)
        self.settings = settings or Settings()
        loader = things.get("data")
        self._cursor: Cursor[Any] | None = None
        if loader is not None:
            self._cursor = loader if isinstance(loader, Cursor) else Cursor(require_loader(loader))
            things["data"] = self._cursor
        self._things = things
        self._measures = Measures()
        self._opened: Opened | None = None
        self._ballots = Ballots()
        self._ending: StopReason | None = None
        self._saved_step: int | None = None
        self._tried_step: int | None = None
        self._is_save_asked = self._is_save_agreed = self._is_dump_asked = False
        self._halting: str | None = None
        self.step = 0
        self.counters: dict[str, Any] = {}

    # ---- entering and leaving ----

    def __enter__(self) -> "Run":
        frame = calling_frame(1)
        try:
            opened = open_run(self.directory, self._things, self.settings, frame)
        except UnbrokenError as refused:
            explain_in_traceback(refused)
            raise
        self._opened, self.directory, self.settings = opened, opened.layout.run, opened.settings
        if opened.restored is not None:
            self.step = self._saved_step = opened.restored.step
            self.counters = dict(opened.restored.counters)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._open
        try:
            # A save in flight is of a step before the error: it is worth finishing, while the others take part.
            refused = self._settle_last(opened, last_wait_s(opened, error))
        except KeyboardInterrupt as at_once:
            # Told to go while it waits: the outcome is said and the run let go all the same.
            self._close(opened, at_once)
            raise
        self._close(opened, error or refused or self._ending or StopReason("asked", "the loop was left"))
        if error is None and refused is not None:
            raise refused

    def _close(self, opened: Opened, ending: StopReason | BaseException) -> None:
        self._opened = None
        opened.close(conclude(ending, step=self.step, job=opened.lease.number))
        if isinstance(ending, UnbrokenError):
            explain_in_traceback(ending)

    @property
    def _open(self) -> Opened:
        if self._opened is None:
            raise RuntimeError("a Run is used inside its `with` block")
        return self._opened

    # ---- what the loop uses ----

    @property
    def data(self) -> Cursor[Any]:
        """The batches of the loader that was handed over as ``data``, epoch after epoch."""
        if self._cursor is None:
            raise AttributeError("no `data` was handed to this Run")
        return self._cursor

    @property
    def is_stopped(self) -> bool:
        """Whether the loop ended before its target; the same command goes on from here."""
        return self._ending is not None and self._ending.kind != "done"

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint this job went on from; None if it started the run."""
        return self._open.resumed_from

    @property
    def job(self) -> int:
        """Which job of the run this is, from 1."""
        return self._open.lease.number

    def fact(self, kind: str, /, **facts: object) -> None:
        """Write a fact of the loop's own into the run's journal, at once; the first rank writes."""
        self._open.recorder.fact(kind, **facts)

    def log(self, **metrics: object) -> None:
        """Record metrics of the step that is being computed; tensors are read later, all at once.

        Raises:
            TypeError: a value is no number and no tensor of one element.
        """
        self._measures.log(metrics)

    def stop(self, reason: str = "") -> None:
        """Ask for a stop at the edge of this step; among several ranks all follow at the edge of the next."""
        self._open.stops.ask(reason)

    def halt(self, reason: str) -> None:
        """Ask for a stop that a person must look at, such as data that ran dry: saved, and never resubmitted.

        The loop raises ``Halted`` where ``stop`` would end it, on all ranks, after the state is saved.
        """
        self._halting = self._halting or reason
        self._open.stops.ask(reason)

    def save(self, *, by_all: bool = False) -> None:
        """Ask for a checkpoint at the edge of this step, where the state is whole. Any rank may ask.

        Among several ranks it comes at the edge of the next step, when all have heard of it, unless every rank asks at
        this step (``by_all``): then it is of this step, with the metrics logged for it.
        """
        self._is_save_asked = self._is_save_asked or not by_all
        self._is_save_agreed = self._is_save_agreed or by_all

    def save_emergency(self) -> None:
        """Ask this rank for a dump to ``emergency_dir`` at the edge of this step; no other rank is asked or waited for.

        The dumps are a checkpoint once every rank has left one of the same step.

        Raises:
            NoEmergencyArea: the settings name no directory for it.
        """
        if not self._open.emergency.is_ready:
            raise NoEmergencyArea
        self._is_dump_asked = True

    def steps(self, total: int) -> Iterator[int]:
        """The steps still to be done, as the number of steps completed before each; ends early when asked to stop.

        After the body of each step comes its edge: metrics are written, stops agreed, checkpoints saved.

        Raises:
            ValueError: the target is no number of steps.
            Halted: ``halt`` was called, or the data has run dry; the state is saved.
            NonFiniteLoss: the logged loss is no number; the state is not saved.
            LeaseLost: another job has taken the run.
            StorageFailed: the last save was refused; the last commit is intact.
            PeerLost: another rank is gone; the last commit is intact.
        """
        require_target(total)
        return self._steps(self._open, total)

    def _steps(self, opened: Opened, total: int) -> Iterator[int]:
        if self._ending is not None and self._ending.kind == "done":
            # A loop in several parts: the target of the one before is not the end.
            self._ending = None
        opened.recorder.snapshot(step=self.step, max_steps=total)
        opened.clock.resume_clock()
        if self.step < total and (dry := self._dry()) is not None:
            # Nothing has changed since the checkpoint it goes on from: there is nothing to save.
            raise Halted(reason=dry, step=self.step, run=self.directory)
        while self.step < total and self._ending is None:
            yield self.step
            self.step += 1
            try:
                self._edge(opened, total)
            except PeerLost:
                # The state is whole here, and with the others' dumps it may be the newest there is.
                self._dump(opened, why="another rank is gone")
                raise
        self._ending = self._ending or StopReason("done")
        self._ballots.drain()
        self._read_metrics(opened, durable=True)

    # ---- a step's edge ----

    def _edge(self, opened: Opened, total: int) -> None:
        self._measures.close_step(self.step)
        opened.clock.step_done()
        if self._is_dump_asked:
            self._is_dump_asked = False
            self._dump(opened, why="the training loop asked for it")
        stop, is_due, is_bad, is_lost, is_hurried = self._agree(opened)
        if stop and is_hurried:
            self._leave(opened)
            return
        is_agreed, self._is_save_agreed = self._is_save_agreed, False
        if is_lost:
            opened.require_held()
        if (saved := opened.saver.collect()) is not None:
            self._note(saved)
        if is_bad:
            self._raise_non_finite(opened)
        if self.step < total and (dry := self._dry()) is not None:
            # Known to every rank by itself, so that none has to be asked.
            self._halting = self._halting or dry
            opened.noticed = opened.noticed or StopReason("asked", dry)
            stop = True
        stop = opened.is_drill_over(self.step) or stop
        if self.step >= total:
            self._save_and_wait(opened, FINAL)
            self._raise_if_halted(opened)
        elif stop:
            self._ending = opened.agree_on_reason()
            opened.recorder.fact("stop", step=self.step, reason=self._ending.sentence(), by=self._ending.kind)
            _log.info("stopping at step %s: %s", f"{self.step:,}", self._ending.sentence())
            self._save_and_wait(opened, opened.kind_of_stop(self.step))
            self._raise_if_halted(opened)
        elif is_due or is_agreed or opened.clock.is_due_by_step(self.step):
            self._save(PERIODIC)
        elif self.step % self.settings.log_steps == 0:
            self._read_metrics(opened)
        opened.recorder.snapshot(step=self.step, **shown(self._measures))
        opened.clock.resume_clock()

    def _dry(self) -> str | None:
        """Why the data has no further step; None if it has one, or does not know."""
        loader = self._cursor.positioned if self._cursor is not None else None
        return loader.ended() if loader is not None else None

    def _raise_if_halted(self, opened: Opened) -> None:
        reasons = [reason for reason in opened.world.all_gather(self._halting) if reason is not None]
        if reasons:
            raise Halted(reason=reasons[0], step=self.step, run=self.directory)

    def _agree(self, opened: Opened) -> list[bool]:
        """Whether to stop, to save, to give up, to hurry: what any rank asked for, known to all at the same step."""
        is_due = opened.clock.is_due_by_clock() or self._is_save_asked
        self._is_save_asked = False
        is_hurried = opened.emergency.is_hurried()
        flags = [opened.is_stop_asked(), is_due, self._bad is not None, opened.is_lost, is_hurried]
        stop, is_due, is_bad, is_lost, is_hurried = self._ballots.agree(opened, flags)
        # A save at the edge where the vote went out was the answer to it.
        is_answered = opened.world.size > 1 and self._tried_step == self.step - 1
        return [stop, is_due and not is_answered, is_bad, is_lost, is_hurried]

    # ---- metrics ----

    _bad: NonFinite | None = None

    def _read_metrics(
        self, opened: Opened, *, durable: bool = False, before: Callable[[], object] | None = None
    ) -> None:
        rows = self._measures.read()
        if self.settings.non_finite == "stop":
            self._bad = self._bad or first_non_finite(rows, self.settings.finite)
        if before is not None and self._bad is None:
            before()
        for step, values in rows:
            opened.recorder.metrics(step, values)
        opened.recorder.flush(durable=durable)
        if self._bad is not None and opened.world.size == 1:
            self._raise_non_finite(opened)

    def _raise_non_finite(self, opened: Opened) -> None:
        """Every rank raises at the same edge, though only one may have met it."""
        # The save in flight is of a step before it: the message is to name the newest one that is kept.
        self._settle_last(opened, LAST_SAVE_WAIT_S)
        for rank, bad in enumerate(opened.world.all_gather(self._bad)):
            if bad is not None:
                found = NonFiniteLoss(
                    step=bad.step, metric=bad.metric, value=str(bad.value), resumable_step=self._saved_step
                )
                raise found if rank == opened.world.rank else RankFailed(rank=rank, cause=found)

    # ---- saving ----

    def _dump(self, opened: Opened, *, why: str) -> None:
        """Dump this rank's state, where there is a place for it and the last loss is a number."""
        if opened.emergency.is_ready:
            self._read_metrics(opened, before=lambda: opened.emergency.dump(self.step, self.counters, why=why))

    def _leave(self, opened: Opened) -> None:
        """End without an ordinary save, and without another word to the other ranks: some may be gone already."""
        self._ballots.forget()
        self._ending = opened.noticed or StopReason("asked", "another rank")
        opened.emergency.is_leaving = True
        self._read_metrics(opened, before=lambda: opened.emergency.leave(self.step, self.counters))
        opened.recorder.fact("stop", step=self.step, reason=self._ending.sentence(), by=self._ending.kind)
        if self._halting is not None:
            # Not asked of the others as elsewhere: whoever knows of it says it.
            raise Halted(reason=self._halting, step=self.step, run=self.directory)

    def _save(self, kind: str) -> None:
        opened = self._open
        self._read_metrics(opened, durable=kind != PERIODIC)
        if opened.world.size > 1 and any(bad is not None for bad in opened.world.all_gather(self._bad)):
            self._raise_non_finite(opened)
        asked_s = time.monotonic()
        self._settle_last(opened)
        waited_s = time.monotonic() - asked_s
        if waited_s > _WORTH_TELLING_S:
            _log.info("waited %.1f s for the save before this one; saving less often would not", waited_s)
        opened.look_for_unsaved()
        opened.clock.save_began()
        self._tried_step = self.step
        opened.recorder.fact("save", step=self.step, save_kind=kind, waited_s=waited_s)
        # Of this very step: a loss on val/ from before would make of a later checkpoint the best one.
        metrics = {name: float(value) for name, value in self._measures.of_step(self.step).items()}
        account = self._settle_served(opened)
        request = Request(self.step, kind, dict(self.counters), metrics, {"job": opened.lease.number}, account)
        opened.saver.start(request, lambda: capture_generators(generator_devices()))

    def _settle_served(self, opened: Opened) -> Callable[[], Mapping[str, Any]] | None:
        """Add up over the ranks what the data has served; the proof that it is each sample once is left to the save."""
        loader = self._cursor.positioned if self._cursor is not None else None
        if loader is None:
            return None
        return loader.settle_served(functools.reduce(operator.add, opened.world.all_gather(loader.served_share())))

    def _save_and_wait(self, opened: Opened, kind: str) -> None:
        self._save(kind)
        refused = self._settle_last(opened)
        if refused is not None:
            raise refused

    def _settle_last(self, opened: Opened, timeout_s: float | None = None) -> UnbrokenError | None:
        """Wait for the save in flight, if there is one, and write down how it ended."""
        opened.saver.wait(timeout_s)
        saved = opened.saver.collect()
        return self._note(saved) if saved is not None else None

    def _note(self, saved: Saved) -> UnbrokenError | None:
        if saved.error is None:
            self._saved_step = saved.request.step
        return note_save(self._open, saved)
