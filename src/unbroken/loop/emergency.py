"""The emergency path of one job: when to take it, the dump itself, its copy, and what is left of it afterwards.

Every rank holds an ``Emergency`` and exchanges nothing with the others, but for ``bring_in`` at a job's start. Storage
errors are logged here and never raised: in an emergency there is nothing better to do than to continue.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unbroken.errors import (
    CheckpointError,
    EvidenceMissing,
    RankFailed,
    StorageError,
    TensorUnsupported,
    UnbrokenError,
)
from unbroken.files import LOCAL
from unbroken.loop.recorder import SilentRecorder
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.deadline import Costs, GraceAnswer, answer, deadline_warning, is_patience_over, window_warning
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease, number_of, require_held
from unbroken.records.process import host_name
from unbroken.records.stop import StopSources
from unbroken.state.adopt import AdoptTarget, adopt
from unbroken.state.dump import Dumped, DumpOwner, dump
from unbroken.state.items import Item, present
from unbroken.state.rng import capture_rng, rng_devices
from unbroken.store.check import Level, verify
from unbroken.store.choose import choose
from unbroken.store.directory import Store
from unbroken.store.dump_copies import copy_dump, sweep_dumps
from unbroken.store.dumps import (
    Area,
    DumpChoice,
    DumpSet,
    Pointer,
    choose_dumps,
    look,
    make_area,
    point,
    read_area,
    read_pointers,
)
from unbroken.store.names import machine_of, scratch
from unbroken.store.scan import newest_first, scan
from unbroken.world import Vote, World

_log = logger(__name__)
_LOOK_EVERY_S = 0.0005


def find_area(layout: Layout, lease: Lease, settings: Settings, world: World) -> Area | None:
    """The directory of this run's dumps; None where it never had any and needs none. Collective.

    Raises:
        RecordDamaged: the record of the area cannot be read.
        StorageFailed: an I/O error.
    """
    local, persistent = _absolute(settings.emergency_dir), _absolute(settings.persistent_dir)

    def decide() -> Area | None:
        # A run that goes back, or starts over, ignores the dumps of the branch that it abandons.
        is_new = settings.resume != "auto"
        if local is None and read_area(layout.run) is None:
            return None
        return make_area(layout.run, job=lease.job, is_new=is_new)

    found = world.from_first(decide)
    if found is None:
        return None
    refusals = world.all_gather(None if local is None else _refusal(local))
    return replace(found, local=local, persistent=persistent, takes_dumps=_are_taken(refusals, local, world))


def _refusal(directory: Path) -> str | None:
    """Why this process cannot write there; None where it can."""
    probe = directory / scratch(f"probe_{os.getpid()}", host_name().replace("/", "-"))
    try:
        LOCAL.make_directory(directory)
        # A kill in between leaves one byte under a name that nothing reads, and that a later job sweeps.
        LOCAL.write_new(probe, [b"?"], durable=False)
        LOCAL.remove_file(probe)
    except StorageError as refused:
        return refused.headline()
    return None


def _are_taken(refusals: Sequence[str | None], local: Path | None, world: World) -> bool:
    """Whether every rank can dump; the first that cannot is logged now, not when there is no time left."""
    for rank, reason in enumerate(refusals):
        if reason is not None:
            if world.is_first:
                so = "a stop makes an ordinary save, if its window allows one"
                _log.warning("emergency_dir %s cannot be used by rank %s: %s; %s", local, rank, reason, so)
            return False
    return True


def _absolute(path: str | None) -> Path | None:
    return None if path is None else Path(path).absolute()


def _reason(refused: UnbrokenError) -> str:
    """Why dumps that looked complete cannot be used; an error of the run's own storage is raised again."""
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    if not isinstance(cause, CheckpointError | TensorUnsupported | EvidenceMissing) or isinstance(cause, StorageError):
        raise refused
    return next(iter(cause.details()), cause.headline())


def _ahead(store: Store) -> Callable[[DumpSet], bool]:
    """Whether dumps are ahead of the newest usable checkpoint, and made by a job no older than it."""
    found = choose(newest_first(store, scan(store).committed), lambda name: verify(store, name, Level.QUICK))
    newest = found.chosen.manifest if found.chosen is not None else None
    if newest is None:
        return lambda dump_set: True
    step, number = newest.step, number_of(newest.job) or 0
    return lambda dump_set: dump_set.step > step and (number_of(dump_set.job) or 0) >= number


class Emergency:
    """The emergency path of one rank."""

    def __init__(
        self,
        layout: Layout,
        world: World,
        lease: Lease,
        items: Sequence[Item],
        settings: Settings,
        *,
        area: Area | None,
        learned: Costs,
        clock: SaveClock,
        stops: StopSources,
        recorder: SilentRecorder,
    ) -> None:
        self._layout, self._world, self._lease, self._items = layout, world, lease, items
        self._settings, self._area = settings, area
        self._stops, self._recorder = stops, recorder
        self._learned, self._clock = learned, clock
        self.is_leaving = False
        self.hyperparameters: Mapping[str, str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there is a directory for dumps."""
        return self._area is not None and self._area.local is not None

    @property
    def _is_usable(self) -> bool:
        """Whether every rank can dump there, so that a window is better used for a dump than for a save."""
        return self._area is not None and self._area.local is not None and self._area.takes_dumps

    # ---- a job's start ----

    def bring_in(self) -> list[tuple[str, str]]:
        """Make an ordinary checkpoint of the newest complete dumps, where they are ahead of all others. Collective.

        Returns what was skipped, with the reasons.

        Raises:
            StorageFailed: the run's own storage refused; dumps and checkpoints are as they were.
            RankFailed: the same, on another rank.
        """
        if (area := self._area) is None or self._settings.resume != "auto":
            return []
        world, lease, run = self._world, self._lease, self._layout.run
        store = Store(self._layout.checkpoints)
        visible = world.gather_to_first(lambda: look(area, host_name(), read_pointers(run)))
        into = AdoptTarget(store, lease.job, lease.number, time.time_ns(), lambda: require_held(run, lease))
        failed: dict[DumpSet, str] = {}
        while True:
            choice = world.from_first(
                lambda: choose_dumps(visible, read_pointers(run), is_newer=_ahead(store), failed=failed)
            )
            if choice.dump_set is None:
                return list(choice.skipped)
            try:
                name = adopt(choice.dump_set, choice.copies, self._items, world, into)
            except UnbrokenError as refused:
                failed[choice.dump_set] = _reason(refused)
                continue
            self._record_adopted(choice, name)
            return list(choice.skipped)

    def _record_adopted(self, choice: DumpChoice, name: str) -> None:
        dump_set = choice.dump_set
        assert dump_set is not None
        hosts = sorted({machine_of(copies[0][1].host) for copies in choice.copies.values()})
        self._recorder.event("emergency-resume", step=dump_set.step, name=name, job=dump_set.job, hosts=hosts)
        if self._world.is_first:
            ranks = amounts.plural(dump_set.world_size, "rank")
            where = ", ".join(hosts)
            _log.info("made %s of the emergency dumps of step %s by %s on %s", name, f"{dump_set.step:,}", ranks, where)

    def warn_of_windows(self) -> None:
        """Warn at the start of a grace window or deadline that no save fits into; rank 0 only."""
        left_s = self._stops.left_s(None)
        reserve_s = self._clock.reserve.seconds(left_s)
        said = (
            window_warning(self._settings.grace_seconds, self.costs, has_area=self._is_usable),
            deadline_warning(left_s, reserve_s),
        )
        for sentence in said if self._world.is_first else ():
            if sentence is not None:
                _log.warning("%s", sentence)

    # ---- deciding ----

    @property
    def costs(self) -> Costs:
        """What was measured by this job; by earlier ones where it has measured nothing yet."""
        reserve = self._clock.reserve
        save_s = max(reserve.saves_s, default=self._learned.save_s)
        return replace(self._learned, save_s=save_s, step_s=max(reserve.steps_s, default=0.0))

    def left_s(self) -> float | None:
        """Seconds until this process is killed, as far as it is known; None if it is not."""
        return self._stops.left_s(self._settings.grace_seconds)

    def answer(self) -> GraceAnswer:
        """What to do with what is left of the grace window."""
        if not self._is_usable and self._settings.grace_seconds is None:
            # The window is unknown, and there is no directory for a dump.
            return GraceAnswer.SAVE
        left_s = self.left_s()
        edges = 1 if self._world.size > 1 and not self.is_leaving else 0
        return answer(left_s, self.costs, edges=edges, has_area=self._is_usable)

    def is_hurried(self) -> bool:
        """Whether this rank has no time for an ordinary save."""
        return self.answer() is not GraceAnswer.SAVE

    def read(self, vote: Vote) -> list[bool] | None:
        """The ranks' answer; None if they do not give one and little of the window is left: one of them hangs.

        Raises:
            PeerLost: one of them is gone.
        """
        # A rank that waits inside the exchange handles no signal, so that with an area it waits outside.
        while self._is_usable and not vote.is_answered():
            if self._is_patience_over():
                return None
            time.sleep(_LOOK_EVERY_S)
        return vote.read()

    def _is_patience_over(self) -> bool:
        # A near deadline makes no window by itself: without a stop request the others may take their time.
        is_over = is_patience_over(self.left_s(), self._settings.grace_seconds, self.costs)
        return is_over and self._stops.look() is not None

    # ---- dumping ----

    def leave(self, step: int, counters: Mapping[str, Any]) -> None:
        """Do what the rest of the window allows; ``is_leaving`` is set before."""
        chosen = self.answer()
        if self._is_usable and chosen is not GraceAnswer.NOTHING:
            self.dump(step, counters, why="the grace window is too small for a save")
        elif self._world.is_first:
            _log.warning("no time for a save: leaving without one; the next job resumes from the last commit")
            self._recorder.event("grace-too-short", step=step, remaining_s=self.left_s())

    def dump(self, step: int, counters: Mapping[str, Any], *, why: str) -> bool:
        """Write this rank's state to local disk, record where it is, copy it; returns whether it is durable."""
        area, local, began = self._area, self._area.local if self._area is not None else None, time.monotonic()
        if area is None or local is None:
            return False
        try:
            dumped = dump(
                present(self._items),
                lambda: capture_rng(rng_devices()),
                self._world,
                area.store(local, self._world.rank),
                step=step,
                counters=counters,
                whose=DumpOwner(area.key, self._lease.job, host_name()),
                at_ns=time.time_ns(),
                allow_pickle=self._settings.allow_pickle,
                shares_rng=self._settings.shared_rng,
                files_per_rank=self._settings.files_per_rank,
                hyperparameters=self.hyperparameters,
            )
        except UnbrokenError as refused:
            _log.error("emergency dump of step %s failed: %s", f"{step:,}", refused.message)
            self._recorder.event("emergency-failed", what="dump", step=step, error=refused.kind, reason=refused.message)
            return False
        seconds = time.monotonic() - began
        self._learned = self._learned.after_dump(seconds)
        path = dumped.store.path(dumped.name)
        _log.warning("emergency dump of step %s in %s: %s", f"{step:,}", amounts.duration(seconds), path)
        self._record(dumped, seconds, why)
        return True

    def _record(self, dumped: Dumped, seconds: float, why: str) -> None:
        """Write a pointer to the dump into the run's directory, copy the dump, then point at the copy."""
        manifest, world = dumped.manifest, self._world
        path = str(dumped.store.path(dumped.name))
        pointer = Pointer(world.rank, world.size, manifest.step, manifest.job, host_name(), path)
        self._point(pointer)
        size_bytes = manifest.size_bytes
        self._recorder.event(
            "emergency-save",
            step=manifest.step,
            seconds=seconds,
            bytes=size_bytes,
            host=pointer.host,
            path=path,
            reason=why,
        )
        if (copy := self._copy(dumped)) is not None:
            self._point(replace(pointer, copy=copy))
            self._recorder.event("emergency-copy", step=manifest.step, path=copy)

    def _point(self, pointer: Pointer) -> None:
        try:
            point(self._layout.run, pointer)
        except UnbrokenError as refused:
            _log.warning("could not write the pointer to the dump into %s: %s", self._layout.run, refused.message)

    def _copy(self, dumped: Dumped) -> str | None:
        """The path of a copy, all checksums verified; None if there is none."""
        assert self._area is not None
        if (shared := self._area.persistent) is None or shared == self._area.local:
            return str(dumped.store.path(dumped.name)) if shared is not None else None
        target = self._area.store(shared, self._world.rank)
        try:
            return str(target.path(copy_dump(dumped.store, dumped.name, target)))
        except UnbrokenError as refused:
            step = f"{dumped.manifest.step:,}"
            _log.error("could not copy the dump of step %s to %s: %s", step, shared, refused.message)
            self._recorder.event("emergency-failed", what="copy", error=refused.kind, reason=refused.message)
            return None

    # ---- afterwards ----

    def sweep(self, step: int) -> None:
        """Remove the dumps that a commit of this step makes useless; what cannot be removed is tried next time."""
        if self._area is None:
            return
        try:
            share = (self._world.rank, self._world.size)
            gone = sweep_dumps(self._layout.run, self._area, up_to_step=step, share=share)
        except UnbrokenError as refused:
            _log.warning("could not remove old emergency dumps: %s", refused.message)
            return
        if gone:
            self._recorder.event("emergency-sweep", step=step, removed=gone)
