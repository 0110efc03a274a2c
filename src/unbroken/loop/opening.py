"""Taking a run: lease, records, audit, resume. What a loop holds from then on is an ``OpenRun``."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from unbroken.errors import ItemsDiffer, NotExact, NotShared, UnbrokenError, UnsavedState
from unbroken.launch import job_files
from unbroken.launch.accepted import still_accepted
from unbroken.launch.slurm.end_time import follow_end_time
from unbroken.launch.spot.watch import watch
from unbroken.loop.carry import CARRIED, Carried
from unbroken.loop.emergency import Emergency, find_area
from unbroken.loop.job_start import record_resume, say_clocks, say_first_lines, tell_accepted, tell_data
from unbroken.loop.loader_workers import shield_workers
from unbroken.loop.open_run import Drilled, OpenRun, find_drill, let_go
from unbroken.loop.peers import Peers
from unbroken.loop.recorder import Recorder, SilentRecorder, tell_launcher_of_refusal
from unbroken.loop.resume import Resumed, resume
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.quoting.log import logger
from unbroken.records.deadline import Deadline, find_deadline, learned_costs, learned_reserve
from unbroken.records.interval import Auto, Every, Timings, mean_time_between_failures_s
from unbroken.records.layout import Layout, require_directory
from unbroken.records.lease import Holder, Lease, Renewal, number_of, read_current, require_held
from unbroken.records.leftovers import sweep_scratch
from unbroken.records.outcome import conclude
from unbroken.records.process import holder_of, host_name, placement, process_of, this_holder
from unbroken.records.stop import StopSources, clear_requests
from unbroken.records.takeover import take_over
from unbroken.state.audit import Unsaved, UnsavedWatch, audit, modules_of, named_rngs, non_persistent
from unbroken.state.capture import GENERATORS, require_savable
from unbroken.state.cursor import Cursor
from unbroken.state.items import GradientsItem, Item, ObjectItem, OptimizerItem, make_items
from unbroken.state.restore import Restored
from unbroken.state.rng import restore_generators
from unbroken.state.save import Keeping, Saver
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed
from unbroken.store.keep import compose
from unbroken.world import World

_log = logger(__name__)
# At so many saves the audit is repeated: looking at every live object takes a tenth of a second.
_LATE_LOOKS = 2


def open_run(
    directory: Path,
    things: Mapping[str, object],
    settings: Settings,
    frame: FrameType | None,
    *,
    carried: Carried | None = None,
    process_group: "dist.ProcessGroup | None" = None,
) -> OpenRun:
    """Take a run and bring its state to where it was left. Collective among the ranks of the process group.

    Raises:
        DrillUnreadable: this is to be a drill, and nobody can say which.
        RunHeld: another live job has it.
        NotAStore: there is a file where the run's directory is to be.
        ItemsDiffer: the ranks did not hand over the same things.
        NotShared: a rank does not see the directory of the others.
        UnsavedState: live state was not handed over, and the settings refuse that.
        UnbrokenError: it cannot be resumed; the error says why.
    """
    world = World.current(process_group)
    try:
        return _open_in(world, directory, things, settings, frame, carried or Carried())
    except BaseException:
        world.close()
        raise


def _open_in(
    world: World,
    directory: Path,
    things: Mapping[str, object],
    settings: Settings,
    frame: FrameType | None,
    carried: Carried,
) -> OpenRun:
    drilled = find_drill(world)
    if drilled is not None:
        directory, settings = drilled.applied(directory, settings)
    layout = Layout(directory)
    # Every phase ends on all ranks or on none: a rank that leaves alone would let the others wait for ever.
    try:
        items = world.all_or_none(lambda: _items(things, carried))
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
            lambda: Recorder(layout, lease, clock=time.time) if world.is_first else SilentRecorder(lease.holder)
        )
        if drilled is not None:
            # Durable with the start of the job: nobody is to mistake a drilled run for a real one.
            recorder.fact("drill", **drilled.drill.facts())
        taken = Taken(layout, world, lease, recorder, items, things, settings)
        return _open(taken, renewal, frame, drilled)
    except BaseException as refused:
        outcome = conclude(refused, job=lease.number)
        if recorder is not None:
            recorder.end(outcome)
        elif world.is_first:
            tell_launcher_of_refusal(directory, outcome)
        if renewal is not None:
            let_go(layout, renewal, is_followed=False)
        raise


def _items(things: Mapping[str, object], carried: Carried) -> list[Item]:
    """What was handed over, and what every run has beside it."""
    items = make_items(things)
    optimizers = tuple(item for item in items if isinstance(item, OptimizerItem))
    return [*items, GradientsItem(optimizers), ObjectItem(CARRIED, carried)]


def _require_alike(items: Sequence[Item], world: World) -> None:
    names = world.all_gather(tuple(sorted(item.name for item in items)))
    if len(set(names)) > 1:
        raise ItemsDiffer(names=tuple(names))


def _take(layout: Layout) -> Lease:
    require_directory(layout.run)
    return take_over(
        layout.run,
        this_holder(),
        token=secrets.token_hex(4),
        clock=time.time,
        monotonic=time.monotonic,
        wait=time.sleep,
        process_of=process_of,
        say=_log.info,
    )


@dataclass(frozen=True)
class Taken:
    """A run that this job has taken, and what it was handed, on one rank."""

    layout: Layout
    world: World
    lease: Lease
    recorder: SilentRecorder
    items: list[Item]
    things: Mapping[str, object]
    settings: Settings
    accepted_before: tuple[str, ...] = ()


def _open(taken: Taken, renewal: Renewal | None, frame: FrameType | None, drilled: Drilled | None) -> OpenRun:
    layout, world, lease, recorder, settings = taken.layout, taken.world, taken.lease, taken.recorder, taken.settings
    world.all_or_none(lambda: _require_shared(layout, lease, world))
    deadline = world.from_first(
        lambda: find_deadline(settings.max_runtime_s, os.environ, started_s=lease.taken_at_s, now_s=time.time())
    )
    peers = Peers(world, _record_start(taken, deadline))
    look = _audit(taken, frame)
    clock = world.all_or_none(lambda: _clock(settings, recorder, world))
    world.from_first(lambda: clear_requests(layout, job=lease.number))
    local = [Path(settings.emergency_dir)] if settings.emergency_dir else []
    world.from_first(lambda: sweep_scratch(layout, holder=lease.number, now_s=time.time(), further=local))
    stops = _listen(taken, clock, deadline)
    cursor = taken.things.get("data")
    cursor = cursor if isinstance(cursor, Cursor) else None
    try:
        if cursor is not None:
            cursor.use_workers_of_run(lambda: stops.signalled is not None)
        loader = cursor.positioned if cursor is not None else None
        # What an earlier job accepted about the newest checkpoint needs no second word.
        before = world.from_first(lambda: still_accepted(recorder.history().facts))
        taken = replace(taken, settings=replace(settings, accept=(*settings.accept, *before)), accepted_before=before)
        if loader is not None:
            loader.accept(taken.settings.accept)
        emergency = _emergency(taken, clock, stops)
        found = _resume(taken, emergency)
        tell_accepted(found, (*taken.things.values(), loader), settings, recorder, world)
        if notices := _notices(taken.things):
            tell_data(notices, recorder, world)
        saver = _saver(taken, found)
    except BaseException:
        stops.restore()
        raise
    source = str(found.target.store.path(found.target.name)) if found.target else None
    say_first_lines(layout, world, lease, found, clock, deadline)
    emergency.say_windows()
    return OpenRun(
        layout,
        world,
        lease,
        renewal,
        recorder,
        stops,
        clock,
        saver,
        found.restored,
        source,
        settings,
        emergency,
        peers,
        cursor,
        drilled,
        look_for_unsaved=look,
        items=taken.items,
    )


def _record_start(taken: Taken, deadline: Deadline | None) -> list[Holder]:
    """Write down who takes part in this job, and under which terms; returns the ranks' processes. Collective."""
    world, settings = taken.world, taken.settings
    holders = world.all_gather(this_holder())
    processes = [asdict(holder) for holder in (*_launcher(), *holders)]
    say_clocks(world)
    taken.recorder.fact(
        "job-start",
        world=world.size,
        processes=processes,
        placement=placed.facts() if (placed := placement(os.environ)) else None,
        deadline_s=deadline.at_s if deadline else None,
        keep=[
            settings.keep_last_k,
            settings.keep_milestone_every,
            settings.keep_every_seconds,
            settings.keep_best,
        ],
    )
    return holders


def _listen(taken: Taken, clock: SaveClock, deadline: Deadline | None) -> StopSources:
    """Everybody who may ask this job to end, heard from here on. Collective."""
    settings, lease = taken.settings, taken.lease
    # The first rank's clock alone: another one's may be wrong, and only the first hears that the deadline was moved.
    watched = deadline if taken.world.is_first else None
    spot = taken.world.all_or_none(lambda: watch(settings.spot, os.environ))
    stops = StopSources(
        taken.layout,
        job=lease.number,
        clock=time.time,
        deadline_s=watched.at_s if watched else None,
        reserve=lambda: clock.reserve.seconds(_runtime_s(stops, lease)),
        notices=spot.start() if spot else None,
        # One rank reads a file that all share; a thousand would load the file system once a second.
        reads_flag=taken.world.is_first,
        is_speaking=taken.world.is_first,
    )
    if taken.world.is_first:
        follow_end_time(settings.max_runtime_s, os.environ, stops, taken.recorder.fact)
    # From here on a signal is a request: a job that is asked to end while it loads ends after its first step.
    if settings.catch_signals and stops.install():
        stops.end_with(shield_workers(lambda: stops.signalled is not None))
    return stops


def _emergency(taken: Taken, clock: SaveClock, stops: StopSources) -> Emergency:
    layout, world, lease, settings = taken.layout, taken.world, taken.lease, taken.settings
    area = find_area(layout, lease, settings, world)
    learned = world.from_first(lambda: learned_costs(taken.recorder.history().facts))
    return Emergency(
        layout,
        world,
        lease,
        taken.items,
        settings,
        area=area,
        learned=learned,
        clock=clock,
        stops=stops,
        recorder=taken.recorder,
    )


def _resume(taken: Taken, emergency: Emergency) -> Resumed:
    world, settings = taken.world, taken.settings
    # Before the first hour of training, not after it.
    world.all_or_none(lambda: require_savable(taken.items, settings.allow_pickle))
    passed_over = emergency.bring_in()
    found = resume(Store(taken.layout.checkpoints), taken.items, world, settings, job=taken.lease.job)
    found.passed_over[:0] = passed_over
    emergency.hyperparameters = found.hyperparameters
    record_resume(found, taken.recorder, settings, world, accepted_before=taken.accepted_before)
    if (restored := found.restored) is not None:
        # Last of all: making a loader's iterator draws from them.
        world.all_or_none(lambda: _draw_on(restored, settings))
    return found


def _notices(things: Mapping[str, object]) -> list[str]:
    """What there is to say of the data when a run is entered."""
    data = things.get("data")
    if not isinstance(data, Cursor):
        return []
    return data.notices if data.positioned is None else data.positioned.notices


def _saver(taken: Taken, found: Resumed) -> Saver:
    layout, lease, settings = taken.layout, taken.lease, taken.settings
    store = Store(layout.checkpoints)
    keeping = Keeping(
        store,
        lease.job,
        compose(settings.keep_last_k, settings.keep_milestone_every, settings.keep_every_seconds, settings.keep_best),
        resume_target=found.target.name if found.target and found.target.store.root == store.root else None,
        fence=(lambda: require_held(layout.run, lease)) if taken.world.is_first else None,
        is_live=lambda draft: (number_of(draft.job) or lease.number + 1) > lease.number,
        files_per_rank=settings.files_per_rank,
    )
    return Saver(
        taken.items,
        taken.world,
        keeping,
        allow_pickle=settings.allow_pickle,
        shares_generators=settings.shared_generators,
        hyperparameters=found.hyperparameters,
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
    told = os.environ.get(job_files.LAUNCHER, "")
    return [holder_of(int(told))] if told.isdecimal() else []


def _require_shared(layout: Layout, lease: Lease, world: World) -> None:
    current = read_current(layout.run)
    if current is None or current.token != lease.token:
        raise NotShared(path=layout.run.absolute(), rank=world.rank, host=host_name())


def _runtime_s(stops: StopSources, lease: Lease) -> float | None:
    return None if stops.deadline_s is None else stops.deadline_s - lease.taken_at_s


def _audit(taken: Taken, frame: FrameType | None) -> Callable[[], None]:
    """Tell what was not handed over; what is returned looks at each save for what has changed since. Collective."""
    ignore = taken.settings.audit_ignore
    if taken.settings.audit == "off":
        return lambda: None
    found = audit(taken.things, frame)
    _tell_unsaved(taken, [each for each in found if each.called not in ignore])
    modules = modules_of(taken.items)
    buffers = {name: buffer for name, buffer in non_persistent(modules).items() if name not in ignore}
    watch = UnsavedWatch(named_rngs(frame, ignore=ignore), buffers)
    # Later looks know no names, so that what was silenced by its name is known by its type.
    known, looks = {each.type_name for each in found}, 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks <= _LATE_LOOKS:
            # Made since the run was entered: an optimizer for a new phase, an average begun late.
            late = [each for each in audit(taken.things, None) if each.type_name not in known]
            known.update(each.type_name for each in late)
            _tell_unsaved(taken, late)
        _tell_unsaved(taken, watch.drawn_from())
        for name in watch.written(modules) if taken.world.is_first else ():
            _log.warning(
                "buffer %s is not persistent and has changed: no checkpoint holds it, a resume starts with its first "
                "value; if that is right, add it to audit_ignore",
                name,
            )

    return look


def _tell_unsaved(taken: Taken, unsaved: Sequence[Unsaved]) -> None:
    found = tuple(map(str, unsaved))
    if taken.settings.audit == "error":
        taken.world.all_or_none(lambda: _refuse(found))
    for each in found if taken.world.is_first else ():
        _log.warning("not handed to the run, so a resume starts it anew: %s", each)
    if found:
        taken.recorder.fact("audit", unsaved=list(found))


def _refuse(found: tuple[str, ...]) -> None:
    if found:
        raise UnsavedState(found=found)


def _clock(settings: Settings, recorder: SilentRecorder, world: World) -> SaveClock:
    cadence: Every | Auto | None = None
    if settings.save_steps is not None:
        cadence = Auto() if settings.save_steps == "auto" else Every(settings.save_steps)
    facts = recorder.history().facts
    pace = Timings(0, 0.0, mean_time_between_failures_s=mean_time_between_failures_s(facts))
    reserve = learned_reserve(facts, settings.reserve_s, edges=min(world.size, 2))
    return SaveClock(cadence, reserve, _monotonic, pace)


_monotonic: Callable[[], float] = time.monotonic
