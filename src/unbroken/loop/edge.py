"""The edge of a step on one rank, where the state is whole: votes, saves, stops.

``StepEdges.edge`` is called after each step: metrics are read, the ranks agree on what is due, and a save or a stop is
carried out, or waits for an optimizer step. ``Job`` adds how a job enters and leaves its loop.
"""

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.errors import (
    Halted,
    LoopsDisagree,
    NeedsPickle,
    NonFiniteLoss,
    RankFailed,
    UnbrokenError,
)
from unbroken.loop.carry import Carried
from unbroken.loop.logged_metrics import LoggedMetrics, NonFinite, first_non_finite
from unbroken.loop.loop_checks import LoopChecks
from unbroken.loop.opened_run import OpenRun
from unbroken.loop.resume import UNFINISHED, UNSAVED_GRADIENTS
from unbroken.loop.save_result import LAST_SAVE_WAIT_S, note_save
from unbroken.loop.step_body import StepBody
from unbroken.loop.trackers import TRACKERS
from unbroken.loop.votes import NOTHING_DUE, Flags, Votes
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason
from unbroken.state.cursor import Cursor
from unbroken.state.items import State
from unbroken.state.rng import capture_rng, rng_devices
from unbroken.state.save import Request, Saved
from unbroken.state.trainer_state import COUNTERS
from unbroken.store.names import FINAL, PERIODIC

_log = logger(__name__)
_WORTH_LOGGING_S: Final = 1.0
# How long a stop may wait for an optimizer step before the gradients are saved as they are.
_STOP_WAITS_S: Final = 10.0


class StepEdges:
    """What one job has come to on one rank, and what it does at each step's edge."""

    def __init__(
        self,
        opened: OpenRun,
        cursor: Cursor[Any] | None,
        carried: Carried,
        on_commit: Callable[[Path], object] | None,
        *,
        is_rng_moved: bool = False,
    ) -> None:
        self.opened, self.cursor, self.carried, self._on_commit = opened, cursor, carried, on_commit
        self.step = 0
        self.counters: dict[str, Any] = {}
        self._saved_step: int | None = None
        if (restored := opened.restored) is not None:
            self.step = self._saved_step = restored.step
            self.counters = dict(restored.counters)
        self.body = StepBody(opened.items, cursor, carried, accept=opened.settings.accept)
        self.checks = LoopChecks(opened, cursor, carried, is_rng_moved=is_rng_moved)
        self.logged = LoggedMetrics()
        self.votes = Votes()
        self.is_in_body = False
        # Whether the body was left by an exception; whether it was left, and is no edge.
        self.is_raised = self.is_left = False
        self.target: int | None = None
        # How the loop ended, and what was raised where nothing could be.
        self.ending: StopReason | None = None
        self.refused: BaseException | None = None
        self.halting: str | None = None
        self._bad: NonFinite | None = None
        self.is_save_requested = self.is_save_agreed = self.is_dump_requested = False
        self._tried_step: int | None = None
        # Whether the memory for the first save was asked for after a step.
        self._is_prepared = False
        # A save or a stop that waits for an optimizer step, for how many edges, and since when.
        self._is_save_postponed = self._is_stop_postponed = False
        self._edges_waited = 0
        self._stop_waits_since_s: float | None = None
        self._is_postponement_logged = False

    # ---- a step's edge ----

    def edge(self, total: int) -> None:
        """A step is complete: do what is due. ``Run.steps`` lists what it raises."""
        opened, body = self.opened, self.body
        self.logged.close_step(self.step)
        opened.clock.step_done()
        body.end()
        if not self.checks.is_over:
            self.checks.edge_reached(body.draws)
        if body.standing.notices:
            self._say_of_gradients()
        if self.counters:
            _require_plain_counters(self.counters)
        if self.is_dump_requested:
            self.is_dump_requested = False
            self.dump(why="run.save_emergency was called")
        agreed = self._agree()
        if agreed.has_left:
            raise LoopsDisagree(run=opened.layout.run, step=self.step)
        if agreed.is_stop_asked and agreed.is_hurried:
            self._leave_in_hurry()
            return
        if agreed.is_lost:
            opened.require_held()
        if (saved := opened.saver.collect()) is not None:
            self._note(saved)
        if agreed.is_bad:
            self._raise_non_finite()
        self._save_where_due(total, self._is_stop_due(total, agreed), agreed)
        if not self._is_prepared and self.step < total and self.ending is None:
            self._is_prepared = True
            opened.saver.prepare(most_bytes=opened.settings.staging_memory_bytes, has_stepped=True)
        opened.recorder.reached(self.step)
        opened.clock.resume_clock()

    def _is_stop_due(self, total: int, agreed: Flags) -> bool:
        stop = agreed.is_stop_asked or self._is_stop_postponed
        if self.cursor is not None and self.step < total and (exhausted := self._exhausted()) is not None:
            # Every rank knows it by itself: no vote is needed.
            self.halting = self.halting or exhausted
            self.opened.noticed = self.opened.noticed or StopReason("asked", exhausted)
            stop = True
        return (self.opened.drilled is not None and self.opened.is_drill_over(self.step)) or stop

    def _save_where_due(self, total: int, stop: bool, agreed: Flags) -> None:
        is_by_all, self.is_save_agreed = self.is_save_agreed, False
        is_due = agreed.is_save_due or self._is_save_postponed or self.opened.clock.is_due_by_step(self.step)
        is_last = self.step >= total
        is_wanted = is_last or stop or is_due or is_by_all
        if is_wanted and self._must_wait(can_wait=not (is_last or is_by_all or agreed.is_overdue)):
            self._is_save_postponed, self._is_stop_postponed = self._is_save_postponed or is_due, stop
            self._log_postponed(stop=stop)
        elif is_last:
            self._save_and_wait(FINAL)
            self._raise_if_halted()
        elif stop:
            self._stop_here()
        elif is_wanted:
            self._save(PERIODIC)
        elif self.step % self.opened.settings.logging_steps == 0:
            self.read_metrics()

    def _log_postponed(self, *, stop: bool) -> None:
        """Log once why a save or a stop waits."""
        if stop and self._stop_waits_since_s is None:
            self._stop_waits_since_s = time.monotonic()
            self._is_postponement_logged = False
        if not self._is_postponement_logged and self.opened.world.is_first:
            what = "the stop" if stop else "the save"
            _log.info(
                "%s waits for the next optimizer step: gradients are pending (at most %s steps)",
                what,
                self.body.patience_steps,
            )
        self._is_postponement_logged = True

    def _stop_here(self) -> None:
        self.ending = self.opened.agree_on_reason()
        self.opened.recorder.event("stop", step=self.step, reason=self.ending.sentence(), by=self.ending.kind)
        if self.opened.world.is_first:
            _log.info("stopping at step %s: %s", f"{self.step:,}", self.ending.sentence())
        is_done = self.ending.kind == "done"
        self._save_and_wait(FINAL if is_done else self.opened.kind_of_stop(self.step))
        self._raise_if_halted()

    def _must_wait(self, *, can_wait: bool) -> bool:
        """Whether a save waits for the next edge with an optimizer step; after a bound the gradients are saved too."""
        pending = self.opened.world.any_rank(self.body.has_pending_gradients)
        if pending and can_wait and self._edges_waited < self.body.patience_steps:
            self._edges_waited += 1
            return True
        if pending:
            self._want_gradients(self.body.gradients.every)
        else:
            self._want_gradients(self.body.standing.needed())
        self._edges_waited = 0
        self._is_save_postponed = self._is_stop_postponed = False
        return False

    def _want_gradients(self, mine: frozenset[str]) -> None:
        """Let the next save contain the gradients of these optimizers, and of those that other ranks name. Collective.

        A model that only one rank has seen to be trained with gradients of an earlier step is trained so by all.
        """
        gradients = self.body.gradients
        everybody = self.opened.world.all_gather((mine, gradients.carried))
        self.body.standing.agree(frozenset[str]().union(*(carried for _, carried in everybody)))
        gradients.wanted = frozenset[str]().union(*(wanted for wanted, _ in everybody))

    def _want_own_gradients(self) -> None:
        """The same for a dump, which waits for no other rank."""
        body = self.body
        body.gradients.wanted = body.gradients.every if body.has_pending_gradients else body.standing.needed()

    def _say_of_gradients(self) -> None:
        standing = self.body.standing
        for notice in standing.notices:
            self.checks.say(notice)
        standing.notices.clear()
        self.is_save_requested = self.is_save_requested or standing.is_save_due
        standing.is_save_due = False

    def _exhausted(self) -> str | None:
        """Why the data has no further step; None if it has one, or does not know."""
        loader = self.cursor.positioned if self.cursor is not None else None
        return loader.ended() if loader is not None else None

    def _raise_if_halted(self) -> None:
        reasons = [reason for reason in self.opened.world.all_gather(self.halting) if reason is not None]
        if reasons:
            raise Halted(reason=reasons[0], step=self.step, run=self.opened.layout.run)

    def _agree(self) -> Flags:
        """What any rank voted for, known to all at the same step."""
        opened = self.opened
        is_due = opened.clock.is_due_by_clock() or self.is_save_requested
        self.is_save_requested = False
        is_stop_asked, is_bad, is_lost = opened.is_stop_asked(), self._bad is not None, opened.is_lost
        if opened.world.size == 1 and not (is_stop_asked or is_due or is_bad or is_lost):
            # As at nearly every edge: nothing is made for it. The rest only says what is to be done with a stop.
            return NOTHING_DUE
        waits_since_s = self._stop_waits_since_s
        is_overdue = waits_since_s is not None and time.monotonic() - waits_since_s > _STOP_WAITS_S
        flags = Flags(is_stop_asked, is_due, is_bad, is_lost, opened.emergency.is_hurried(), is_overdue)
        if opened.world.size == 1:
            return flags
        agreed = self.votes.agree(opened, flags)
        # A save at the edge where the vote went out was the answer to it.
        return agreed._replace(is_save_due=False) if self._tried_step == self.step - 1 else agreed

    # ---- metrics ----

    def read_metrics(self, *, durable: bool = False, before: Callable[[], object] | None = None) -> None:
        """Read what was logged since the last time; ``before`` is done first if every metric is finite."""
        rows = self.logged.read()
        if self.opened.settings.non_finite == "stop":
            self._bad = self._bad or first_non_finite(rows, self.opened.settings.non_finite_metrics)
        if before is not None and self._bad is None:
            before()
        self.opened.recorder.metrics_of(rows)
        self.opened.recorder.flush(durable=durable)
        self.opened.recorder.snapshot(**_shown(self.logged))
        if self._bad is not None and self.opened.world.size == 1:
            self._raise_non_finite()

    def _raise_non_finite(self) -> None:
        """Every rank raises at the same edge, though only one may have met it."""
        # The save in flight is of a step before it: the message names the newest checkpoint.
        self.settle_last(LAST_SAVE_WAIT_S)
        for rank, bad in enumerate(self.opened.world.all_gather(self._bad)):
            if bad is not None:
                found = NonFiniteLoss(
                    step=bad.step, metric=bad.metric, value=str(bad.value), resumable_step=self._saved_step
                )
                raise found if rank == self.opened.world.rank else RankFailed(rank=rank, cause=found)

    # ---- saving ----

    def dump(self, *, why: str) -> None:
        """Dump this rank's state, where there is a directory for it and the last loss is finite."""
        if self.opened.emergency.is_ready:
            self._want_own_gradients()
            self.read_metrics(before=lambda: self.opened.emergency.dump(self.step, self.counters, why=why))

    def _leave_in_hurry(self) -> None:
        """Stop without an ordinary save, and without another exchange with the other ranks: some may be gone."""
        self.votes.forget()
        self.ending = self.opened.noticed or StopReason("asked", "another rank")
        self.opened.emergency.is_leaving = True
        self._want_own_gradients()
        self.read_metrics(before=lambda: self.opened.emergency.leave(self.step, self.counters))
        self.opened.recorder.event("stop", step=self.step, reason=self.ending.sentence(), by=self.ending.kind)
        if self.halting is not None:
            # Not exchanged as elsewhere: the rank that knows it raises it.
            raise Halted(reason=self.halting, step=self.step, run=self.opened.layout.run)

    def _save(self, kind: str, *, unfinished: Sequence[str] = (), rng: Callable[[], State] | None = None) -> None:
        """Save the state as it is now; ``unfinished`` names what an abandoned step has changed."""
        self.read_metrics(durable=kind != PERIODIC)
        if self.opened.world.any_rank(self._bad is not None):
            self._raise_non_finite()
        waiting_since_s = time.monotonic()
        self.settle_last()
        waited_s = time.monotonic() - waiting_since_s
        if waited_s > _WORTH_LOGGING_S:
            _log.info("previous save still running: waited %.1f s (raise save_steps to avoid this)", waited_s)
        self.opened.look_for_unsaved()
        self.checks.save_starts(self.step)
        self.opened.clock.save_started()
        self._tried_step = self.step
        self.opened.recorder.event("save", step=self.step, save_kind=kind, waited_s=waited_s)
        # Of this step alone: with an earlier validation loss a later checkpoint would count as the best.
        metrics = {name: float(value) for name, value in self.logged.of_step(self.step).items()}
        account = self._settle_served()
        metadata: dict[str, Any] = {"job": self.opened.lease.number}
        if unfinished:
            metadata[UNFINISHED] = list(unfinished)
        if ids := self.opened.recorder.tracker_ids:
            metadata[TRACKERS] = dict(ids)
        unsaved = self.body.standing.saved(self.step, self.body.gradients.wanted)
        if unsaved and not self.is_left:
            metadata[UNSAVED_GRADIENTS] = unsaved
        request = Request(self.step, kind, dict(self.counters), metrics, metadata, account)
        self.opened.saver.start(request, rng or (lambda: capture_rng(rng_devices())))
        self.body.gradients.wanted = frozenset()

    def _settle_served(self) -> Callable[[], Mapping[str, Any]] | None:
        """Sum over the ranks what the data has served; the save checks that it is each sample once."""
        loader = self.cursor.positioned if self.cursor is not None else None
        if loader is None:
            return None
        return loader.settle_served(functools.reduce(operator.add, self.opened.world.all_gather(loader.served_share())))

    def _save_and_wait(
        self, kind: str, *, unfinished: Sequence[str] = (), rng: Callable[[], State] | None = None
    ) -> None:
        self._save(kind, unfinished=unfinished, rng=rng)
        refused = self.settle_last()
        if refused is not None:
            raise refused

    def settle_last(self, timeout_s: float | None = None) -> UnbrokenError | None:
        """Wait for the save in flight, if there is one, and record how it ended."""
        self.opened.saver.wait(timeout_s)
        saved = self.opened.saver.collect()
        return self._note(saved) if saved is not None else None

    def _note(self, saved: Saved) -> UnbrokenError | None:
        if saved.error is None:
            self._saved_step = saved.request.step
        refused = note_save(self.opened, saved)
        if saved.name is not None and self._on_commit is not None and self.opened.world.is_first:
            _call_back(self._on_commit, self.opened.path_of(saved.name))
        return refused


def _call_back(on_commit: Callable[[Path], object], path: Path) -> None:
    try:
        on_commit(path)
    except Exception as raised:  # noqa: BLE001 - the caller's own code: training continues
        _log.exception("on_commit raised %s: %s for %s; training continues", type(raised).__name__, raised, path)


def _shown(logged: LoggedMetrics) -> dict[str, object]:
    """What the live snapshot shows of the metrics that were read last, where the loop logs them."""
    tokens = logged.latest.get("tokens")
    return {
        "loss": logged.number("loss"),
        "loss_step": logged.steps.get("loss"),
        "learning_rate": logged.number("lr"),
        "tokens_per_s": logged.number("tokens_per_s"),
        "tokens": tokens if isinstance(tokens, int) else None,
    }


def _require_plain_counters(counters: Mapping[str, object]) -> None:
    """Reject a tensor among the counters at the first edge, not at the first save hours later.

    Raises:
        NeedsPickle: a counter is a tensor.
    """
    for name, value in counters.items():
        if isinstance(value, torch.Tensor):
            raise NeedsPickle(item=COUNTERS, path=f"{COUNTERS}.{name}", type_name="Tensor")
