"""One job of a loop with Accelerate, on one rank: where it is, and what happens at the edges of its steps."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Final

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate import __version__ as accelerate_version

from unbroken.errors import RankFailed, StorageError, StorageFailed, UnsavedState
from unbroken.frameworks.accelerator_contents import Held, fixed_of, items_of, require_complete, require_usable, size_of
from unbroken.frameworks.before_batches import BeforeBatches
from unbroken.frameworks.epoch_rng import packed, read_rng, rng_name
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, ResumePoint, is_refusal
from unbroken.frameworks.loader_pass import (
    Began,
    ContinuedPass,
    batch_count,
    begin_pass,
    forget_own_state,
    is_iterated,
    iteration_of,
    packed_states,
    seed_of,
    set_iteration,
    set_seed_of,
    settle,
    unpacked_states,
    way_of,
)
from unbroken.frameworks.unsaved_tensors import UnsavedTensors, named_holders
from unbroken.loop.job_start import record_data_notices
from unbroken.loop.logged_metrics import LoggedMetrics
from unbroken.loop.loop_checks import are_equal
from unbroken.loop.trackers import warn_of_doubled
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason
from unbroken.state.audit import UnsavedWatch, audit, named_rngs
from unbroken.state.cursor import set_states, states_of
from unbroken.state.hyperparameters import Script
from unbroken.state.loaders import remarks, renew, worker_count
from unbroken.state.rng import capture_rng, restore_rng, rng_devices
from unbroken.state.wrappers import real
from unbroken.store.keep import Policy, compose
from unbroken.tested_versions import minor_version

_log = logger(__name__)
TESTED: Final = ("1.15",)
ORIGIN: Final = "accelerate"
# In the manifest: what must not change between two jobs of one run, and where the loop was.
_FIXED: Final = "fixed"
_HYPERPARAMETERS: Final = "hyperparameters"
_PLACE: Final = "place"
_MORE: Final = "accelerator"
# So many batches the RNG is watched for a data set that draws from it.
_WATCHED: Final = 4


@dataclass
class Place:
    """Where a loop is: complete steps and epochs, complete passes of this epoch, and batches of an open pass."""

    step: int = 0
    epoch: int = 0
    passes: int = 0
    batches: int = 0
    is_open: bool = False

    @property
    def is_between(self) -> bool:
        """Whether it is at an epoch's edge."""
        return not self.is_open and not self.passes


class AccelerateJob:
    """One job, from ``attach`` to the end of the loop."""

    def __init__(self, run: FrameworkRun, accelerator: Accelerator, *, reread: bool | None) -> None:
        self.run, self.accelerator, self._reread = run, accelerator, reread
        self.place = Place()
        self.logged = LoggedMetrics()
        self._max_steps: int | None = None
        self._point = ResumePoint()
        self._held = Held([], [], [], [], [])
        # Where the checkpoint was saved, until the loop is there, and this rank's RNG states of it.
        self._saved: Place | None = None
        self._rng: Mapping[str, Any] = {}
        self._began: Began | None = None
        self._loader: Any = None
        self._saved_step: int | None = None
        # Of the chosen checkpoint: where a job ends whose resume is refused.
        self._found_step = 0
        self._hyperparameters: Mapping[str, str] = {}
        self._updates = 0
        self._undo: list[Any] = []
        self._is_ours = self._has_warned = False
        self._watched, self._watch = 0, UnsavedWatch({})
        self._named: Mapping[str, object] = {}
        self._unsaved = UnsavedTensors()
        self._before: BeforeBatches | None = None
        self._workers_before: list[int | None] | None = None
        self._looked_for_open = 0

    @property
    def is_complete(self) -> bool:
        """Whether the target of steps is reached."""
        return self._max_steps is not None and self.place.step >= self._max_steps

    def has_epoch(self, total: int) -> bool:
        """Whether there is an epoch to begin or to continue; what follows its batches is done again after a resume."""
        place = self._saved or self.place
        return place.epoch < total and not (self.is_complete and place.is_between)

    # ---- resuming ----

    def resume(self, asked: str | None, frame: FrameType | None) -> None:
        """Find the checkpoint and let Accelerate load it.

        Raises:
            ValueError: the accelerator holds nothing, or what cannot be resumed exactly.
            UnsavedState: there is state that Accelerate does not save, and the audit is set to raise.
            NotExact: the accelerator differs from that of the checkpoint.
        """
        self._held = Held.of(self.accelerator)
        require_usable(self.accelerator, self._held)
        for loader in self._held.loaders:
            settle(loader)
        self._audit(frame)
        # Before anything is restored: afterwards the values that the script has chosen are gone.
        script = Script(items_of(self.accelerator, self._held))
        self._point = point = self.run.find_resume_point(asked, require_complete)
        if point.manifest is not None:
            self._found_step = point.manifest.step
            self.run.require_same(point.manifest.metadata.get(_FIXED), fixed_of(self.accelerator, self._held))
        self._name_changes(script, point)
        if point.path is not None:
            self._load(point.path, point.manifest.metadata if point.manifest is not None else {})
        if self.run.lease.number > 1:
            self._count_past_existing()
        self._undo += [
            self.accelerator.register_save_state_pre_hook(self._on_save_state).remove,
            self.accelerator.register_load_state_pre_hook(self._on_load_state).remove,
        ]
        for each in self._held.optimizers:
            if isinstance(optimizer := real(each), torch.optim.Optimizer):
                self._undo.append(optimizer.register_step_post_hook(self._updated).remove)

    def _count_past_existing(self) -> None:
        """Let the script's own saves get new numbers: a killed job may have saved after its last checkpoint.

        Accelerate raises where the folder of its next number exists, and so would every later job.
        """
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming:
            return
        names = [each.name for each in Path(self.accelerator.project_dir, "checkpoints").glob("checkpoint_*")]
        numbers = [int(name.rpartition("_")[2]) for name in names if name.rpartition("_")[2].isdecimal()]
        project.iteration = max([project.iteration, *(number + 1 for number in numbers)])

    def _name_changes(self, script: Script, point: ResumePoint) -> None:
        """Name the values that the script has chosen otherwise than when the run began; the checkpoint's are used."""
        if point.path is None:
            self._hyperparameters = script.start()
            return
        before = point.manifest.metadata.get(_HYPERPARAMETERS) if point.manifest is not None else None
        changes = script.changes(before or {})
        self.run.name_changes(
            {each.name: each.checkpoint for each in changes},
            {each.name: each.script for each in changes},
            restored=[each.name for each in changes],
        )
        self._hyperparameters = script.continued(before, "checkpoint")

    def _load(self, path: Path, metadata: Mapping[str, Any]) -> None:
        accelerator = self.accelerator
        accelerator.load_state(str(path))
        for loader in self._held.loaders:
            if way_of(loader, reread=self._reread) != "state":
                forget_own_state(loader)
        held = read_rng(path, self.run.world.rank)
        if held is None or _PLACE not in metadata:
            _log.warning("%s was saved without unbroken: its step and its place in the data are not known", path)
            return
        place = Place(**metadata[_PLACE])
        self.place, self._saved, self._rng = Place(step=place.step, epoch=place.epoch), place, held
        self._saved_step = place.step
        more = metadata[_MORE]
        # From a file whose errors Accelerate ignores.
        accelerator.step = more["step"]
        accelerator.project_configuration.iteration = more["iteration"]
        self._workers_before = more.get("workers")
        states = [unpacked_states(text) for text in held["loaders"]["now"]]
        for number, loader in enumerate(self._held.loaders):
            set_seed_of(loader, more["seeds"][number])
            set_iteration(loader, more["iterations"][number])
            set_states(loader, states[number])

    def _audit(self, frame: FrameType | None) -> None:
        """Name the live state that Accelerate does not save."""
        settings = self.run.settings
        if settings.audit == "off":
            return
        held, scaler = self._held, self.accelerator.scaler
        loaders = [SimpleNamespace(loader=each) for each in held.loaders]
        objects = [*held.models, *held.optimizers, *held.schedulers, *loaders, *held.registered, scaler]
        known = {str(number): each for number, each in enumerate(objects) if each is not None}
        found = [
            each
            for each in audit(known, frame)
            # Iterators of torchdata's loader have a state, too, which is that of the loader.
            if each.called not in settings.audit_ignore and not each.type_name.startswith("_")
        ]
        self._watch = UnsavedWatch(named_rngs(frame, ignore=settings.audit_ignore))
        self._named = named_holders(frame, ignore=settings.audit_ignore)
        self._report([str(each) for each in found])

    def _changed_tensors(self) -> list[str]:
        """What the script keeps in tensors, changes and has not registered."""
        held = self._held
        saved = [*held.models, *held.optimizers, *held.schedulers, *held.loaders, *held.registered]
        return [] if self._unsaved.is_over else self._unsaved.changed(self._named, saved=saved)

    def _report(self, unsaved: list[str]) -> None:
        if not unsaved:
            return
        if self.run.settings.audit == "error":
            raise UnsavedState(found=tuple(unsaved))
        for each in unsaved if self.run.world.is_first else ():
            _log.warning(
                "not saved by Accelerate, so a resume starts it over: %s (accelerator.register_for_checkpointing)", each
            )
        self.run.recorder.event("audit", unsaved=unsaved)

    def begin(self, max_steps: int | None) -> None:
        """The loop starts."""
        self._max_steps = max_steps
        if Held.of(self.accelerator).counts() != self._held.counts():
            raise RuntimeError("something was prepared or registered after attach: attach comes after it")
        origin = f"accelerate {accelerate_version}"
        self.run.begin(self.place.step, self._point, is_comparable=True, origin=origin)
        if self.run.world.is_first and minor_version(accelerate_version) not in TESTED:
            _log.warning("%s was not tested with unbroken (tested: %s)", origin, ", ".join(TESTED))
        if self.run.world.is_first:
            warn_of_doubled(self.run.settings, self.accelerator.log_with, "log_with")
        # Of each loader, since a loop may use any of them.
        notices = dict.fromkeys(each for loader in self._held.loaders for each in remarks(loader, is_replayed=True))
        notices.update(dict.fromkeys(self._other_workers()))
        if notices:
            record_data_notices(list(notices), self.run.recorder, self.run.world)
        self.run.recorder.snapshot(step=self.place.step, max_steps=max_steps)
        self.run.clock.resume_clock()

    def _other_workers(self) -> list[str]:
        before, now = self._workers_before, [worker_count(each) for each in self._held.loaders]
        if before is None or before == now:
            return []
        return [f"num_workers was {before} and is {now}: not exact if the data set draws random numbers or is iterable"]

    def _restore(self) -> None:
        """The loop is where the checkpoint was saved: from here on it draws what it would have drawn."""
        self._saved = None
        self._undo_what_was_repeated()
        restore_rng(self._rng["rng"])

    def _undo_what_was_repeated(self) -> None:
        before, self._before = self._before, None
        changed = before.undo() if before is not None else []
        if changed and self.run.world.is_first:
            _log.info(
                "changed again before the batches of epoch %d, and put back: %s", self.place.epoch, ", ".join(changed)
            )

    # ---- epochs and passes ----

    def begin_epoch(self) -> None:
        """An epoch begins or is continued."""
        if self._saved is None:
            return
        if self._saved.is_between:
            self._restore()
        else:
            self._before = BeforeBatches(self._held, self._point.path)

    def begin_pass(self, loader: Any) -> Iterator[Any]:  # noqa: ANN401
        """The batches of a pass that the loop has not had yet.

        Raises:
            ValueError: the ranks have different numbers of batches.
        """
        self._require_even(loader)
        saved, place = self._saved, self.place
        if saved is not None and place.passes < saved.passes:
            if place.passes + 1 == saved.passes and not saved.is_open:
                self._restore()
            return iter(())
        if self.is_complete:
            if saved is not None:
                self._restore()
            return iter(())
        self._loader, self._watched, place.is_open = loader, 0, True
        if saved is None:
            place.batches, self._began = 0, begin_pass(loader)
            return iter(loader)
        place.batches = saved.batches
        held, more = self._rng, self._point.manifest.metadata[_MORE] if self._point.manifest else {}
        self._began = Began(held["epoch"], unpacked_states(held["loaders"]["began"]), more.get("pass"))
        way = way_of(loader, reread=self._reread)
        self._saved = None
        self._undo_what_was_repeated()
        if self.run.world.is_first:
            _log.info("continuing epoch %d after %s (%s)", place.epoch, f"{saved.batches:,} batches", _WAYS[way])
        rest = ContinuedPass(self.accelerator, loader, self._began, saved.batches, way)
        return rest.rest(held["rng"], epoch=place.epoch)

    def _require_even(self, loader: object) -> None:
        if self.run.world.size == 1:
            return
        counts = self.run.world.all_gather(batch_count(loader))
        if len({*counts}) > 1:
            raise ValueError(
                f"the ranks have different numbers of batches ({', '.join(map(str, counts))}), so that they have no "
                "common steps: set even_batches=True or drop_last=True"
            )

    def next_batch(self, batches: Iterator[Any]) -> tuple[Any] | None:
        """The next batch in a tuple of its own; None at the end of the pass."""
        is_watched = 0 < self._watched <= _WATCHED and not worker_count(self._loader)
        before = capture_rng() if is_watched else None
        try:
            batch = next(batches)
        except StopIteration:
            return None
        self._watched += 1
        if before is not None and not are_equal(before, capture_rng()):
            self._watched = _WATCHED + 1
            self.run.recorder.event("data", notices=["draws from the global RNG while batches are made"])
            if self.run.world.is_first:
                _log.warning(
                    "the data set, its sampler or the collator draws from a global RNG: after a resume inside an epoch "
                    "it draws other numbers; derive them from the sample, or set num_workers to 1 or more"
                )
        self.place.batches += 1
        return (batch,)

    def end_pass(self) -> None:
        """A pass is complete, or was left."""
        place = self.place
        place.passes, place.batches, place.is_open = place.passes + 1, 0, False

    def end_epoch(self, total: int) -> StopReason | None:
        """An epoch is complete, with what follows its batches; save what was requested, and the end of the training."""
        place = self.place
        place.epoch, place.passes = place.epoch + 1, 0
        # An evaluation after the batches is one of the last step.
        self.logged.close_step(place.step)
        is_wanted, self.run.wants_save = self.run.wants_save, False
        if any(self.run.world.all_gather(is_wanted)) or not self.has_epoch(total):
            self.save_last()
        return None

    # ---- a step's edge ----

    def _updated(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self.place.is_open and not self.place.passes:
            raise RuntimeError(
                "the optimizer was updated outside of run.batches: no step counts it, and no checkpoint is saved; "
                "write `for epoch in run.epochs(n)` and, in it, `for batch in run.batches(loader)`"
            )
        self._require_synced(optimizer)
        self._updates += 1

    def _require_synced(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse weights that differ between the ranks: Accelerate saves those of rank 0 alone.

        Raises:
            ValueError: the optimizer updates a model whose gradients are not synchronized.
        """
        apart = [each for each in self._held.models if not getattr(each, "require_backward_grad_sync", True)]
        # Another model than the optimizer's own may wait meanwhile: a generator while its critic is trained.
        updated = {id(value) for group in optimizer.param_groups for value in group["params"]} if apart else set()
        if any(id(value) in updated for each in apart for value in each.parameters()):
            raise ValueError(
                "the ranks update their weights apart (LocalSGD, or optimizer.step() inside no_sync): Accelerate saves "
                "those of rank 0 alone, and a resume would give them to all ranks"
            )

    def count_updates(self) -> bool:
        """Whether the body made an update of the optimizer: then a step is complete."""
        accelerator, updates = self.accelerator, self._updates
        self._updates = 0
        # A loss scaler that skips an update has used the gradients all the same.
        if not updates and not (accelerator.sync_gradients and accelerator.optimizer_step_was_skipped):
            return False
        self.place.step += 1
        self.logged.close_step(self.place.step)
        return True

    def end_batch(self) -> StopReason | None:
        """The body of a batch is done; why the job stops here, saved, if it does."""
        if not self.count_updates():
            return None
        step = self.place.step
        if not self._unsaved.has_looked:
            self._changed_tensors()
        if step % self.run.settings.logging_steps == 0:
            self._write_metrics()
        reason = self.run.step_done(step)
        is_due = self.run.clock.is_due_by_step(step) or self.run.is_save_due
        if reason is not None or is_due or self.is_complete:
            self._save(must=reason is not None or self.is_complete)
        return reason

    def _write_metrics(self, *, durable: bool = False) -> None:
        rows = self.logged.read()
        for step, values in rows:
            self.run.recorder.metrics(step, values)
        if rows and (loss := self.logged.number("loss")) is not None:
            self.run.recorder.snapshot(loss=loss, loss_step=self.logged.steps["loss"])
        self.run.recorder.flush(durable=durable)

    # ---- saving ----

    def save_last(self) -> None:
        """Save where the loop is now, unless this step is saved.

        Raises:
            UnbrokenError: the save failed.
        """
        self._save(must=True)

    def _save(self, *, must: bool) -> None:
        step = self.place.step
        if step == self._saved_step:
            return
        self._write_metrics(durable=True)
        self._report([*map(str, self._watch.drawn_from()), *self._changed_tensors()])
        self._name_gradients()
        self._name_open_loaders()
        self.run.clock.save_started()
        staged = self.run.stage(step, coming_bytes=size_of(self._held.models))
        if isinstance(staged, StorageError):
            if must:
                raise staged
            return
        metrics = {key: float(value) for key, value in self.logged.of_step(step).items() if math.isfinite(value)}
        folder = Folder(step, ORIGIN, metrics, self._metadata(), self._policies())
        try:
            self.run.world.all_or_none(lambda: self._write(staged / folder.name))
        except (StorageError, RankFailed) as refused:
            self.run.unstage()
            self.run.note_refusal(step, refused)
            if must:
                raise
            return
        done = self.run.publish(folder, is_staged=True)
        if done.error is None:
            self._saved_step = step
        elif must:
            raise done.error

    def _policies(self) -> tuple[Policy, ...]:
        kept = self.run.settings
        return compose(kept.keep_last_k, kept.keep_milestone_every, kept.keep_every_seconds, kept.keep_best)

    def _metadata(self) -> dict[str, Any]:
        accelerator = self.accelerator
        more = {
            "step": accelerator.step,
            "iteration": accelerator.project_configuration.iteration,
            "iterations": [iteration_of(each) for each in self._held.loaders],
            "seeds": [seed_of(each) for each in self._held.loaders],
            "pass": self._began.iteration if self._began is not None else None,
            "workers": [worker_count(each) for each in self._held.loaders],
        }
        return {
            _FIXED: fixed_of(accelerator, self._held),
            _HYPERPARAMETERS: self._hyperparameters,
            _PLACE: asdict(self.place),
            _MORE: more,
        }

    def _write(self, folder: Path) -> None:
        """Let Accelerate write its files, and add what it does not save.

        Raises:
            StorageFailed: I/O error.
        """
        rng: dict[str, Any] = {"rng": capture_rng(rng_devices())}
        loaders = {"now": [packed_states(states_of(each)) for each in self._held.loaders], "began": "[]"}
        if self._began is not None and self.place.is_open:
            rng["epoch"] = self._began.rng
            loaders["began"] = packed_states(self._began.own)
        project = self.accelerator.project_configuration
        was = project.automatic_checkpoint_naming, project.iteration
        # It would choose another folder, after it has deleted the oldest one.
        project.automatic_checkpoint_naming, self._is_ours = False, True
        try:
            self.accelerator.save_state(str(folder))
        except (OSError, RuntimeError) as refused:
            if is_refusal(refused):
                raise StorageFailed(operation="write", path=folder, cause=str(refused)) from refused
            raise
        finally:
            project.automatic_checkpoint_naming, project.iteration = was
            self._is_ours = False
        self.run.store.files.write_new(folder / rng_name(self.run.world.rank), [packed({**rng, "loaders": loaders})])

    def _name_gradients(self) -> None:
        """Say it if gradients that no update has used would be lost: with accumulation they belong to the next one."""
        if self.accelerator.gradient_accumulation_steps == 1 or self._has_warned or not self.run.world.is_first:
            return
        groups = [group for each in self._held.optimizers for group in each.param_groups]
        grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if any(bool(grad.any()) for grad in grads):
            self._has_warned = True
            _log.warning(
                "gradients are left at the end of a step, and a checkpoint does not hold them: call "
                "optimizer.zero_grad() after optimizer.step(), inside accelerator.accumulate()"
            )

    def _name_open_loaders(self) -> None:
        """Say it if another loader is in the middle of a pass: a resume starts it over."""
        if self._looked_for_open >= _WATCHED or not self.run.world.is_first:
            return
        begun = [each for each in self.accelerator.gradient_state.dataloader_references if each is not None]
        suspects = [each for each in self._held.loaders if each is not self._loader and any(each is it for it in begun)]
        # A loop that was left by `break` leaves its loader among those: what counts is an iterator that lives.
        self._looked_for_open += bool(suspects)
        if any(is_iterated(each) for each in suspects):
            self._looked_for_open = _WATCHED
            _log.warning(
                "a second loader is in the middle of its batches, and a checkpoint holds only the place in that of "
                "run.batches: a resume starts the second one over"
            )

    def _on_save_state(self, models: object, weights: object, output_dir: str) -> None:
        if not self._is_ours and self.run.world.is_first:
            _log.warning("accelerator.save_state(%r) makes no checkpoint of the run: run.save() does", output_dir)

    def _on_load_state(self, models: object, input_dir: str) -> None:
        raise RuntimeError(
            f"accelerator.load_state({input_dir!r}) would replace the state of the run: attach has loaded its "
            "checkpoint; load another state before attach, or name a checkpoint by attach(..., resume=...)"
        )

    # ---- ending ----

    def close(self, ending: StopReason | BaseException) -> None:
        """Release the run and the accelerator."""
        while self._undo:
            self._undo.pop()()
        for loader in self._held.loaders:
            # Workers that are kept for another epoch: the exit of the interpreter would kill them, and torch report it.
            with contextlib.suppress(RuntimeError):
                renew(loader)
        self._write_metrics(durable=True)
        self.run.close(ending, step=self.place.step or self._found_step)


_WAYS: Final = {
    "index": "skipped by index",
    "reread": "read again",
    "state": "by the state of the loader",
}
