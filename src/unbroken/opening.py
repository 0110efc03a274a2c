"""Taking a run: lease, records, audit, resume. What a loop holds from then on is an ``Opened``."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from unbroken import amounts
from unbroken.errors import ItemsDiffer, NotExact, NotShared, StorageFailed, UnbrokenError, UnsavedState
from unbroken.launch import outcome_file
from unbroken.pace import SaveClock
from unbroken.recorder import Recorder, SilentRecorder, tell_launcher_of_refusal
from unbroken.run.cadence import Auto, Every, Pace, mean_time_between_failures_s
from unbroken.run.deadline import Deadline, find_deadline, learned_reserve
from unbroken.run.layout import Layout, require_directory
from unbroken.run.lease import Holder, Lease, acquire, number_of, read_current, require_held
from unbroken.run.outcome import Outcome, conclude
from unbroken.run.process import host_name, process_of, process_started, this_holder
from unbroken.run.renewal import Renewal
from unbroken.run.stop import StopReason, StopSources, clear_requests, end_requests
from unbroken.settings import Settings
from unbroken.state.audit import audit
from unbroken.state.capture import GENERATORS, require_savable
from unbroken.state.cursor import Cursor, Positioned
from unbroken.state.items import Item, make_items
from unbroken.state.restore import Restored
from unbroken.state.resume import Resumed, resume
from unbroken.state.rng import restore_generators
from unbroken.state.save import Keeping, Saver
from unbroken.store.fields import Malformed
from unbroken.store.keep import compose
from unbroken.store.place import Store
from unbroken.world import World

_log = logging.getLogger(__name__)


@dataclass
class Opened:
    """A run that this job holds, on one rank."""

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
    noticed: StopReason | None = None

    @property
    def is_lost(self) -> bool:
        """Whether another job has taken the run, as far as this rank knows; only the first one does."""
        return self.renewal is not None and self.renewal.lost is not None

    def require_held(self) -> None:
        """Pass if no other job has taken the run. Collective.

        Raises:
            LeaseLost: one has.
        """
        self.world.from_first(self._require_held)

    def _require_held(self) -> None:
        if self.renewal is not None and self.renewal.lost is not None:
            raise self.renewal.lost

    def is_stop_asked(self) -> bool:
        """Whether anybody asked this rank to stop, now or before."""
        # Kept: the flag file is looked at once a second, and would not be seen again when the reason is to be told.
        self.noticed = self.noticed or self.stops.look()
        return self.noticed is not None

    def agree_on_reason(self) -> StopReason:
        """Why all ranks stop: the first reason that any of them has. Collective."""
        reasons = [reason for reason in self.world.all_gather(self.noticed) if reason is not None]
        return reasons[0] if reasons else StopReason("asked", "another rank")

    def close(self, outcome: Outcome) -> None:
        """Write how the job ended and let the run go."""
        try:
            # Signals are caught until the outcome stands: torchrun sends one as soon as any rank has failed.
            self.recorder.end(outcome)
        finally:
            self.stops.restore()
            if self.renewal is not None:
                _let_go(self.layout, self.renewal, is_followed=outcome.status in ("stopped", "completed"))


def _let_go(layout: Layout, renewal: Renewal, *, is_followed: bool) -> None:
    """Release the run; ``is_followed`` says that a request to stop, if there was one, has been followed."""
    # The job is over and what counts is committed: a refusal here is told, and time heals it.
    try:
        if is_followed:
            end_requests(layout)
    except StorageFailed as refused:
        _log.warning("the request to stop could not be removed: %s", refused)
    try:
        renewal.end()
    except StorageFailed as refused:
        _log.warning("the run could not be let go, its lease expires by itself: %s", refused)


def open_run(directory: Path, things: Mapping[str, object], settings: Settings, frame: FrameType | None) -> Opened:
    """Take a run and bring its state to where it was left. Collective.

    Raises:
        RunHeld: another live job has it.
        NotAStore: there is a file where the run's directory is to be.
        ItemsDiffer: the ranks did not hand over the same things.
        NotShared: a rank does not see the directory of the others.
        UnsavedState: live state was not handed over, and the settings refuse that.
        UnbrokenError: it cannot be resumed; the error says why.
    """
    world = World.current()
    layout = Layout(directory)
    # Every phase ends on all ranks or on none: a rank that leaves alone would let the others wait for ever.
    try:
        items = world.all_or_none(lambda: make_items(things))
        _require_alike(items, world)
        lease = world.from_first(lambda: _take(layout))
    except UnbrokenError as refused:
        if world.is_first:
            # Nothing is written into a run that somebody else holds.
            tell_launcher_of_refusal(directory, conclude(refused))
        raise
    renewal = Renewal(directory, lease, clock=time.time) if world.is_first else None
    recorder: SilentRecorder | None = None
    try:
        recorder = world.all_or_none(
            lambda: Recorder(layout, lease, clock=time.time) if world.is_first else SilentRecorder()
        )
        return _open(layout, world, lease, renewal, recorder, items, things, settings, frame)
    except BaseException as refused:
        outcome = conclude(refused, job=lease.number)
        if recorder is not None:
            recorder.end(outcome)
        elif world.is_first:
            tell_launcher_of_refusal(directory, outcome)
        if renewal is not None:
            _let_go(layout, renewal, is_followed=False)
        raise


def _require_alike(items: Sequence[Item], world: World) -> None:
    names = world.all_gather(tuple(sorted(item.name for item in items)))
    if len(set(names)) > 1:
        raise ItemsDiffer(names=tuple(names))


def _take(layout: Layout) -> Lease:
    require_directory(layout.run)
    token = secrets.token_hex(4)
    return acquire(layout.run, this_holder(), token=token, now_s=time.time(), process_of=process_of)


def _open(
    layout: Layout,
    world: World,
    lease: Lease,
    renewal: Renewal | None,
    recorder: SilentRecorder,
    items: list[Item],
    things: Mapping[str, object],
    settings: Settings,
    frame: FrameType | None,
) -> Opened:
    world.all_or_none(lambda: _require_shared(layout, lease, world))
    deadline = world.all_or_none(
        lambda: find_deadline(settings.max_runtime_s, os.environ, started_s=lease.taken_at_s, now_s=time.time())
    )
    processes = [asdict(holder) for holder in (*_launcher(), *world.all_gather(this_holder()))]
    recorder.fact(
        "job-start",
        world=world.size,
        processes=processes,
        deadline_s=deadline.at_s if deadline else None,
        keep=[
            settings.keep_last_k,
            settings.keep_milestone_every,
            settings.keep_every_seconds,
            settings.keep_best,
        ],
    )
    _audit(things, settings, recorder, world, frame)
    clock = world.all_or_none(lambda: _clock(settings, recorder))
    world.from_first(lambda: clear_requests(layout, job=lease.number))
    stops = StopSources(
        layout,
        job=lease.number,
        clock=time.time,
        deadline_s=deadline.at_s if deadline else None,
        reserve=lambda: clock.reserve.seconds(deadline.runtime_s if deadline else None),
    )
    if settings.catch_signals:
        # From here on a signal is a request: a job that is asked to end while it loads ends at its first edge.
        stops.install()
    try:
        loader = _positioned(things)
        if loader is not None:
            loader.accept(settings.accept)
        found = _resume(layout, world, lease, recorder, items, settings)
        if loader is not None and loader.notices:
            _tell_data(loader.notices, recorder, world)
        saver = _saver(layout, world, lease, items, settings, found)
    except BaseException:
        stops.restore()
        raise
    source = str(found.target.store.path(found.target.name)) if found.target else None
    _say_first_lines(layout, world, lease, found, clock, deadline)
    return Opened(layout, world, lease, renewal, recorder, stops, clock, saver, found.restored, source)


def _resume(
    layout: Layout, world: World, lease: Lease, recorder: SilentRecorder, items: list[Item], settings: Settings
) -> Resumed:
    # Before the first hour of training, not after it.
    world.all_or_none(lambda: require_savable(items, settings.allow_pickle))
    found = resume(Store(layout.checkpoints), items, world, settings, job=lease.job)
    _record_resume(found, recorder, settings, world)
    if (restored := found.restored) is not None:
        # Last of all: making a loader's iterator draws from them.
        world.all_or_none(lambda: _draw_on(restored, settings))
    return found


def _positioned(things: Mapping[str, object]) -> Positioned | None:
    data = things.get("data")
    return data.positioned if isinstance(data, Cursor) else None


def _tell_data(notices: Sequence[str], recorder: SilentRecorder, world: World) -> None:
    recorder.fact("data", notices=list(notices))
    for notice in notices if world.is_first else ():
        _log.warning("data: %s", notice)


def _saver(layout: Layout, world: World, lease: Lease, items: list[Item], settings: Settings, found: Resumed) -> Saver:
    store = Store(layout.checkpoints)
    keeping = Keeping(
        store,
        lease.job,
        compose(settings.keep_last_k, settings.keep_milestone_every, settings.keep_every_seconds, settings.keep_best),
        resume_target=found.target.name if found.target and found.target.store.root == store.root else None,
        fence=(lambda: require_held(layout.run, lease)) if world.is_first else None,
        is_live=lambda draft: (number_of(draft.job) or lease.number + 1) > lease.number,
        files_per_rank=settings.files_per_rank,
    )
    return Saver(
        items, world, keeping, allow_pickle=settings.allow_pickle, shares_generators=settings.shared_generators
    )


def _draw_on(restored: Restored, settings: Settings) -> None:
    try:
        restore_generators(restored.generators)
    except Malformed as wrong:
        if GENERATORS not in settings.accept:
            raise NotExact(differences=((GENERATORS, str(wrong)),)) from wrong
        _log.warning("not exact: accepted: %s: %s; they start anew", GENERATORS, wrong)


def _launcher() -> list[Holder]:
    """The process that started this job, if it is ours: a job is killed with its launcher, or it would come back."""
    told = os.environ.get(outcome_file.LAUNCHER, "")
    return [Holder(host_name(), int(told), process_started(int(told)))] if told.isdecimal() else []


def _require_shared(layout: Layout, lease: Lease, world: World) -> None:
    current = read_current(layout.run)
    if current is None or current.token != lease.token:
        raise NotShared(path=layout.run.absolute(), rank=world.rank, host=host_name())


def _audit(
    things: Mapping[str, object],
    settings: Settings,
    recorder: SilentRecorder,
    world: World,
    frame: FrameType | None,
) -> None:
    if settings.audit == "off":
        return
    found = tuple(map(str, audit(things, frame)))
    if settings.audit == "error":
        world.all_or_none(lambda: _refuse(found))
    for unsaved in found if world.is_first else ():
        _log.warning("not handed to the run, so a resume starts it anew: %s", unsaved)
    if found:
        recorder.fact("audit", unsaved=list(found))


def _refuse(found: tuple[str, ...]) -> None:
    if found:
        raise UnsavedState(found=found)


def _clock(settings: Settings, recorder: SilentRecorder) -> SaveClock:
    cadence: Every | Auto | None = None
    if settings.save_steps is not None:
        cadence = Auto() if settings.save_steps == "auto" else Every(settings.save_steps)
    facts = recorder.history().facts
    pace = Pace(0, 0.0, mean_time_between_failures_s=mean_time_between_failures_s(facts))
    return SaveClock(cadence, learned_reserve(facts, settings.reserve_s), _monotonic, pace)


_monotonic: Callable[[], float] = time.monotonic


def _record_resume(found: Resumed, recorder: SilentRecorder, settings: Settings, world: World) -> None:
    for name, reason in found.passed_over:
        recorder.fact("passed-over", name=name, reason=reason)
        if world.is_first:
            _log.warning("passed over %s: %s", name, reason)
    step = found.restored.step if found.restored else 0
    notes = found.restored.notes if found.restored else ()
    recorder.fact(
        "resume",
        step=step,
        name=found.target.name if found.target else None,
        notes=list(notes),
        set_aside=found.set_aside,
    )
    if settings.accept:
        recorder.fact("accept", names=list(settings.accept))
    is_comparable = not settings.accept and not notes and not found.set_aside
    recorder.begin_metrics(step, is_comparable=is_comparable)


def _say_first_lines(
    layout: Layout, world: World, lease: Lease, found: Resumed, clock: SaveClock, deadline: Deadline | None
) -> None:
    if not world.is_first:
        return
    ranks = amounts.plural(world.size, "rank")
    before = found.restored.world if found.restored else world.size
    was = "" if before == world.size else f" (saved by {amounts.plural(before, 'rank')})"
    _log.info("run %s, job %d, %s%s", layout.run, lease.number, ranks, was)
    if found.restored is None or found.target is None:
        _log.info("starts at step 0")
    else:
        _log.info("goes on from step %s (%s, every byte proven)", f"{found.restored.step:,}", found.target.name)
        for note in found.restored.notes:
            _log.warning("not exact: %s", note)
    if deadline is not None:
        left = amounts.duration(deadline.at_s - time.time())
        kept = amounts.duration(clock.reserve.seconds(deadline.runtime_s))
        _log.info("ends in %s (%s), keeps %s for a last save", left, deadline.source, kept)
    _log.info("saves %s", clock.describe())
