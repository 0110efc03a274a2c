"""Opening a run: lease, records, audit, resume. What the job holds from then on is an ``OpenRun``."""

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch.distributed as dist

from unbroken.errors import ItemsDiffer, NotExact, NotShared, UnbrokenError, UnsavedState
from unbroken.launch import job_files
from unbroken.launch.accepted import still_accepted
from unbroken.launch.slurm.end_time import follow_end_time
from unbroken.launch.spot.watch import watch
from unbroken.loop.carry import CARRIED, Carried
from unbroken.loop.direct import open_checkpoints
from unbroken.loop.emergency import Emergency, find_area
from unbroken.loop.job_start import log_start, record_accepted, record_data_notices, record_resume, warn_of_clock_skew
from unbroken.loop.loader_workers import shield_workers
from unbroken.loop.mirrors import RunMirrors
from unbroken.loop.opened_run import Drilled, OpenRun, find_drill, release_run
from unbroken.loop.peers import Peers
from unbroken.loop.recorder import Recorder, SilentRecorder, report_refusal_to_launcher
from unbroken.loop.resume import UNSAVED_GRADIENTS, Resumed, resume
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.loop.trackers import load_trackers, start_trackers, time_left
from unbroken.mirror.direct import DirectStore
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
from unbroken.state.capture import RNG, require_savable
from unbroken.state.cursor import Cursor
from unbroken.state.items import GradientsItem, Item, ObjectItem, OptimizerItem, make_items
from unbroken.state.restore import Restored
from unbroken.state.rng import restore_rng
from unbroken.state.save import SaveContext, Saver
from unbroken.store.choose import require_origin
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed
from unbroken.store.keep import compose
from unbroken.store.names import OWN, DraftName, scratch_draft
from unbroken.trackers.tracker import Tracker
from unbroken.world import World

_log = logger(__name__)
_Opened = TypeVar("_Opened")
# At so many saves the audit is repeated: looking at every live object takes a tenth of a second.
_LATE_LOOKS = 2


def open_run(
    directory: Path,
    objects: Mapping[str, object],
    settings: Settings,
    frame: FrameType | None,
    *,
    carried: Carried | None = None,
    process_group: "dist.ProcessGroup | None" = None,
) -> OpenRun:
    """Take the lease of a run and restore its state. Collective among the ranks of the process group.

    Raises:
        DrillUnreadable: this is a drill whose file cannot be read.
        RunHeld: another live job has it.
        NotAStore: there is a file at the path of the run's directory.
        ItemsDiffer: the ranks did not pass the same objects.
        NotShared: a rank does not see the directory of the others.
        UnsavedState: live state was not passed to the run, and ``audit`` is ``error``.
        UnbrokenError: it cannot be resumed; the error says why.
    """
    world = World.current(process_group)
    try:
        return _open_in(world, directory, objects, settings, frame, carried or Carried())
    except BaseException:
        world.close()
        raise


def _open_in(
    world: World,
    directory: Path,
    objects: Mapping[str, object],
    settings: Settings,
    frame: FrameType | None,
    carried: Carried,
) -> OpenRun:
    def find_items() -> list[Item]:
        items = world.all_or_none(lambda: _items(objects, carried))
        _require_alike(items, world)
        return items

    return with_lease(
        world,
        directory,
        settings,
        find_items=find_items,
        objects=objects,
        then=lambda leased, renewal, drilled: _open(leased, renewal, frame, drilled),
    )


def with_lease(
    world: World,
    directory: Path,
    settings: Settings,
    *,
    then: "Callable[[LeasedRun, Renewal | None, Drilled | None], _Opened]",
    find_items: Callable[[], list[Item]] = list,
    objects: Mapping[str, object] | None = None,
    origin: str = OWN,
) -> _Opened:
    """Take the lease of a run and open the run by ``then``; if that fails, record it and release the run. Collective.

    Raises:
        RunHeld: another live job has it.
        OtherFramework: its checkpoints were not saved by ``origin``.
        UnbrokenError: what ``find_items`` or ``then`` raises.
    """
    drilled = find_drill(world)
    if drilled is not None:
        directory, settings = drilled.applied(directory, settings)
    layout = Layout(directory)
    # Every phase ends on all ranks or on none: a rank that leaves alone would let the others wait for ever.
    try:
        items = find_items()
        # Before anything is written: one that is not installed is to be known now.
        trackers = world.all_or_none(lambda: load_trackers(settings) if world.is_first else ())
        lease = world.from_first(lambda: take_lease(layout, origin))
    except UnbrokenError as refused:
        if world.is_first:
            # Nothing is written into a run that another job holds.
            report_refusal_to_launcher(directory, conclude(refused))
        raise
    renewal = Renewal(directory, lease, clock=time.time) if world.is_first else None
    recorder: SilentRecorder | None = None
    try:
        recorder = world.all_or_none(
            lambda: Recorder(layout, lease, clock=time.time) if world.is_first else SilentRecorder(lease.holder)
        )
        if drilled is not None:
            # Durable with the start of the job: a drill must not be mistaken for a real run.
            recorder.event("drill", **drilled.drill.as_json())
        leased = LeasedRun(layout, world, lease, recorder, items, objects or {}, settings, trackers=trackers)
        return then(leased, renewal, drilled)
    except BaseException as refused:
        outcome = conclude(refused, job=lease.number)
        if recorder is not None:
            recorder.end(outcome)
        elif world.is_first:
            report_refusal_to_launcher(directory, outcome)
        if renewal is not None:
            release_run(layout, renewal, is_followed=False)
        raise


def _items(objects: Mapping[str, object], carried: Carried) -> list[Item]:
    """The objects that were passed, and the items that every run has."""
    items = make_items(objects)
    optimizers = tuple(item for item in items if isinstance(item, OptimizerItem))
    return [*items, GradientsItem(optimizers), ObjectItem(CARRIED, carried)]


def _require_alike(items: Sequence[Item], world: World) -> None:
    names = world.all_gather(tuple(sorted(item.name for item in items)))
    if len(set(names)) > 1:
        raise ItemsDiffer(names=tuple(names))


def take_lease(layout: Layout, origin: str) -> Lease:
    """Take the lease of a run, once its last holder is gone.

    Raises:
        OtherFramework: its checkpoints were not saved by ``origin``.
        RunHeld: another live job has it.
        NotAStore: there is a file at its path.
    """
    require_directory(layout.run)
    # Before anything is written: the records of a run that is fine stay as they are.
    require_origin(Store(layout.checkpoints), layout.run, origin)
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
class LeasedRun:
    """A run whose lease this job holds, and the objects passed to it, on one rank."""

    layout: Layout
    world: World
    lease: Lease
    recorder: SilentRecorder
    items: list[Item]
    objects: Mapping[str, object]
    settings: Settings
    accepted_before: tuple[str, ...] = ()
    trackers: tuple[Tracker, ...] = ()


def _open(leased: LeasedRun, renewal: Renewal | None, frame: FrameType | None, drilled: Drilled | None) -> OpenRun:
    layout, world, lease = leased.layout, leased.world, leased.lease
    recorder, settings = leased.recorder, leased.settings
    world.all_or_none(lambda: require_shared(leased))
    deadline = world.from_first(
        lambda: find_deadline(settings.max_runtime_seconds, os.environ, started_s=lease.taken_at_s, now_s=time.time())
    )
    peers = Peers(world, record_start(leased, deadline))
    look = _audit(leased, frame)
    clock = world.all_or_none(lambda: save_clock(settings, recorder, world))
    world.from_first(lambda: _clear_leavings(leased))
    stops = stop_sources(leased, clock, deadline)
    cursor = cursor if isinstance(cursor := leased.objects.get("data"), Cursor) else None
    try:
        if cursor is not None:
            cursor.use_workers_of_run(lambda: stops.signalled is not None)
        loader = cursor.positioned if cursor is not None else None
        # What an earlier job accepted about the newest checkpoint stays accepted.
        before = world.from_first(lambda: still_accepted(recorder.history().events))
        leased = replace(leased, settings=replace(settings, accept=(*settings.accept, *before)), accepted_before=before)
        if loader is not None:
            loader.accept(leased.settings.accept)
        emergency = _emergency(leased, clock, stops)
        direct = open_checkpoints(layout, settings, world, lease) if drilled is None else None
        mirrors = open_mirrors(leased, is_drill=drilled is not None)
        found = _resume(leased, emergency, mirrors, direct)
        _start_trackers(leased, found, direct, lambda: 0.0 if emergency.is_leaving else time_left(stops))
        record_accepted(found, (*leased.objects.values(), loader), settings, recorder, world)
        if notices := _notices(leased.objects):
            record_data_notices(notices, recorder, world)
        saver = _saver(leased, found, mirrors, direct)
        if mirrors is not None:
            mirrors.start()
    except BaseException:
        stops.restore()
        raise
    source = found.target.path if found.target else None
    log_start(layout, world, lease, found, clock, deadline, cursor, checkpoints=settings.checkpoints)
    emergency.warn_of_windows()
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
        items=leased.items,
        mirrors=mirrors,
        direct=direct,
    )


def _clear_leavings(leased: LeasedRun) -> None:
    """Remove what jobs before this one left: stop requests that were for them, files they wrote half."""
    clear_requests(leased.layout, job=leased.lease.number)
    local = leased.settings.emergency_dir
    further = [Path(local)] if local else []
    sweep_scratch(leased.layout, holder=leased.lease.number, now_s=time.time(), further=further)


def record_start(leased: LeasedRun, deadline: Deadline | None) -> list[Holder]:
    """Journal the processes, deadline and keep policy of this job; returns the ranks' processes. Collective."""
    world, settings = leased.world, leased.settings
    holders = world.all_gather(this_holder())
    processes = [asdict(holder) for holder in (*_launcher(), *holders)]
    warn_of_clock_skew(world)
    leased.recorder.event(
        "job-start",
        world_size=world.size,
        processes=processes,
        placement=placed.as_json() if (placed := placement(os.environ)) else None,
        deadline_s=deadline.at_s if deadline else None,
        keep=[
            settings.keep_last_k,
            settings.keep_milestone_every,
            settings.keep_every_seconds,
            settings.keep_best,
        ],
    )
    return holders


def stop_sources(
    leased: LeasedRun, clock: SaveClock, deadline: Deadline | None, *, catches_now: bool = True
) -> StopSources:
    """The sources of stop requests, active from here on; without ``catches_now`` all but signals. Collective."""
    settings, lease = leased.settings, leased.lease
    # Rank 0's clock alone: another one's may be wrong, and only rank 0 learns that the deadline was moved.
    watched = deadline if leased.world.is_first else None
    spot = leased.world.all_or_none(lambda: watch(settings.spot, os.environ))
    stops = StopSources(
        leased.layout,
        job=lease.number,
        clock=time.time,
        deadline_s=watched.at_s if watched else None,
        reserve=lambda: clock.reserve.seconds(_runtime_s(stops, lease)),
        notices=spot.start() if spot else None,
        # One rank reads a file that all share; a thousand would load the file system once a second.
        reads_flag=leased.world.is_first,
        is_speaking=leased.world.is_first,
    )
    if leased.world.is_first:
        follow_end_time(settings.max_runtime_seconds, os.environ, stops, leased.recorder.event)
    # From here on a signal is a request: a job that receives one while it loads stops after its first step.
    if settings.catch_signals and catches_now:
        catch_signals(stops)
    return stops


def catch_signals(stops: StopSources) -> None:
    """Make a signal a stop request, and keep it from the workers of loaders."""
    if stops.install():
        stops.end_with(shield_workers(lambda: stops.signalled is not None))


def _emergency(leased: LeasedRun, clock: SaveClock, stops: StopSources) -> Emergency:
    layout, world, lease, settings = leased.layout, leased.world, leased.lease, leased.settings
    area = find_area(layout, lease, settings, world)
    learned = world.from_first(lambda: learned_costs(leased.recorder.history().events))
    return Emergency(
        layout,
        world,
        lease,
        leased.items,
        settings,
        area=area,
        learned=learned,
        clock=clock,
        stops=stops,
        recorder=leased.recorder,
    )


def open_mirrors(leased: LeasedRun, *, is_drill: bool) -> RunMirrors | None:
    """The mirrors of the run, on rank 0; a drill has none: it must not write to those of the real run. Collective."""
    if is_drill or leased.settings.checkpoints is not None:
        return None
    store, settings, job = Store(leased.layout.checkpoints), leased.settings, leased.lease.job
    is_first = leased.world.is_first
    return leased.world.all_or_none(lambda: RunMirrors(store, settings, leased.recorder, job=job) if is_first else None)


def _resume(leased: LeasedRun, emergency: Emergency, mirrors: RunMirrors | None, direct: DirectStore | None) -> Resumed:
    world, settings = leased.world, leased.settings
    # Before the first hour of training, not after it.
    world.all_or_none(lambda: require_savable(leased.items, settings.allow_pickle))
    skipped = emergency.bring_in()
    store = Store(leased.layout.checkpoints) if direct is None else direct.store()
    found = resume(store, leased.items, world, settings, job=leased.lease.job, mirrors=mirrors)
    found.skipped[:0] = skipped
    emergency.hyperparameters = found.hyperparameters
    _note_unsaved_gradients(found, leased.items)
    record_resume(found, leased.recorder, settings, world, accepted_before=leased.accepted_before)
    if (restored := found.restored) is not None:
        # Last of all: making a loader's iterator draws from them.
        world.all_or_none(lambda: _restore_rng(restored, settings))
    return found


def _note_unsaved_gradients(found: Resumed, items: Sequence[Item]) -> None:
    metadata = found.target.manifest.metadata if found.target is not None else {}
    unsaved = metadata.get(UNSAVED_GRADIENTS)
    for item in items:
        if isinstance(item, GradientsItem) and isinstance(unsaved, Mapping):
            item.unsaved = {str(name): str(mask) for name, mask in unsaved.items()}


def _start_trackers(
    leased: LeasedRun, found: Resumed, direct: DirectStore | None, longest_s: Callable[[], float]
) -> None:
    settings, target = leased.settings, found.target
    step = found.restored.step if found.restored else 0
    # A checkpoint of another run names the trackers of that one.
    own = Store(leased.layout.checkpoints) if direct is None else direct.store()
    is_own = target is not None and target.store.root == own.root
    start_trackers(
        leased.trackers,
        settings,
        leased.layout,
        leased.lease.number,
        leased.recorder,
        step=step,
        is_other_start=step == 0 and bool({*settings.accept} - {*leased.accepted_before}),
        metadata=target.manifest.metadata if target is not None and is_own else {},
        longest_s=longest_s,
    )


def _notices(objects: Mapping[str, object]) -> list[str]:
    """What the loader noticed about its data when the run was entered."""
    data = objects.get("data")
    if not isinstance(data, Cursor):
        return []
    return data.notices if data.positioned is None else data.positioned.notices


def _may_be_written(draft: DraftName, own_number: int) -> bool:
    """Whether somebody may still be writing a draft after this job's save.

    Its own drafts are done with then; its own scratch files are not: uploads to mirrors are recorded by other threads.
    """
    number = number_of(draft.job)
    if number == own_number:
        return draft == scratch_draft(draft.job)
    return number is None or number > own_number


def _saver(leased: LeasedRun, found: Resumed, mirrors: RunMirrors | None, direct: DirectStore | None) -> Saver:
    layout, lease, settings = leased.layout, leased.lease, leased.settings
    store = Store(layout.checkpoints) if direct is None else direct.store()
    policies = compose(
        settings.keep_last_k, settings.keep_milestone_every, settings.keep_every_seconds, settings.keep_best
    )
    target = found.target.name if found.target and found.target.store.root == store.root else None
    fence = (lambda: require_held(layout.run, lease)) if leased.world.is_first else None
    if direct is not None:
        direct.keep(policies, resume_target=target, fence=fence)
    keeping = SaveContext(
        store,
        lease.job,
        policies,
        resume_target=target,
        fence=fence,
        is_live=lambda draft: _may_be_written(draft, lease.number),
        files_per_rank=settings.files_per_rank,
        on_commit=mirrors.committed if mirrors is not None else lambda: None,
        away=mirrors.away if mirrors is not None else tuple,
        planner=settings.planner,
        elsewhere=direct,
    )
    return Saver(
        leased.items,
        leased.world,
        keeping,
        allow_pickle=settings.allow_pickle,
        shares_rng=settings.shared_rng,
        hyperparameters=found.hyperparameters,
    )


def _restore_rng(restored: Restored, settings: Settings) -> None:
    if not restored.rng_state:
        # An imported checkpoint without RNG states, which the user accepted.
        return
    try:
        restore_rng(restored.rng_state)
    except Malformed as wrong:
        if RNG not in settings.accept:
            raise NotExact(differences=((RNG, str(wrong)),)) from wrong
        _log.warning("not exact: accepted: %s: %s; they start over", RNG, wrong)


def _launcher() -> list[Holder]:
    """The launcher of this job, if it is ours: a job is killed with its launcher, which would start it again."""
    launcher = os.environ.get(job_files.LAUNCHER, "")
    return [holder_of(int(launcher))] if launcher.isdecimal() else []


def require_shared(leased: LeasedRun) -> None:
    """Pass if this rank sees the run directory of rank 0, or needs none: its parts go to an object store.

    Raises:
        NotShared: it sees another directory.
    """
    run = leased.layout.run
    current = read_current(run) if leased.settings.checkpoints is None else leased.lease
    if current is None or current.token != leased.lease.token:
        raise NotShared(path=run.absolute(), rank=leased.world.rank, host=host_name())


def _runtime_s(stops: StopSources, lease: Lease) -> float | None:
    return None if stops.deadline_s is None else stops.deadline_s - lease.taken_at_s


def _audit(leased: LeasedRun, frame: FrameType | None) -> Callable[[], None]:
    """Report state that was not passed to the run; the returned function looks again at each save. Collective."""
    ignore = leased.settings.audit_ignore
    if leased.settings.audit == "off":
        return lambda: None
    found = audit(leased.objects, frame)
    _report_unsaved(leased, [each for each in found if each.called not in ignore])
    modules = modules_of(leased.items)
    buffers = {name: buffer for name, buffer in non_persistent(modules).items() if name not in ignore}
    watch = UnsavedWatch(named_rngs(frame, ignore=ignore), buffers)
    # Later looks know no names, so that what is ignored by its name is known by its type.
    known, looks = {each.type_name for each in found}, 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks <= _LATE_LOOKS:
            # Made since the run was entered: an optimizer for a new phase, an average started late.
            late = [each for each in audit(leased.objects, None) if each.type_name not in known]
            known.update(each.type_name for each in late)
            _report_unsaved(leased, late)
        _report_unsaved(leased, watch.drawn_from())
        for name in watch.written(modules) if leased.world.is_first else ():
            _log.warning(
                "buffer %s is not persistent and has changed: checkpoints do not contain it, and a resume starts with "
                "its initial value; if that is right, add it to audit_ignore",
                name,
            )

    return look


def _report_unsaved(leased: LeasedRun, unsaved: Sequence[Unsaved]) -> None:
    found = tuple(map(str, unsaved))
    if leased.settings.audit == "error":
        leased.world.all_or_none(lambda: _refuse(found))
    for each in found if leased.world.is_first else ():
        _log.warning("not passed to the run, so a resume starts it over: %s", each)
    if found:
        leased.recorder.event("audit", unsaved=list(found))


def _refuse(found: tuple[str, ...]) -> None:
    if found:
        raise UnsavedState(found=found)


def save_clock(settings: Settings, recorder: SilentRecorder, world: World) -> SaveClock:
    """The clock of a job's saves, with what earlier jobs measured."""
    cadence: Every | Auto | None = None
    if settings.save_steps is not None:
        cadence = Auto() if settings.save_steps == "auto" else Every(settings.save_steps)
    events = recorder.history().events
    pace = Timings(0, 0.0, mean_time_between_failures_s=mean_time_between_failures_s(events))
    reserve = learned_reserve(events, settings.walltime_reserve_seconds, edges=min(world.size, 2))
    return SaveClock(cadence, reserve, _monotonic, pace)


_monotonic: Callable[[], float] = time.monotonic
