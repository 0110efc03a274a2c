"""The run that a job has open on one rank, and how it is closed and its lease released."""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbroken.errors import StorageFailed
from unbroken.loop.emergency import Emergency
from unbroken.loop.loader_workers import is_worker_death
from unbroken.loop.mirrors import RunMirrors
from unbroken.loop.peers import Peers
from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.mirror.direct import DirectStore
from unbroken.quoting.log import logger
from unbroken.records.drill import Drill, read_drill
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease, Renewal
from unbroken.records.outcome import Outcome, conclude
from unbroken.records.stop import StopReason, StopSources, end_requests
from unbroken.state.cursor import Cursor
from unbroken.state.items import Item
from unbroken.state.restore import Restored
from unbroken.state.save import Saver
from unbroken.store.names import SHUTDOWN
from unbroken.world import World

# ---- drills ----

_log = logger(__name__)
# Before the walltime ends, for the records of the end.
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Drilled:
    """The drill that a job follows on one rank, its faults installed."""

    drill: Drill
    strike: Callable[[], None] | None = None

    def applied(self, directory: Path, settings: Settings) -> tuple[Path, Settings]:
        """Where the run really is, and its settings."""
        # Metrics read at every step survive a kill: every lost step is compared when it is computed again.
        save_steps = self.drill.save_steps or settings.save_steps
        # Never to the object store or the trackers of the real run.
        changed = replace(settings, save_steps=save_steps, logging_steps=1, checkpoints=None, trackers=())
        return self.drill.directory or directory, changed

    def is_over_at(self, step: int) -> bool:
        """Let faults strike at a step's edge; whether the drill ends the job there. Each rank knows it by itself."""
        if self.strike is not None:
            self.strike()
        return self.drill.stop_at == step


def find_drill(world: World) -> Drilled | None:
    """The drill of this job, installed before anything is opened on the disk; None for a real job. Collective.

    Raises:
        DrillUnreadable: this is a drill whose file cannot be read.
    """
    drill = world.all_or_none(lambda: read_drill(os.environ))
    if drill is None:
        return None
    if world.is_first:
        _log.warning("this is a drill, not a real job: %s", drill)
    if not drill.faults:
        return Drilled(drill)
    # By name: nothing here may import the fault injection, and a real job never loads it.
    strike: Callable[[], None] = importlib.import_module("unbroken.prove.fault_injection").install(drill, world.rank)
    return Drilled(drill, strike)


# ---- the open run ----


@dataclass
class OpenRun:
    """A run that this job has open, on one rank."""

    layout: Layout
    world: World
    lease: Lease
    renewal: Renewal | None
    recorder: SilentRecorder
    stops: StopSources
    clock: SaveClock
    saver: Saver
    restored: Restored | None
    resumed_from: str | None
    settings: Settings
    emergency: Emergency
    peers: Peers
    cursor: Cursor[Any] | None = None
    drilled: Drilled | None = None
    noticed: StopReason | None = None
    look_for_unsaved: Callable[[], None] = lambda: None
    items: Sequence[Item] = ()
    mirrors: RunMirrors | None = None
    direct: DirectStore | None = None
    last_commit: str | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken the run, as far as this rank knows; only the first one does."""
        is_superseded = self.direct is not None and self.direct.lost is not None
        return is_superseded or (self.renewal is not None and self.renewal.lost is not None)

    def path_of(self, checkpoint: str) -> Path:
        """Where a checkpoint of this run is: a path, or an address in an object store."""
        return self.layout.checkpoints / checkpoint if self.direct is None else self.direct.store().path(checkpoint)

    def require_held(self) -> None:
        """Pass if no other job has taken the run. Collective.

        Raises:
            LeaseLost: one has.
            Superseded: the same, for a run that saves straight to an object store.
        """
        self.world.from_first(self._require_held)

    def _require_held(self) -> None:
        if self.renewal is not None and self.renewal.lost is not None:
            raise self.renewal.lost
        if self.direct is not None and self.direct.lost is not None:
            raise self.direct.lost

    def is_stop_asked(self) -> bool:
        """Whether this rank has a stop request, from now or before."""
        # Kept: the flag file is read once a second, and would not be read again when the reason is recorded.
        self.noticed = self.noticed or self.stops.look()
        return self.noticed is not None

    def is_drill_over(self, step: int) -> bool:
        """Whether a drill, which may strike at this edge, ends the job here."""
        if self.drilled is None or not self.drilled.is_over_at(step):
            return False
        self.noticed = self.noticed or StopReason("asked", "by a drill")
        return True

    def kind_of_stop(self, step: int) -> str:
        """What the save of a stop at this edge is called: a drill may end where the script would only have saved."""
        drill = None if self.drilled is None else self.drilled.drill
        return SHUTDOWN if drill is None or drill.stop_at != step else drill.stops_as

    def agree_on_reason(self) -> StopReason:
        """Why all ranks stop: the first reason that any of them has. Collective."""
        reasons = [reason for reason in self.world.all_gather(self.noticed) if reason is not None]
        # A loop that is finished stays finished, though a signal came at the same step.
        finished = next((reason for reason in reasons if reason.kind == "done"), None)
        return finished or (reasons[0] if reasons else StopReason("asked", "another rank"))

    def ending_of(self, error: BaseException) -> StopReason | BaseException:
        """What an error that ended the loop really is: itself, the first failure of another rank, or the stop.

        A loader worker that a stop signal killed breaks a step in the middle, where the state is not whole: the job is
        stopped, and nothing is saved.
        """
        signalled = self.stops.signalled
        if signalled is None or not is_worker_death(error):
            return self.peers.settle(error)
        detail = f"{signalled.detail}, which killed a loader worker too: nothing was saved after the last checkpoint"
        self.peers.report(conclude(stop := StopReason("signal", detail)))
        _log.warning("stopped in the middle of a step: %s; pass the loader to Run as data= to avoid this", detail)
        return stop

    def finish_mirrors(self) -> None:
        """Wait for uploads as long as there is time, and sweep what was held for them."""
        if self.mirrors is None:
            return
        deadline_s = self.stops.deadline_s
        longest_s = None if deadline_s is None else max(deadline_s - time.time() - _LAST_SECONDS, 0.0)
        self.mirrors.finish(longest_s=longest_s, signalled=lambda: self.stops.signalled)
        if self.last_commit is not None:
            self.saver.sweep_again(self.last_commit)

    def close(self, outcome: Outcome) -> None:
        """Record how the job ended and release the run."""
        with contextlib.ExitStack() as closing:
            # From the last to the first, each though another fails. Signals are caught until all is done: torchrun
            # sends one as soon as any rank has failed.
            closing.callback(self.stops.restore)
            closing.callback(self.world.close)
            closing.callback(self.saver.close)
            if self.mirrors is not None:
                closing.callback(self.mirrors.close)
            if self.cursor is not None:
                closing.callback(self.cursor.close)
            if self.renewal is not None:
                is_followed = outcome.status in ("stopped", "completed")
                closing.callback(release_run, self.layout, self.renewal, is_followed=is_followed)
            self.recorder.end(outcome, waits=not self.peers.is_first_to_fail)


def release_run(layout: Layout, renewal: Renewal, *, is_followed: bool) -> None:
    """Release the lease; ``is_followed`` says that a stop request, if there was one, was carried out."""
    # The job is over and its checkpoints are committed: a failure here is logged, and the lease expires by itself.
    try:
        if is_followed:
            end_requests(layout)
    except StorageFailed as refused:
        _log.warning("could not remove the stop request: %s", refused.message)
    try:
        renewal.end()
    except StorageFailed as refused:
        _log.warning("could not release the lease; it expires by itself: %s", refused.message)
