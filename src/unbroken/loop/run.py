"""``Run``: the object a training loop holds.

    with unbroken.Run("runs/a", model=model, optimizer=optimizer, data=loader) as run:
        for step in run.steps(10_000):
            loss = train_step(next(run.data))
            run.log(loss=loss)

Entering takes the run and resumes it or starts it; ``steps`` saves, stops and commits at the steps' edges, where the
state is whole; leaving says how the job ended. All ranks do the same at the same step. Without ``with``, the run is
entered by the first use and left when the loop ends.
"""

import atexit
import contextlib
import functools
import gc
import logging
import operator
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unbroken.errors import (
    Halted,
    LeftMidStep,
    LoopsDisagree,
    NoEmergencyArea,
    NonFiniteLoss,
    PeerLost,
    RankFailed,
    UnbrokenError,
    explain_in_traceback,
)
from unbroken.loop.ballots import Ballots, Flags
from unbroken.loop.body import Body
from unbroken.loop.carry import CARRIED, Carried
from unbroken.loop.console import show_lines
from unbroken.loop.habits import Habits
from unbroken.loop.measures import Measures, NonFinite, first_non_finite
from unbroken.loop.opened import Opened
from unbroken.loop.opening import open_run
from unbroken.loop.resume import UNFINISHED
from unbroken.loop.saved import LAST_SAVE_WAIT_S, last_wait_s, note_save, require_target, say_end, shown
from unbroken.loop.settings import Settings
from unbroken.run.outcome import conclude
from unbroken.run.stop import StopReason
from unbroken.state.audit import calling_frame
from unbroken.state.cursor import Cursor, require_loader
from unbroken.state.items import State
from unbroken.state.rng import capture_generators, generator_devices
from unbroken.state.save import Request, Saved
from unbroken.store.names import FINAL, PERIODIC
from unbroken.world import is_first_process

_log = logging.getLogger(__name__)
_WORTH_TELLING_S = 1.0
# How long a stop may wait for an optimizer step before the gradients are saved as they are.
_STOP_WAITS_S = 10.0


class Run:
    """A training run that resumes where it was left.

    Args:
        directory: the run's directory, the same for every job and every rank.
        settings: how it is saved, kept, resumed and stopped.
        on_commit: called on the first rank with the path of each new checkpoint, at the edge after its commit; an
            error it raises is logged and training continues.
        things: what makes up its state, by name: models, optimizers, schedulers, anything with ``state_dict`` and
            ``load_state_dict``. ``data`` is the loader that ``run.data`` iterates, epoch after epoch.

    Raises:
        NotAnItem: something has no state that could be saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        settings: Settings | None = None,
        on_commit: Callable[[Path], object] | None = None,
        **things: object,
    ) -> None:
        self.directory = Path(directory)
        self.settings = settings or Settings()
        loader = things.get("data")
        self._cursor: Cursor[Any] | None = None
        if loader is not None:
            self._cursor = loader if isinstance(loader, Cursor) else Cursor(require_loader(loader))
            things["data"] = self._cursor
        self._things = things
        self._asked = (self.directory, self.settings)
        self._on_commit = on_commit
        self._opened: Opened | None = None
        self._is_self_entered = False
        self._reset()

    def _reset(self) -> None:
        """Know nothing of an earlier job: a ``Run`` can be entered again and again."""
        self.directory, self.settings = self._asked
        self._measures = Measures()
        self._ballots = Ballots()
        self._carried = Carried()
        self._ending: StopReason | None = None
        self._refused: BaseException | None = None
        self._saved_step: int | None = None
        self._tried_step: int | None = None
        self._is_save_asked = self._is_save_agreed = self._is_dump_asked = False
        # A save or a stop that waits for an optimizer step, for how many edges, and since when.
        self._is_save_postponed = self._is_stop_postponed = False
        self._edges_waited = 0
        self._stop_waits_since_s: float | None = None
        self._is_in_body = False
        self._target = 0
        self._halting: str | None = None
        self._bad: NonFinite | None = None
        self._step = 0
        self._counters: dict[str, Any] = {}

    # ---- entering and leaving ----

    def __enter__(self) -> "Run":
        if self._opened is None:
            self._enter(calling_frame(1))
        self._is_self_entered = False
        return self

    def _enter(self, frame: FrameType | None) -> None:
        self._reset()
        hide_lines = show_lines(is_wanted=self.settings.console, is_first=is_first_process())
        try:
            opened = open_run(self.directory, self._things, self.settings, frame, carried=self._carried)
        except BaseException as refused:
            hide_lines()
            if isinstance(refused, UnbrokenError):
                explain_in_traceback(refused)
            raise
        self._hide_lines = hide_lines
        self._opened, self.directory, self.settings = opened, opened.layout.run, opened.settings
        if opened.restored is not None:
            self._step = self._saved_step = opened.restored.step
            self._counters = dict(opened.restored.counters)
        self._body = Body(opened.items, self._cursor, self._carried)
        self._habits = Habits(opened, self._cursor, self._carried)

    def _entered(self, frame: FrameType | None) -> Opened:
        """The open run; entered by itself where nobody has entered it yet."""
        if self._opened is None:
            self._enter(frame)
            self._is_self_entered = True
            # The loop may never begin, or be left by an exception that only the interpreter sees.
            atexit.register(_end_at_exit, weakref.ref(self))
        return self._open

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._open
        if error is None and self._is_in_body:
            # The loop was left, and whoever iterates it still holds it.
            self._end_by_loop(opened)
        self._leave(opened, error)

    def _leave(self, opened: Opened, error: BaseException | None) -> None:
        try:
            # A save in flight is of a step before the error: it is worth finishing, while the others take part.
            refused = self._refused or self._settle_last(opened, last_wait_s(opened, error or self._refused))
        except KeyboardInterrupt as at_once:
            # Told to go while it waits: the outcome is said and the run let go all the same.
            self._close(opened, at_once)
            raise
        self._close(opened, error or refused or self._ending or StopReason("asked", "the loop was left"))
        if error is None and refused is not None:
            raise refused

    def _close(self, opened: Opened, ending: StopReason | BaseException) -> None:
        self._opened = None
        self._is_in_body = False
        try:
            self._body.close()
            outcome = conclude(ending, step=self._step, job=opened.lease.number)
            opened.close(outcome)
            if opened.world.is_first:
                say_end(outcome, target=self._target)
        finally:
            self._hide_lines()
        if isinstance(ending, UnbrokenError):
            explain_in_traceback(ending)

    @property
    def _open(self) -> Opened:
        if self._opened is None:
            raise RuntimeError("this Run is not open: iterate `run.steps(n)`, or use it inside its `with` block")
        return self._opened

    # ---- what the loop uses ----

    @property
    def step(self) -> int:
        """How many steps are complete."""
        return self._step

    @property
    def counters(self) -> dict[str, Any]:
        """Plain values of the loop's own, saved with every checkpoint; restored when the run is entered."""
        return self._counters

    @counters.setter
    def counters(self, values: dict[str, Any]) -> None:
        self._counters = values

    @property
    def data(self) -> Cursor[Any]:
        """The batches of the loader that was handed over as ``data``, epoch after epoch."""
        if self._cursor is None:
            raise AttributeError("no `data` was handed to this Run")
        return self._cursor

    @property
    def is_stopped(self) -> bool:
        """Whether the loop ended before its target; the same command resumes from here."""
        return self._ending is not None and self._ending.kind != "done"

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint this job resumed from; None if it started the run."""
        return self._open.resumed_from

    @property
    def job(self) -> int:
        """Which job of the run this is, from 1."""
        return self._open.lease.number

    def open(self) -> "Run":
        """Enter the run now, without ``with``, for a script that needs its step or counters before the loop."""
        self._entered(calling_frame(1))
        return self

    def carry(self, name: str, make: object) -> Any:  # noqa: ANN401 - whatever the loop carries
        """Keep a value that a loop takes from one step to the next: a prefetched batch, a hidden state.

        ``make`` is the value, or a function that gives it. After a resume the first call for a name returns the value
        that was carried when the checkpoint was saved, and ``make`` is not called.

        Raises:
            NeedsPickle: the value is of a type that a checkpoint cannot store.
        """
        self._entered(calling_frame(1))
        is_pickle_allowed = CARRIED in self.settings.allow_pickle
        with self._habits.carrying():
            return self._carried.carry(name, make, is_pickle_allowed=is_pickle_allowed)

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
        """Ask for a stop at the edge of this step, for another job to resume; several ranks stop one edge later."""
        self._open.stops.ask(reason)

    def finish(self, reason: str = "") -> None:
        """End the run as done at the edge of this step; among several ranks all follow at the edge of the next.

        The end is saved like a target that was reached, and the outcome tells schedulers to start nothing more.
        """
        self._open.noticed = StopReason("done", reason or "finished by the training loop")

    def halt(self, reason: str) -> None:
        """Ask for a stop that a person must look at, such as data that ran out: saved, and never resubmitted.

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

        After the body of each step comes its edge: metrics are written, stops agreed, checkpoints saved. A loop that
        is left by ``break`` or ``return`` ends the run as done, saved at the last completed step.

        Raises:
            ValueError: the target is no number of steps.
            Halted: ``halt`` was called, or the data is exhausted; the state is saved.
            NonFiniteLoss: the logged loss is NaN or infinite; the state is not saved.
            LeaseLost: another job has taken the run.
            StorageFailed: the last save was refused; the last commit is intact.
            PeerLost: another rank is gone; the last commit is intact.
            LoopsDisagree: another rank has left the loop.
        """
        require_target(total)
        return self._steps(self._entered(calling_frame(1)), total)

    def _steps(self, opened: Opened, total: int) -> Iterator[int]:
        try:
            self._begin_loop(opened, total)
            while self._step < total and self._ending is None:
                self._body.begin(self._counters)
                self._is_in_body = True
                yield self._step
                self._is_in_body = False
                self._step += 1
                try:
                    self._edge(opened, total)
                except PeerLost:
                    # The state is whole here, and with the others' dumps it may be the newest there is.
                    self._dump(opened, why="another rank is gone")
                    raise
            self._ending = self._ending or StopReason("done")
            self._ballots.drain()
            self._read_metrics(opened, durable=True)
        except GeneratorExit:
            # `break`, `return`, or an exception in the body on its way up: the last is for whoever catches it.
            if self._is_in_body and not _is_raising(sys._getframe(1)):
                self._end_by_loop(opened)
                with contextlib.suppress(UnbrokenError):
                    # Told and recorded; Python would only print that it is ignored.
                    self._leave_by_itself(opened)
            raise
        except BaseException as error:
            self._leave_by_itself(opened, error)
            raise
        self._leave_by_itself(opened)

    def _leave_by_itself(self, opened: Opened, error: BaseException | None = None) -> None:
        """Without a ``with`` block the end of the loop is the end of the job."""
        if self._is_self_entered and self._opened is not None:
            self._leave(opened, error)

    def _begin_loop(self, opened: Opened, total: int) -> None:
        if self._is_in_body:
            _log.warning(
                "step %s was left by an exception and is computed again on the state as it is: "
                "its result may differ from an uninterrupted run",
                f"{self._step + 1:,}",
            )
            self._is_in_body = False
        if self._ending is not None and self._ending.kind == "done":
            # A loop in several parts: the target of the one before is not the end.
            self._ending = opened.noticed = None
        self._target = total
        opened.recorder.snapshot(step=self._step, max_steps=total)
        opened.clock.resume_clock()
        if self._step < total and (exhausted := self._exhausted()) is not None:
            # Nothing has changed since the checkpoint it resumed from: there is nothing to save.
            raise Halted(reason=exhausted, step=self._step, run=self.directory)
        if self._step >= total and opened.world.is_first:
            _log.info("nothing to do: step %s of %s is already reached", f"{self._step:,}", f"{total:,}")
        self._habits.loop_begins()

    def _end_by_loop(self, opened: Opened) -> None:
        """The loop was left inside a body: save the last completed step, and end as the loop has decided.

        Nothing is raised here: Python drops what an iterator raises while it is closed. ``_leave`` raises it.
        """
        self._is_in_body = False
        try:
            self._save_left(opened)
        except BaseException as refused:  # noqa: BLE001 - raised again by whoever leaves the run
            self._refused = refused

    def _save_left(self, opened: Opened) -> None:
        left = self._body.left()
        if not self._ballots.leave(opened):
            raise LoopsDisagree(run=self.directory, step=self._step)
        # Every rank has left here; whether at the same place is for all to know.
        everywhere = opened.world.all_gather((self._step, left.is_complete))
        if left.is_complete is None or len(set(everywhere)) > 1:
            raise LeftMidStep(run=self.directory, step=self._step + 1, resumable_step=self._saved_step)
        if left.is_complete:
            self._step += 1
            self._measures.close_step(self._step)
        else:
            self._measures.drop_step()
            self._counters = self._body.rewind()
        self._ending = self._reason_to_leave(opened)
        opened.recorder.fact("stop", step=self._step, reason=self._ending.sentence(), by=self._ending.kind)
        if opened.world.is_first:
            _log.info("ending at step %s: %s", f"{self._step:,}", self._ending.sentence())
        kind = FINAL if self._ending.kind == "done" else opened.kind_of_stop(self._step)
        moved = sorted({name for names in opened.world.all_gather(left.moved) for name in names})
        if moved and self._saved_step == self._step:
            # The last edge is saved already, exactly.
            self._read_metrics(opened, durable=True)
            return
        rng = None if left.is_complete else self._body.rng_at_edge
        self._save_and_wait(opened, kind, unfinished=moved, rng=rng)
        opened.recorder.snapshot(step=self._step)
        self._raise_if_halted(opened)

    def _reason_to_leave(self, opened: Opened) -> StopReason:
        """Why the loop was left: as it said itself by ``stop`` or ``finish``, else by its own decision."""
        opened.is_stop_asked()
        asked = next((each for each in opened.world.all_gather(opened.noticed) if each is not None), None)
        where = f"ended by the loop at step {self._step:,} of {self._target:,}"
        if asked is None:
            return StopReason("done", where)
        return StopReason("done", f"{where}: {asked.detail}") if asked.kind == "done" else asked

    # ---- a step's edge ----

    def _edge(self, opened: Opened, total: int) -> None:
        self._measures.close_step(self._step)
        opened.clock.step_done()
        self._body.end()
        self._habits.edge_reached(self._body.draws)
        if self._is_dump_asked:
            self._is_dump_asked = False
            self._dump(opened, why="the training loop asked for it")
        agreed = self._agree(opened)
        if agreed.has_left:
            raise LoopsDisagree(run=self.directory, step=self._step)
        if agreed.is_stop_asked and agreed.is_hurried:
            self._leave_in_hurry(opened)
            return
        if agreed.is_lost:
            opened.require_held()
        if (saved := opened.saver.collect()) is not None:
            self._note(saved)
        if agreed.is_bad:
            self._raise_non_finite(opened)
        stop = self._is_stop_due(opened, total, agreed)
        self._save_where_due(opened, total, stop, agreed)
        opened.recorder.snapshot(step=self._step, **shown(self._measures))
        opened.clock.resume_clock()

    def _is_stop_due(self, opened: Opened, total: int, agreed: Flags) -> bool:
        stop = agreed.is_stop_asked or self._is_stop_postponed
        if self._step < total and (exhausted := self._exhausted()) is not None:
            # Known to every rank by itself, so that none has to be asked.
            self._halting = self._halting or exhausted
            opened.noticed = opened.noticed or StopReason("asked", exhausted)
            stop = True
        return opened.is_drill_over(self._step) or stop

    def _save_where_due(self, opened: Opened, total: int, stop: bool, agreed: Flags) -> None:
        is_by_all, self._is_save_agreed = self._is_save_agreed, False
        is_due = agreed.is_save_due or self._is_save_postponed or opened.clock.is_due_by_step(self._step)
        is_last = self._step >= total
        is_wanted = is_last or stop or is_due or is_by_all
        if is_wanted and self._must_wait(opened, can_wait=not (is_last or is_by_all or agreed.is_overdue)):
            self._is_save_postponed, self._is_stop_postponed = self._is_save_postponed or is_due, stop
            if stop and self._stop_waits_since_s is None:
                self._stop_waits_since_s = time.monotonic()
        elif is_last:
            self._save_and_wait(opened, FINAL)
            self._raise_if_halted(opened)
        elif stop:
            self._stop_here(opened)
        elif is_wanted:
            self._save(PERIODIC)
        elif self._step % self.settings.log_steps == 0:
            self._read_metrics(opened)

    def _stop_here(self, opened: Opened) -> None:
        self._ending = opened.agree_on_reason()
        opened.recorder.fact("stop", step=self._step, reason=self._ending.sentence(), by=self._ending.kind)
        if opened.world.is_first:
            _log.info("stopping at step %s: %s", f"{self._step:,}", self._ending.sentence())
        is_done = self._ending.kind == "done"
        self._save_and_wait(opened, FINAL if is_done else opened.kind_of_stop(self._step))
        self._raise_if_halted(opened)

    def _must_wait(self, opened: Opened, *, can_wait: bool) -> bool:
        """Whether a save waits for the next edge with an optimizer step; after a bound the gradients are saved too."""
        pending = any(opened.world.all_gather(self._body.has_pending_gradients))
        if pending and can_wait and self._edges_waited < self._body.patience_steps:
            self._edges_waited += 1
            return True
        self._body.gradients.is_wanted = pending
        self._edges_waited = 0
        self._is_save_postponed = self._is_stop_postponed = False
        return False

    def _exhausted(self) -> str | None:
        """Why the data has no further step; None if it has one, or does not know."""
        loader = self._cursor.positioned if self._cursor is not None else None
        return loader.ended() if loader is not None else None

    def _raise_if_halted(self, opened: Opened) -> None:
        reasons = [reason for reason in opened.world.all_gather(self._halting) if reason is not None]
        if reasons:
            raise Halted(reason=reasons[0], step=self._step, run=self.directory)

    def _agree(self, opened: Opened) -> Flags:
        """What any rank asked for, known to all at the same step."""
        is_due = opened.clock.is_due_by_clock() or self._is_save_asked
        self._is_save_asked = False
        waits_since_s = self._stop_waits_since_s
        agreed = self._ballots.agree(
            opened,
            Flags(
                is_stop_asked=opened.is_stop_asked(),
                is_save_due=is_due,
                is_bad=self._bad is not None,
                is_lost=opened.is_lost,
                is_hurried=opened.emergency.is_hurried(),
                is_overdue=waits_since_s is not None and time.monotonic() - waits_since_s > _STOP_WAITS_S,
            ),
        )
        # A save at the edge where the vote went out was the answer to it.
        is_answered = opened.world.size > 1 and self._tried_step == self._step - 1
        return replace(agreed, is_save_due=agreed.is_save_due and not is_answered)

    # ---- metrics ----

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
            self._body.gradients.is_wanted = self._body.has_pending_gradients
            self._read_metrics(opened, before=lambda: opened.emergency.dump(self._step, self._counters, why=why))

    def _leave_in_hurry(self, opened: Opened) -> None:
        """End without an ordinary save, and without another word to the other ranks: some may be gone already."""
        self._ballots.forget()
        self._ending = opened.noticed or StopReason("asked", "another rank")
        opened.emergency.is_leaving = True
        self._body.gradients.is_wanted = self._body.has_pending_gradients
        self._read_metrics(opened, before=lambda: opened.emergency.leave(self._step, self._counters))
        opened.recorder.fact("stop", step=self._step, reason=self._ending.sentence(), by=self._ending.kind)
        if self._halting is not None:
            # Not asked of the others as elsewhere: whoever knows of it says it.
            raise Halted(reason=self._halting, step=self._step, run=self.directory)

    def _save(self, kind: str, *, unfinished: Sequence[str] = (), rng: Callable[[], State] | None = None) -> None:
        """Save the state as it is now; ``unfinished`` names what a step that was given up has moved."""
        opened = self._open
        self._read_metrics(opened, durable=kind != PERIODIC)
        if opened.world.size > 1 and any(bad is not None for bad in opened.world.all_gather(self._bad)):
            self._raise_non_finite(opened)
        asked_s = time.monotonic()
        self._settle_last(opened)
        waited_s = time.monotonic() - asked_s
        if waited_s > _WORTH_TELLING_S:
            _log.info("previous save still running: waited %.1f s (raise save_steps to avoid this)", waited_s)
        opened.look_for_unsaved()
        opened.clock.save_began()
        self._tried_step = self._step
        opened.recorder.fact("save", step=self._step, save_kind=kind, waited_s=waited_s)
        # Of this very step: a loss on val/ from before would make of a later checkpoint the best one.
        metrics = {name: float(value) for name, value in self._measures.of_step(self._step).items()}
        account = self._settle_served(opened)
        facts: dict[str, Any] = {"job": opened.lease.number}
        if unfinished:
            facts[UNFINISHED] = list(unfinished)
        request = Request(self._step, kind, dict(self._counters), metrics, facts, account)
        opened.saver.start(request, rng or (lambda: capture_generators(generator_devices())))
        self._body.gradients.is_wanted = False

    def _settle_served(self, opened: Opened) -> Callable[[], Mapping[str, Any]] | None:
        """Add up over the ranks what the data has served; the proof that it is each sample once is left to the save."""
        loader = self._cursor.positioned if self._cursor is not None else None
        if loader is None:
            return None
        return loader.settle_served(functools.reduce(operator.add, opened.world.all_gather(loader.served_share())))

    def _save_and_wait(
        self, opened: Opened, kind: str, *, unfinished: Sequence[str] = (), rng: Callable[[], State] | None = None
    ) -> None:
        self._save(kind, unfinished=unfinished, rng=rng)
        refused = self._settle_last(opened)
        if refused is not None:
            raise refused

    def _settle_last(self, opened: Opened, timeout_s: float | None = None) -> UnbrokenError | None:
        """Wait for the save in flight, if there is one, and write down how it ended."""
        opened.saver.wait(timeout_s)
        saved = opened.saver.collect()
        return self._note(saved) if saved is not None else None

    def _note(self, saved: Saved) -> UnbrokenError | None:
        opened = self._open
        if saved.error is None:
            self._saved_step = saved.request.step
        refused = note_save(opened, saved)
        if saved.name is not None and self._on_commit is not None and opened.world.is_first:
            _call_back(self._on_commit, opened.layout.checkpoints / saved.name)
        return refused


def _call_back(on_commit: Callable[[Path], object], path: Path) -> None:
    try:
        on_commit(path)
    except Exception:  # noqa: BLE001 - the caller's own code: the checkpoint is committed, and training continues
        _log.exception("on_commit raised for %s; training continues", path)


def _is_raising(frame: FrameType) -> bool:
    """Whether an exception is on its way up through a frame.

    A loop that is left by ``break`` and one that is left by an exception close their iterator alike, and Python shows
    the exception to neither. But its traceback has an entry for this frame at this very instruction.
    """
    return any(
        isinstance(each, TracebackType) and each.tb_frame is frame and each.tb_lasti == frame.f_lasti
        for each in gc.get_referrers(frame)
    )


def _end_at_exit(reference: "weakref.ref[Run]") -> None:
    """End a run that was entered without ``with`` and is still open when the interpreter ends."""
    run = reference()
    if run is None or run._opened is None:
        return
    error = getattr(sys, "last_value", None)
    try:
        run._leave(run._opened, error)
    except UnbrokenError as refused:
        _log.error("%s", refused)
