"""A run whose loop and checkpoint files belong to a framework.

The framework writes the files of a checkpoint into a draft, which no reader takes for a checkpoint. Then they are read,
digested and synced, and one rename gives the folder the name that the framework looks for: ``checkpoint-100`` exists
completely or not at all. The checkpoints stand in the run's directory itself, where the framework's own tools look.
Lease, journal, metrics, stop requests, mirrors and drills are those of every run. All methods are collective.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from unbroken.errors import NotExact, NoUsableCheckpoint, StartsOver, StorageError, StorageFailed, UnbrokenError
from unbroken.frameworks.folders import Folder, begin_folder, mark_checkpoints_here, publish_folder
from unbroken.loop.mirrors import RunMirrors
from unbroken.loop.opened_run import Drilled, release_run
from unbroken.loop.opening import (
    LeasedRun,
    catch_signals,
    open_mirrors,
    record_start,
    require_shared,
    save_clock,
    stop_sources,
    with_lease,
)
from unbroken.loop.save_clock import SaveClock
from unbroken.loop.settings import Settings
from unbroken.loop.trackers import TRACKERS, start_trackers, time_left
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.deadline import Deadline, find_deadline
from unbroken.records.lease import Renewal, number_of, require_held
from unbroken.records.leftovers import sweep_scratch
from unbroken.records.outcome import conclude
from unbroken.records.stop import StopReason, StopSources, clear_requests
from unbroken.store.capacity import require_room
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.choose import SkippedCheckpoint, quarantine, require_saved_by, resume_point
from unbroken.store.commit import Draft, Record, commit
from unbroken.store.directory import Store
from unbroken.store.keep import Policy
from unbroken.store.manifest import Manifest, Part
from unbroken.store.names import PERIODIC, DraftName, step_in_name, step_of
from unbroken.store.references import named_in
from unbroken.store.rewind import last_request, record_rewind, rewind
from unbroken.store.scan import newest_first, read_quietly, scan
from unbroken.store.seal import infer_step, seal
from unbroken.store.sweep import settle
from unbroken.world import Vote, World

_log = logger(__name__)
_UNSEALED: Final = "it has no manifest: a save that was cut off, or one without unbroken"
# Before the walltime ends, for the records of the end.
_LAST_SECONDS: Final = 10.0
_FILES_OF_A_SAVE: Final = 64
# What torch and safetensors say of storage that refuses; neither raises an OSError.
_REFUSALS: Final = ("I/O error", "PytorchStreamWriter failed", "unexpected pos")
# No other name: a folder of the user's own that only mentions a step is not moved.
_STEP_FOLDER: Final = re.compile(r"(global_)?step[-_]?[0-9]{1,18}")


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a job continues from; without a path it starts at step 0.

    ``skipped`` are newer ones that could not be used, each with the reason. ``manifest`` is None for a folder of
    another place that was never sealed.
    """

    path: Path | None = None
    manifest: Manifest | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    abandoned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """What became of one save: the name of the checkpoint, or the error that kept it from being one."""

    name: str | None
    error: UnbrokenError | None = None
    seconds: float = 0.0
    size_bytes: int = 0
    removed: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


class FrameworkRun:
    """A run that this job holds, on one rank."""

    def __init__(
        self, leased: LeasedRun, renewal: Renewal | None, drilled: Drilled | None, origin: str, *, catches_now: bool
    ) -> None:
        """Follow the parts of ``Run`` in their order: records, deadline, stop requests, mirrors."""
        self.origin = origin
        self.layout, self.world, self.lease = leased.layout, leased.world, leased.lease
        self.settings, self.recorder = leased.settings, leased.recorder
        self.store = Store(self.layout.run)
        self._renewal, self._drilled, self._trackers = renewal, drilled, leased.trackers
        world, lease, settings = self.world, self.lease, self.settings
        world.all_or_none(lambda: require_shared(leased))
        self.deadline: Deadline | None = world.from_first(
            lambda: find_deadline(
                settings.max_runtime_seconds, os.environ, started_s=lease.taken_at_s, now_s=time.time()
            )
        )
        record_start(leased, self.deadline)
        self.clock: SaveClock = world.all_or_none(lambda: save_clock(settings, self.recorder, world))
        world.from_first(lambda: clear_requests(self.layout, job=lease.number))
        world.from_first(lambda: sweep_scratch(self.layout, holder=lease.number, now_s=time.time(), further=[]))
        self.stops: StopSources = stop_sources(leased, self.clock, self.deadline, catches_now=catches_now)
        self._is_catching = catches_now
        self._mirrors: RunMirrors | None = None
        try:
            self._mirrors = open_mirrors(leased, is_drill=drilled is not None)
        except BaseException:
            self.stops.restore()
            raise
        # Set by the framework's module for a save at the next edge; ``is_save_due`` is what all ranks agreed on.
        self.wants_save = self.is_save_due = False
        self._vote: Vote | None = None
        self._noticed: StopReason | None = None
        self._attempts = 0
        self._staged: DraftName | None = None
        self._size_bytes = 0

    # ---- resuming ----

    def find_resume_point(self, asked: str | None, require: Callable[[Path], None]) -> ResumePoint:
        """The newest usable checkpoint, or the one that was asked for; all its bytes are verified.

        A request for an older one abandons the newer ones, once: the same request in a later job continues.

        Args:
            asked: a step, a name, or the path of a folder; None for the newest.
            require: raises if a folder is no checkpoint that the framework can resume from.

        Raises:
            NoUsableCheckpoint: there are checkpoints, and none can be used.
            CheckpointUnknown: there is none of that name or step.
            StartsOver: a folder elsewhere was asked for, and the run has checkpoints of its own.
            UnbrokenError: as ``require`` raises it, or a mirror refused.
        """
        found = self.world.from_first(lambda: self._find(asked, require))
        for name, reason in found.skipped:
            self.recorder.event("checkpoint-skipped", name=name, reason=reason)
            if self.world.is_first:
                _log.warning("skipped %s: %s", name, reason)
        if self._mirrors is not None:
            self._mirrors.start()
        return found

    def _find(self, asked: str | None, require: Callable[[Path], None]) -> ResumePoint:
        if asked is not None and self._mirrors is not None:
            # First: on a wiped disk, only a mirror knows that an earlier job has carried the request out.
            self._mirrors.learn_rewinds()
        last = last_request(self.store)
        is_followed = asked is not None and last is not None and last.text == asked
        if asked is not None and not is_followed:
            return self._find_named(asked, require)
        if self._mirrors is not None:
            self._mirrors.bring_back()
            self._repair(self._mirrors)
        chosen, skipped = self._choose()
        passed = [(over.name, over.reason) for over in skipped]
        manifest = chosen.manifest if chosen is not None else None
        passed += self._set_unsealed_aside(manifest.step if manifest else -1, has_chosen=manifest is not None)
        if chosen is None or manifest is None:
            if asked is not None:
                # Followed before, and nothing was saved since: the folder elsewhere is still where it starts.
                return self._find_named(asked, require)
            if skipped:
                raise NoUsableCheckpoint(store=self.store.root, skipped=tuple(passed))
            return ResumePoint(skipped=tuple(passed))
        path = self.store.path(chosen.name)
        # It may come from a mirror.
        require_saved_by(self.origin, self.store.root, chosen.name, manifest)
        require(path)
        return ResumePoint(path, manifest, tuple(passed))

    def _choose(self) -> tuple[Verdict | None, list[SkippedCheckpoint]]:
        """The newest usable checkpoint, and what was skipped for it."""
        choice = resume_point(self.store, Level.FULL, job=self.lease.job, at_ns=time.time_ns())
        passed = list(choice.skipped)
        if self._mirrors is not None and passed:
            # What a mirror has may be newer than what is left here.
            lost = {over.verdict.manifest.id for over in passed if over.verdict.manifest is not None}
            self._mirrors.bring_back(without=lost)
            choice = resume_point(self.store, Level.FULL, job=self.lease.job, at_ns=time.time_ns())
            named = {over.name for over in passed}
            passed += [over for over in choice.skipped if over.name not in named]
        return choice.chosen, passed

    def _repair(self, mirrors: RunMirrors) -> None:
        """Take the damaged parts of the newest checkpoint from a mirror, before it is quarantined."""
        for name in newest_first(self.store, scan(self.store).committed):
            verdict = verify(self.store, name, Level.FULL)
            if verdict.is_sound or not verdict.is_damaged or not mirrors.repair(name):
                return

    def _set_unsealed_aside(self, step: int, *, has_chosen: bool) -> list[tuple[str, str]]:
        """Quarantine folders without a manifest that are newer: their names are needed when their steps come again."""
        stated = {name: _step_named(name) for name in scan(self.store).foreign}
        newer = [name for name, found in stated.items() if found is not None and found > step]
        if newer and not has_chosen and not self.recorder.history().of_kind("resume"):
            # Saved before any job of this run has trained: whether they are complete is for the user to say.
            root = self.store.root
            unsealed = tuple((name, f"{_UNSEALED}; if it is complete: unbroken seal {root / name}") for name in newer)
            raise NoUsableCheckpoint(store=root, skipped=unsealed)
        passed = [(name, _UNSEALED) for name in newer]
        for name in newer:
            quarantine(self.store, name, (_UNSEALED,), job=self.lease.job, at_ns=time.time_ns())
        return passed

    def _find_named(self, asked: str, require: Callable[[Path], None]) -> ResumePoint:
        at_ns, job = time.time_ns(), self.lease.job
        path = Path(asked)
        names = newest_first(self.store, scan(self.store).committed)
        if path.is_file() or (path.is_dir() and path.resolve().parent != self.store.root.resolve()):
            require(path)
            if names:
                step = (infer_step(self.store.files, path.absolute()) or 0) if path.is_dir() else 0
                raise StartsOver(store=self.store.root, step=step, newest=names[0])
            record_rewind(self.store, target=str(path.absolute()), abandoned={}, job=job, at_ns=at_ns, request=asked)
            manifest = read_quietly(Store(path.absolute().parent), path.absolute().name)
            if manifest is None:
                _log.warning("%s has no manifest: its bytes cannot be verified", path)
            return ResumePoint(path.absolute(), manifest)
        if path.is_dir() and path.name not in names:
            require(path)
        name = named_in(self.store, path.name if path.is_dir() else asked)
        require(self.store.path(name))
        verdict = verify(self.store, name, Level.FULL)
        if not verdict.is_sound:
            reasons = tuple((name, str(finding)) for finding in verdict.findings)
            raise NoUsableCheckpoint(store=self.store.root, skipped=reasons)
        elsewhere = self._mirrors.ids_after(verdict.manifest.step) if self._mirrors and verdict.manifest else {}
        abandoned = rewind(self.store, names, target=name, job=job, at_ns=at_ns, request=asked, elsewhere=elsewhere)
        return ResumePoint(self.store.path(name), verdict.manifest, abandoned=tuple(abandoned))

    def begin(self, step: int, point: ResumePoint, *, is_comparable: bool, origin: str) -> None:
        """Record where the framework's loop really starts, and log it.

        Raises:
            StartsOver: it starts before checkpoints that nobody asked to give up.
        """
        self.world.from_first(lambda: self._require_no_newer(step))
        name = point.path.name if point.path is not None else None
        self.recorder.event("resume", step=step, name=name, notes=[], abandoned=list(point.abandoned), changed=[])
        self.recorder.begin_metrics(step, is_comparable=is_comparable and not point.abandoned)
        start_trackers(
            self._trackers,
            self.settings,
            self.layout,
            self.lease.number,
            self.recorder,
            step=step,
            is_other_start=step == 0 and not is_comparable,
            metadata=_own_metadata(self.store, point),
            longest_s=lambda: time_left(self.stops),
        )
        if not self.world.is_first:
            return
        ranks = amounts.plural(self.world.size, "rank")
        _log.info("run %s, job %d, %s, %s", self.layout.run, self.lease.number, ranks, origin)
        if point.abandoned:
            _log.info("moved to abandoned/: %s", ", ".join(point.abandoned))
        if name is None:
            _log.info("starting at step %s", f"{step:,}")
        else:
            verified = ", all checksums verified" if point.manifest is not None else ""
            _log.info("resuming from step %s (%s%s)", f"{step:,}", name, verified)
        if self.deadline is not None:
            left = amounts.duration(self.deadline.at_s - time.time())
            kept = amounts.duration(self.clock.reserve.seconds(self.deadline.runtime_s))
            _log.info("walltime limit in %s (%s); the last save starts %s before it", left, self.deadline.source, kept)

    def require_same(self, before: object, now: Mapping[str, object]) -> None:
        """Refuse a resume whose bits depend on something that has changed, unless the difference is accepted.

        Args:
            before: what the manifest of the checkpoint says; names that are not in it are not compared.
            now: what holds in this job.

        Raises:
            NotExact: a difference that was not accepted.
        """
        known = before if isinstance(before, dict) else {}
        changed = {name: value for name, value in now.items() if name in known and known[name] != value}
        accepted = self.settings.accept
        unmet = tuple((name, f"{known[name]} before, {value} now") for name, value in changed.items())
        if unmet := tuple(each for each in unmet if each[0] not in accepted):
            raise NotExact(differences=unmet)
        for name, value in changed.items():
            self.recorder.event("accept", names=[name], unused=[])
            if self.world.is_first:
                _log.warning("not exact: accepted: %s: %s before, %s now", name, known[name], value)

    def name_changes(
        self, before: object, now: Mapping[str, object], *, restored: Collection[str] | None = None
    ) -> None:
        """Name hyperparameters that have changed since the checkpoint; a script may change them on purpose.

        Args:
            before: what the manifest of the checkpoint says; names that are not in it are not compared.
            now: what holds in this job.
            restored: the names whose old values the checkpoint restores; None if that is not known.
        """
        known = before if isinstance(before, dict) else {}
        for name, value in now.items():
            if name in known and known[name] != value:
                if restored is None:
                    effect = "if the checkpoint does not restore the old value, the training is not the interrupted one"
                elif name in restored:
                    effect = f"the checkpoint restores the old value, so {known[name]} is used"
                else:
                    effect = f"the old value is not restored: {value} is used from here on"
                notice = f"{name} was {known[name]} when the checkpoint was saved and is {value} now: {effect}"
                self.recorder.event("notice", text=notice)
                if self.world.is_first:
                    _log.warning("%s", notice)

    def _require_no_newer(self, step: int) -> None:
        names = newest_first(self.store, scan(self.store).committed)
        manifests = [manifest for name in names if (manifest := read_quietly(self.store, name)) is not None]
        if any(manifest.step > step for manifest in manifests):
            raise StartsOver(store=self.store.root, step=step, newest=names[0])

    # ---- a step's edge ----

    def catch_signals(self) -> None:
        """Make signals stop requests, where they were left alone until the loop is known to ask; once."""
        if not self._is_catching and self.settings.catch_signals:
            catch_signals(self.stops)
        self._is_catching = True

    def step_done(self, step: int, **shown: object) -> StopReason | None:
        """A step is complete; why the job has to save and stop now, if it has to.

        Among several ranks a request is answered one step later, so that none of them waits for the vote.

        Raises:
            LeaseLost: another job has taken the run.
            PeerLost: another rank is gone.
        """
        self.clock.step_done()
        self._noticed = self._noticed or self.stops.look()
        is_lost = self._renewal is not None and self._renewal.lost is not None
        is_due, self.wants_save = self.wants_save or self.clock.is_due_by_clock(), False
        flags = [self._noticed is not None, is_lost, is_due]
        if self.world.size > 1:
            before, self._vote = self._vote, self.world.start_vote(flags)
            flags = before.read() if before is not None else [False, False, False]
        self.is_save_due = flags[2]
        if flags[1]:
            self.world.from_first(self._require_held)
        is_drill_over = self._drilled is not None and self._drilled.is_over_at(step)
        self.recorder.snapshot(step=step, **shown)
        if not (flags[0] or is_drill_over):
            return None
        if is_drill_over:
            self._noticed = self._noticed or StopReason("asked", "by a drill")
        reasons = [reason for reason in self.world.all_gather(self._noticed) if reason is not None]
        reason = reasons[0] if reasons else StopReason("asked", "another rank")
        self.recorder.event("stop", step=step, reason=reason.sentence(), by=reason.kind)
        if self.world.is_first:
            _log.info("stopping at step %s: %s", f"{step:,}", reason.sentence())
        return reason

    def _require_held(self) -> None:
        if self._renewal is not None and self._renewal.lost is not None:
            raise self._renewal.lost

    @property
    def save_steps_of_drill(self) -> int | None:
        """How often a drill saves; None for a real job, or where the script decides."""
        return None if self._drilled is None else self._drilled.drill.save_steps

    @property
    def is_drill(self) -> bool:
        """Whether this is a drill and no real job."""
        return self._drilled is not None

    # ---- saving ----

    def stage(self, step: int, *, coming_bytes: int) -> Path | StorageError:
        """A folder for the framework to write ``checkpoint-STEP`` into, the same on all ranks; no reader looks there.

        Without room for the save, or if the folder cannot be made, the refusal is recorded and returned: the framework
        would end the training with it.

        Args:
            step: the step to be saved.
            coming_bytes: what the save will take, if none was published yet.
        """
        # By two: the one between is for what was written.
        self._attempts += 2
        self._staged = staged = DraftName(self.lease.job, step, self._attempts)
        refused: StorageError | None = self.world.from_first(
            lambda: self._try_to_stage(staged, self._size_bytes or coming_bytes)
        )
        if refused is None:
            return self.store.path(str(staged))
        self.note_refusal(step, refused)
        return refused

    def _try_to_stage(self, staged: DraftName, coming_bytes: int) -> StorageError | None:
        try:
            require_room(self.store, coming_bytes=coming_bytes, coming_files=_FILES_OF_A_SAVE)
            begin_folder(self.store, staged)
        except StorageError as refused:
            return refused
        return None

    def unstage(self) -> None:
        """Give up a draft that the framework did not write into; what cannot be removed is swept later."""
        if self._staged is not None and self.world.is_first:
            with contextlib.suppress(StorageFailed):
                self.store.files.remove_tree(self.store.path(str(self._staged)))

    def publish(self, folder: Folder, *, is_staged: bool) -> Published:
        """Make a checkpoint of what the framework wrote; every rank has written its files when all have called this.

        What was not staged the framework wrote under the final name: then the folder is sealed where it is.

        Raises:
            LeaseLost: another job has taken the run; nothing was published.
            PeerLost: another rank is gone.
        """
        began_s = time.monotonic()
        self.recorder.event("save", step=folder.step, save_kind=PERIODIC, waited_s=0.0)
        # The files of all ranks are there before any is read.
        self.world.all_gather(None)
        done = self.world.from_first(lambda: self._try_to_publish(folder, is_staged=is_staged))
        done = replace(done, seconds=time.monotonic() - began_s)
        self._note(folder, done)
        self.clock.resume_clock()
        return done

    def save_by_first(self, folder: Folder, write: Callable[[Path], None], *, coming_bytes: int) -> Published:
        """Save by a framework that lets rank 0 alone write; for rank 0, and not collective.

        What failed is recorded and returned, a lost lease too: the other ranks wait for the framework and not here.

        Args:
            folder: what is saved.
            write: writes its files into a folder, which exists.
            coming_bytes: what the save will take, if none was published yet.
        """
        began_s = time.monotonic()
        self._attempts += 2
        self._staged = staged = DraftName(self.lease.job, folder.step, self._attempts)
        self.recorder.event("save", step=folder.step, save_kind=PERIODIC, waited_s=0.0)
        try:
            refused = self._try_to_stage(staged, self._size_bytes or coming_bytes)
            if refused is not None:
                raise refused
            path = self.store.path(str(staged)) / folder.name
            self.store.files.make_directory(path)
            with written_by_framework(path):
                write(path)
            done = self._try_to_publish(folder, is_staged=True)
        except UnbrokenError as error:
            self.unstage()
            done = Published(None, error)
        done = replace(done, seconds=time.monotonic() - began_s)
        self._note(folder, done)
        self.clock.resume_clock()
        return done

    def sweep(self, policies: Collection[Policy]) -> None:
        """Sweep what no policy keeps any longer; for rank 0, and not collective. What fails is tried again later."""
        names = newest_first(self.store, scan(self.store).committed)
        if not names:
            return
        try:
            settle(
                self.store,
                names[0],
                policies,
                job=self.lease.job,
                is_live=self._is_of_later_job,
                away=self._mirrors_away(),
            )
        except StorageFailed as refused:
            _log.warning("could not sweep: %s; the next save tries again", refused.headline())

    def _try_to_publish(self, folder: Folder, *, is_staged: bool) -> Published:
        staged = self._staged if is_staged else None
        folder = self._with_trackers(folder)
        try:
            if staged is None:
                name, size_bytes = self._seal(folder)
            else:
                name, size_bytes = publish_folder(self.store, folder, staged, self._fence)
        except StorageFailed as refused:
            return Published(None, refused)
        return self._committed(name, size_bytes, folder)

    def _committed(self, name: str, size_bytes: int, folder: Folder) -> Published:
        if self._mirrors is not None:
            self._mirrors.committed()
        try:
            decision, plan = settle(
                self.store,
                name,
                folder.policies,
                job=self.lease.job,
                is_live=self._is_of_later_job,
                away=self._mirrors_away(),
            )
        except StorageFailed as refused:
            _log.warning("could not sweep after %s: %s; the next save tries again", name, refused.headline())
            return Published(name, size_bytes=size_bytes)
        return Published(name, size_bytes=size_bytes, removed=plan.names, held=decision.held)

    def _mirrors_away(self) -> Collection[str]:
        return self._mirrors.away() if self._mirrors is not None else ()

    def _fence(self) -> None:
        require_held(self.layout.run, self.lease)

    def _seal(self, folder: Folder) -> tuple[str, int]:
        self._fence()
        sealed = seal(self.store, folder.name, at_ns=time.time_ns(), step=folder.step, metrics=folder.metrics)
        return folder.name, sealed.manifest.size_bytes

    def _is_of_later_job(self, draft: DraftName) -> bool:
        return (number_of(draft.job) or self.lease.number + 1) > self.lease.number

    def _with_trackers(self, folder: Folder) -> Folder:
        ids = self.recorder.tracker_ids
        return replace(folder, metadata={**folder.metadata, TRACKERS: dict(ids)}) if ids else folder

    def begin_draft(self, draft: Draft, *, coming_bytes: int, coming_files: int) -> None:
        """Make a draft that ranks write their parts into; on the first rank, in any thread.

        Raises:
            NoRoom: the file system has no room for the save.
            StorageFailed: I/O error.
        """
        # Left by a save that failed on some rank: its own framework raised, and nobody told us.
        draft.discard()
        require_room(self.store, coming_bytes=coming_bytes, coming_files=coming_files)
        begin_folder(self.store, draft.name)
        self.recorder.event("save", step=draft.name.step, save_kind=PERIODIC, waited_s=0.0)

    def commit_draft(
        self, draft: Draft, parts: Sequence[Part], folder: Folder, *, seconds: float, paused_s: float, called: str
    ) -> Published:
        """Make a checkpoint of a draft whose parts all ranks have reported; on the first rank, in any thread.

        Raises:
            EvidenceMissing: a part was not reported, or is not there as it was reported.
            LeaseLost: another job has taken the run; nothing was published.
            StorageFailed: I/O error; nothing was published.
        """
        folder = self._with_trackers(folder)
        record = Record(
            PERIODIC, time.time_ns(), origin=folder.origin, metrics=folder.metrics, metadata=folder.metadata
        )
        names = [part.name for part in parts]
        name = commit(draft, plan=names, parts=parts, record=record, fence=self._fence, called=called)
        done = self._committed(name, sum(part.size_bytes for part in parts), folder)
        done = replace(done, seconds=seconds)
        self._note(folder, done, paused_s=paused_s)
        return done

    def _note(self, folder: Folder, done: Published, *, paused_s: float | None = None) -> None:
        if done.error is not None:
            self.note_refusal(folder.step, done.error)
            return
        paused_s = done.seconds if paused_s is None else paused_s
        self._size_bytes = done.size_bytes
        self.clock.save_ended(paused_s, done.seconds)
        self.recorder.event(
            "commit",
            step=folder.step,
            name=done.name,
            bytes=done.size_bytes,
            seconds=done.seconds,
            paused_s=paused_s,
            removed=list(done.removed),
            data=None,
        )
        self.recorder.committed(folder.step)
        self.recorder.snapshot(latest_checkpoint=done.name)
        if self.world.is_first:
            _log.info("saved %s in %.1f s (training paused %.1f s)", done.name, done.seconds, paused_s)

    def note_refusal(self, step: int, error: UnbrokenError) -> None:
        """Record a save that failed; training continues."""
        self.recorder.event(
            "save-failed", step=step, error=error.kind, reason=error.headline(), rank=0, cause=error.kind
        )
        if self.world.is_first:
            _log.warning("could not save step %s: %s; the last commit is intact", f"{step:,}", error.headline())

    # ---- ending ----

    def close(self, ending: StopReason | BaseException, *, step: int) -> None:
        """Record how the job ended, wait for uploads where it ended well, and release the run."""
        try:
            if isinstance(ending, StopReason) and self._mirrors is not None:
                at_s = self.stops.deadline_s
                longest_s = None if at_s is None else max(at_s - time.time() - _LAST_SECONDS, 0.0)
                self._mirrors.finish(longest_s=longest_s, signalled=lambda: self.stops.signalled)
        finally:
            outcome = conclude(ending, step=step, job=self.lease.number)
            self.recorder.end(outcome)
            if self._renewal is not None:
                release_run(self.layout, self._renewal, is_followed=outcome.status in ("stopped", "completed"))
            if self._mirrors is not None:
                self._mirrors.close()
            self.world.close()
            self.stops.restore()
        if self.world.is_first:
            follow_up = "; the same command resumes the run" if outcome.verdict == "again" else ""
            _log.info("job %s at step %s: %s%s", outcome.status, f"{step:,}", outcome.reason, follow_up)


@contextlib.contextmanager
def written_by_framework(path: Path) -> Iterator[None]:
    """Errors of a framework's own write as ours: torch and safetensors raise no OSError if storage refuses.

    Raises:
        StorageFailed: storage refused.
    """
    try:
        yield
    except Exception as error:
        if is_refusal(error):
            raise StorageFailed(operation="write the checkpoint", path=path, cause=str(error)) from error
        raise


def is_refusal(error: object) -> bool:
    """Whether an error says that storage refused."""
    return isinstance(error, OSError) or (
        isinstance(error, Exception) and any(said in str(error) for said in _REFUSALS)
    )


def _step_named(name: str) -> int | None:
    """The step of a folder that a framework named: ``checkpoint-500``, ``step-500``, ``global_step500``."""
    return step_in_name(name) if _STEP_FOLDER.fullmatch(name) else step_of(name)


def _own_metadata(store: Store, point: ResumePoint) -> Mapping[str, object]:
    """What the checkpoint says of the run; one of another place speaks of another run."""
    is_own = point.path is not None and point.path.parent == store.root
    return point.manifest.metadata if is_own and point.manifest is not None else {}


def open_framework_run(directory: Path, settings: Settings, *, origin: str, catches_now: bool = True) -> FrameworkRun:
    """Take the lease of a run and start its records. Collective.

    Args:
        directory: the run.
        settings: its settings.
        origin: the framework, as manifests name it.
        catches_now: signals are stop requests from here on; else from ``catch_signals`` on.

    Raises:
        OtherFramework: its checkpoints were saved with another framework; nothing was changed.
        RunHeld: another live job has it.
        NotShared: a rank does not see the directory of the others.
        UnbrokenError: the directory, the drill or a mirror cannot be used.
    """
    world = World.current()

    def opened(leased: LeasedRun, renewal: Renewal | None, drilled: Drilled | None) -> FrameworkRun:
        world.from_first(lambda: mark_checkpoints_here(leased.layout, job=leased.lease.job))
        return FrameworkRun(leased, renewal, drilled, origin, catches_now=catches_now)

    try:
        return with_lease(world, directory, settings, then=opened, origin=origin)
    except BaseException:
        world.close()
        raise
