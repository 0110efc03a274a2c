"""One job of a run, on one rank: how it enters its loop, and how it leaves the loop and the run.

``Run`` is the handle a script holds and may enter again and again; a ``Job`` is one such opening. What it does at each
step's edge it has from ``StepEdges``.
"""

from typing import Final

from unbroken.errors import Halted, LeftMidStep, LoopsDisagree, PeerLost
from unbroken.loop.edge import StepEdges
from unbroken.loop.opened_run import OpenRun
from unbroken.loop.save_result import LAST_SAVE_WAIT_S
from unbroken.quoting.log import logger
from unbroken.records.outcome import Outcome, conclude
from unbroken.records.stop import StopReason
from unbroken.store.names import FINAL

_log = logger(__name__)
# Where one is known to be gone, only what the others have already sent can still arrive.
LOST_RANK_WAIT_S: Final = 10.0


class Job(StepEdges):
    """A run that is entered: its loop, and how it ends."""

    # ---- entering and leaving the loop ----

    def start_loop(self, total: int) -> None:
        """The loop starts, for the first time or again.

        Raises:
            Halted: the data is exhausted.
        """
        if self.is_in_body:
            _log.warning(
                "step %s was left by an exception and is computed again on the state as it is: "
                "its result may differ from an uninterrupted run",
                f"{self.step + 1:,}",
            )
            self.is_in_body = False
        if self.ending is not None and self.ending.kind == "done":
            # A loop in several parts: the target of the one before is not the end.
            self.ending = self.opened.noticed = None
        self.target, self.is_left = total, False
        self.opened.recorder.snapshot(step=self.step, max_steps=total)
        self.opened.clock.resume_clock()
        if self.step < total and (exhausted := self._exhausted()) is not None:
            # Nothing has changed since the checkpoint it resumed from: there is nothing to save.
            raise Halted(reason=exhausted, step=self.step, run=self.opened.layout.run)
        if self.step >= total and self.opened.world.is_first:
            past = f"step {self.step:,} of {total:,} is already reached"
            if self.step > total:
                past = f"the run is at step {self.step:,}, past its target of {total:,}"
            _log.info("nothing to do: %s", past)
        if self.step < total:
            self.opened.saver.prepare(most_bytes=self.opened.settings.staging_memory_bytes)
        self.is_raised = False
        self.checks.loop_starts(self.opened.settings.accept)
        self.body.loop_starts()

    def end_loop(self) -> None:
        """The loop has ended: target reached, or stopped."""
        self.ending = self.ending or StopReason("done")
        self.votes.drain()
        self.read_metrics(durable=True)

    def end_by_loop(self) -> None:
        """The loop was left inside a body: save the last completed step, and end as the loop decided.

        Nothing is raised here: Python drops what an iterator raises while it is closed. ``leave`` raises it.
        """
        self.is_in_body = False
        try:
            self._save_left()
        except BaseException as refused:  # noqa: BLE001 - raised again by whoever leaves the run
            self.refused = refused

    def _save_left(self) -> None:
        self.is_left = True
        left = self.body.left()
        if not self.votes.leave(self.opened):
            raise LoopsDisagree(run=self.opened.layout.run, step=self.step)
        # Every rank has left; all must know whether at the same place.
        everywhere = self.opened.world.all_gather((self.step, left.is_complete))
        if left.is_complete is None or len(set(everywhere)) > 1:
            raise LeftMidStep(run=self.opened.layout.run, step=self.step + 1, resumable_step=self._saved_step)
        if left.is_complete:
            self.step += 1
            self.logged.close_step(self.step)
        else:
            self.logged.drop_step()
            self.counters = self.body.rewind()
        self.ending = self._reason_to_leave()
        self.opened.recorder.event("stop", step=self.step, reason=self.ending.sentence(), by=self.ending.kind)
        if self.opened.world.is_first:
            _log.info("the loop was left: %s", self.ending.sentence())
        kind = FINAL if self.ending.kind == "done" else self.opened.kind_of_stop(self.step)
        moved = sorted({name for names in self.opened.world.all_gather(left.moved) for name in names})
        if moved and self._saved_step == self.step:
            # The last edge is saved already, exactly.
            self.read_metrics(durable=True)
            return
        standing = self.body.standing
        self._want_gradients(standing.needed_of_left() if left.is_complete else standing.needed_of_edge())
        rng = None if left.is_complete else self.body.rng_at_edge
        self._save_and_wait(kind, unfinished=moved, rng=rng)
        self.opened.recorder.snapshot(step=self.step)
        self._raise_if_halted()

    def _reason_to_leave(self) -> StopReason:
        """Why the loop was left: the reason given to ``stop`` or ``finish``, else its own decision."""
        self.opened.is_stop_asked()
        asked = next((each for each in self.opened.world.all_gather(self.opened.noticed) if each is not None), None)
        where = f"ended by the loop at step {self.step:,} of {self.target or 0:,}"
        if asked is None:
            return StopReason("done", where)
        return StopReason("done", f"{where}: {asked.detail}") if asked.kind == "done" else asked

    # ---- leaving the run ----

    def leave(self, error: BaseException | None) -> None:
        """Finish the save in flight, record how the job ended, and release the run.

        Raises:
            BaseException: what ending the loop or the last save came to, where ``error`` is None; or the failure of
                another rank that ``error`` follows from.
        """
        try:
            cause = self.opened.ending_of(error) if error is not None else None
            # A save in flight is of a step before the error: it is worth finishing, while the others take part.
            is_rank_lost = isinstance(cause or self.refused, PeerLost)
            wait_s = _last_wait_s(self.opened, error or self.refused, is_rank_lost=is_rank_lost)
            refused = self.refused or self.settle_last(wait_s)
            if error is None and refused is None and not self.opened.emergency.is_leaving:
                self.opened.finish_mirrors()
        except KeyboardInterrupt as at_once:
            # Interrupted while it waits: the outcome is recorded and the run released all the same.
            self._close(at_once)
            raise
        self._close(cause or refused or self.ending or self._unbegun())
        if error is None and refused is not None:
            raise refused
        if isinstance(cause, BaseException) and cause is not error:
            raise cause

    def _unbegun(self) -> StopReason:
        """The outcome of a job whose loop never ran: a run that was completed stays so."""
        ends = [event for event in self.opened.recorder.history().events if event.kind == "job-end"]
        is_completed = bool(ends) and ends[-1].text("status") == "completed"
        return StopReason("done" if is_completed else "asked", "opened and closed without training")

    def _close(self, ending: StopReason | BaseException) -> None:
        self.is_in_body = False
        self.body.close()
        outcome = conclude(ending, step=self.step, job=self.opened.lease.number)
        self.opened.close(outcome)
        if self.opened.world.is_first:
            _log_end(outcome, target=self.target or 0)


def _last_wait_s(opened: OpenRun, error: BaseException | None, *, is_rank_lost: bool) -> float | None:
    """How long to wait for the save in flight: to its end, but not for ever after an error, nor in a hurry."""
    if isinstance(error, KeyboardInterrupt) or opened.emergency.is_leaving:
        return 0.0
    if is_rank_lost and not opened.saver.is_committing:
        return LOST_RANK_WAIT_S
    return None if error is None else LAST_SAVE_WAIT_S


def _log_end(outcome: Outcome, *, target: int) -> None:
    """Log how the job ended, and what the same command would do next."""
    where = "" if outcome.step is None else f" at step {outcome.step:,}"
    if outcome.status == "completed":
        of = f" of {target:,}" if target and target == outcome.step else ""
        why = f" ({outcome.reason})" if outcome.reason and not outcome.reason.startswith("the target") else ""
        _log.info("run completed%s%s%s", where, of, why)
    elif outcome.status == "stopped":
        _log.info("job stopped%s: %s; the same command resumes the run", where, outcome.reason)
    else:
        next_step = {"again": "the same command resumes the run", "look": "look at the error before starting it again"}
        _log.error("job ended%s: %s; %s", where, outcome.reason, next_step.get(outcome.verdict, outcome.verdict))
