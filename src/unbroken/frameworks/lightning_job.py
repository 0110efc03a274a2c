"""One ``fit`` of a Lightning ``Trainer`` on one rank, from its setup to its end.

In Lightning all ranks call a save, and only rank 0 writes. So rank 0 commits, and the other ranks get the result at
their next edge. With ``DeepSpeedStrategy`` all ranks write one folder and commit it together. Imports neither
``lightning`` nor ``pytorch_lightning``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.errors import LeaseLost, NoUsableCheckpoint, StorageError, StorageFailed, WeightsOnly
from unbroken.frameworks.epoch_rng import packed, unpacked
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, Published, ResumePoint
from unbroken.frameworks.lightning_leftovers import (
    Leftovers,
    ask_again,
    given_up,
    held_by,
    let_overwrite,
    metadata_of,
    note_written,
)
from unbroken.frameworks.lightning_links import (
    FILE,
    SAVED_AS,
    Linked,
    Links,
    forget_missing,
    moved,
    paths_of,
    savers_of,
)
from unbroken.frameworks.lightning_loader import TrainPosition, sizes_of
from unbroken.frameworks.lightning_metrics import metrics_of, resume_metrics
from unbroken.frameworks.lightning_state import (
    OURS,
    Progress,
    described,
    progress_now,
    progress_of,
    script_items,
    size_of,
)
from unbroken.frameworks.zero_engine import coming_bytes, is_accumulating
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason
from unbroken.state.hyperparameters import Script
from unbroken.state.rng import restore_rng
from unbroken.store.keep import LastK, Policy
from unbroken.store.scan import newest_first, scan
from unbroken.tested_versions import minor_version

_log = logger(__name__)
TESTED: Final = ("2.6",)
ORIGIN: Final = "lightning"
# In the manifest: what must not change between two jobs of one run, and the target of a training that has ended.
_FIXED: Final = "fixed"
_HYPERPARAMETERS: Final = "hyperparameters"
_ENDED: Final = "ended"
# Whether a longer training continues from there exactly.
_EXTENDS: Final = "extends_exactly"
# The name by which a difference of the training data is accepted.
_DATA: Final = "train_dataloader"
_OF_THE_JOB: Final = (
    "world_size",
    "accumulate_grad_batches",
    "precision",
    "zero_stage",
    "optimizers",
    "lr_schedulers",
)
_PACKAGES: Final = ("lightning", "pytorch_lightning")
_EPOCH_START: Final = "on_train_epoch_start"
_MICRO_STEPS: Final = "micro_steps"
# Beside the RNG states of a rank: its metrics.
_METRICS: Final = "metrics"
# After so many steps in a row a save that is due looks for another place than a quiet step, and a warning comes.
_OVERDUE: Final = 2
_MANY: Final = 10

Write = Callable[[Path], None]


@dataclass(frozen=True)
class SaveOptions:
    """How often a job saves beside ``ModelCheckpoint``, and how many of the newest checkpoints are kept."""

    save_steps: int | None
    keep_last_k: int


class LightningJob:
    """One ``fit``, on one rank."""

    def __init__(self, run: FrameworkRun, trainer: Any, options: SaveOptions, hide_lines: Callable[[], None]) -> None:  # noqa: ANN401
        self.run, self._trainer, self._options, self._hide_lines = run, trainer, options, hide_lines
        self.point = ResumePoint()
        self.stop: StopReason | None = None
        self.step = 0
        # Where Lightning is told to write what this job saves by itself; nothing is ever written there.
        self.own_path = run.layout.run / FILE
        self._is_found = self.has_begun = False
        self._loaded: Mapping[str, Any] | None = None
        self._saved_rng: Mapping[str, Any] | None = None
        self._links: Links | None = None
        # What ModelCheckpoint callbacks held at the last save, without those that never give a path up.
        self._held: set[Path] = set()
        self._position: TrainPosition | None = None
        self._fixed: dict[str, Any] = {}
        self._hyperparameters: dict[str, Any] = {}
        # What the script has constructed, taken before anything is restored.
        self._script: Script | None = None
        # Of the last save: whether a resume from there is exact, and on rank 0 what became of it.
        self._is_exact, self._is_told = False, True
        self._done: Published | None = None
        # Where the last save was described, and where and as what the last commit was made.
        self._edge: tuple[Progress, list[bytes]] | None = None
        self._committed: tuple[tuple[Progress, list[bytes]] | None, Published] | None = None
        # Of the last save that was described, and of the last one that was committed.
        self._described_at = (0, 0)
        self._saved_batch: int | None = None
        self._saved_step = 0
        # A save that was not exact, or a refused one, is made up for at the next edge.
        self._is_due = self._is_ending = False
        # Steps in a row at which a save was due and could not be made, and whether this batch ended the last of them.
        self._waited, self._is_overdue = 0, False
        self._row: tuple[int, dict[str, float]] = (0, {})

    @property
    def _savers(self) -> list[Any]:
        return savers_of(self._trainer)

    # ---- resuming ----

    def load(self, path: Path, hint: Path | None, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """Choose the checkpoint, and read it as Lightning would.

        Raises:
            NoUsableCheckpoint: there are checkpoints, and none can be used.
            UnbrokenError: as ``FrameworkRun.find_resume_point`` raises it.
        """
        self._find(self._asked(path, hint))
        if self.point.path is None:
            skipped = (*self.point.skipped, (str(path), "it is not of this run"))
            raise NoUsableCheckpoint(store=self.run.store.root, skipped=skipped)
        inside = self.point.path / FILE
        found = inside if inside.exists() else self.point.path
        if self._engine is not None:
            self.note_script()
            if self.point.manifest is not None:
                # Before DeepSpeed reads: it has errors of its own for these.
                self.run.require_same(self.point.manifest.metadata.get(_FIXED), self._world())
        self._loaded = loaded = read(found)
        if OURS in loaded:
            # Without the states of this rank the world was another one, which is refused by name.
            states = loaded[OURS]["rng"]
            rank = self.run.world.rank
            self._saved_rng = unpacked(bytes(states[rank].tolist())) if rank < len(states) else None
        elif self.run.world.is_first:
            _log.warning("%s has no RNG states: the resume is not exact", found)
        if self._engine is not None:
            # DeepSpeed restores its steps and starts to count the micro-batches over.
            self._engine.micro_steps = loaded.get(OURS, {}).get(_MICRO_STEPS, self._engine.micro_steps)
        return loaded

    def _asked(self, path: Path, hint: Path | None) -> str | None:
        """What a path means: the newest one, another one of this run, or a file elsewhere."""
        newest = newest_first(self.run.store, scan(self.run.store).committed)[:1]
        if path == hint or path.name.startswith("last"):
            # A file from before there was a run is where it starts.
            return str(path) if (path.is_file() or is_sharded(path)) and not newest else None
        real = path.resolve()
        if real.parent.parent == self.run.store.root.resolve():
            return None if [real.parent.name] == newest else real.parent.name
        return str(real.parent if real.name == FILE else path)

    def _find(self, asked: str | None) -> None:
        self._is_found = True
        self.point = self.run.find_resume_point(asked, _require_complete)

    def place_states(self, checkpoint: dict[str, Any]) -> None:
        """Let the states of ``ModelCheckpoint`` callbacks name the folders that these have now."""
        states = checkpoint.get("callbacks", {})
        for saver in self._savers:
            if (state := states.get(saver.state_key)) is not None and saver.dirpath is not None:
                states[saver.state_key] = moved(state, str(saver.dirpath))

    def begin(self, version: str) -> None:
        """The checkpoint is loaded, or there is none, and no batch is trained yet.

        Raises:
            ValueError: nothing would be saved.
            StartsOver: Lightning loads no checkpoint, and the run has some.
        """
        self.has_begun = True
        if not self._is_found:
            self._find(None)
            self.point = ResumePoint(skipped=self.point.skipped)
        if all(saver.save_weights_only for saver in self._savers) and self.save_steps is None:
            raise ValueError(
                "nothing would be saved that a training can be resumed from: add save_steps= to the unbroken Callback, "
                "or a ModelCheckpoint without save_weights_only"
            )
        loaded = self._loaded
        self.step = self._saved_step = int(loaded["global_step"]) if loaded is not None else 0
        origin = f"lightning {version}"
        self.run.begin(self.step, self.point, is_comparable=True, origin=origin)
        if self.run.world.is_first and minor_version(version) not in TESTED:
            _log.warning("%s was not tested with unbroken (tested: %s)", origin, ", ".join(TESTED))
        self._mend_links()
        if loaded is None:
            return
        if str(self._trainer.precision) == "64-true":
            # Lightning has loaded it into weights of 32 bits, and has made them doubles afterwards.
            strict = self._trainer.lightning_module.strict_loading
            self._trainer.strategy.load_model_state_dict(loaded, strict=strict)
        manifest = self.point.manifest
        ended = manifest.metadata.get(_ENDED) if manifest is not None else None
        if manifest is not None and not manifest.metadata.get(_EXTENDS, True):
            self.run.require_same(ended, self._target())
        if ended == self._target():
            # A training that ended early, by EarlyStopping for example, would be continued.
            self._trainer.should_stop = True
        if self._saved_rng is not None and not progress_of(loaded).is_inside:
            # From these the next epoch begins, when Lightning makes its iterator.
            restore_rng(self._saved_rng["rng"])

    def _mend_links(self) -> None:
        folders = [
            Path(str(saver.dirpath)) for saver in self._savers if saver.dirpath and "://" not in str(saver.dirpath)
        ]
        self._links = links = Links(self.run.store, folders, job=self.run.lease.job)
        wanted = {path for saver in self._savers for path in paths_of(saver)}
        existing: set[str] = self.run.world.from_first(lambda: links.mend(wanted))
        for saver in self._savers:
            forget_missing(saver, existing)
        if self.point.path is not None and self.point.path.parent == self.run.store.root:
            self._point_last(self.point.path.name)
            again: set[str] = self.run.world.from_first(lambda: self._clear_leftovers(links))
            let_overwrite(self._savers, again)
        self._held = held_by(self._savers, kept_all=False)

    def _clear_leftovers(self, links: Links) -> set[str]:
        """Remove what the job before had given up; returns the files that this one writes again."""
        manifest = self.point.manifest
        if manifest is None or self.point.abandoned:
            return set()
        store, held = self.run.store, held_by(self._savers, kept_all=True)
        try:
            events = self.run.recorder.history().events
            left = Leftovers(links, store.files, store.root, events, manifest.step)
            left.remove_given_up(manifest, held)
            return left.written_again(held)
        except StorageFailed as refused:
            _log.warning("%s", refused.headline())
            return set()

    def _point_last(self, name: str) -> None:
        """Let the ``last.ckpt`` of every ``ModelCheckpoint`` that has one lead to a checkpoint."""
        for saver in self._savers:
            if not saver.save_last:
                continue
            if not saver.last_model_path:
                saver.last_model_path = saver.format_checkpoint_name({}, saver.CHECKPOINT_NAME_LAST)
            if self.run.world.is_first:
                self._point(Path(saver.last_model_path), name)

    def _point(self, path: Path, name: str) -> bool:
        try:
            return self._links is not None and self._links.holds(path) and self._links.point(path, name)
        except StorageFailed as refused:
            _log.warning("%s", refused.headline())
            return False

    def _target(self) -> dict[str, int | None]:
        return {"max_steps": self._trainer.max_steps, "max_epochs": self._trainer.max_epochs}

    # ---- DeepSpeed ----

    @property
    def _engine(self) -> Any:  # noqa: ANN401 - a DeepSpeedEngine
        """The engine of a ``DeepSpeedStrategy``; None with any other strategy."""
        return getattr(self._trainer.strategy, "deepspeed_engine", None)

    def _world(self) -> dict[str, Any]:
        """What no checkpoint of DeepSpeed can be loaded across."""
        return {"world_size": self.run.world.size, "zero_stage": self._engine.zero_optimization_stage()}

    def _require_whole_steps(self) -> None:
        """Refuse an accumulation that goes over the end of an epoch, where Lightning and DeepSpeed count apart.

        Raises:
            ValueError: they would.
        """
        batches, every = self._trainer.num_training_batches, self._trainer.accumulate_grad_batches
        if every > 1 and batches % every:
            raise ValueError(
                f"accumulate_grad_batches={every} does not divide the {batches} batches of an epoch: DeepSpeed "
                "continues to accumulate in the next epoch, and Lightning counts other steps; limit_train_batches="
                f"{batches - batches % every} makes it exact"
            )

    # ---- the loop ----

    def begin_training(self, module: object) -> None:
        """Lightning has made the iterator of the first epoch of this job, and is about to fetch.

        Raises:
            ValueError: the position in the training data could not be restored, and that is not accepted.
            NotExact: something changed that the bits depend on.
        """
        trainer = self._trainer
        # Lightning has installed its handlers over ours; ours answer at the edge of a step, and requeue by the run.
        self.run.stops.install_again()
        if self._engine is not None:
            self._require_whole_steps()
        progress = progress_of(self._loaded) if self._loaded is not None else None
        self._position = position = TrainPosition(trainer.train_dataloader)
        self._fixed = self._must_not_change()
        self._hyperparameters = {
            "gradient_clip_val": trainer.gradient_clip_val,
            "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm),
        }
        script = self.note_script()
        if self.point.manifest is None:
            self._hyperparameters |= script.start()
        else:
            now = self._fixed
            if trainer.reload_dataloaders_every_n_epochs and progress is not None and not progress.is_inside:
                # The data of the next epoch may be another.
                now = {name: value for name, value in now.items() if name in _OF_THE_JOB}
            self.run.require_same(self.point.manifest.metadata.get(_FIXED), now)
            self._name_changes(script, self.point.manifest.metadata.get(_HYPERPARAMETERS))
        self._require_position(position)
        if self.run.world.is_first:
            self._name_inexact(module)
        if progress is not None and self._saved_rng is not None:
            if progress.is_inside:
                position.resume(progress.batches, self._saved_rng)
            resume_metrics(trainer, module, self._saved_rng.get(_METRICS, {}), is_inside=progress.is_inside)
        if self._loaded is not None and progress is not None and progress.is_inside:
            # A callback that asked for the end of the training before the last save does not ask again.
            trainer.should_stop |= bool(self._loaded.get(OURS, {}).get("should_stop", False))
            self._make_up_for_epoch_start(module)
        self._loaded = self._saved_rng = None
        target = trainer.estimated_stepping_batches
        self.run.recorder.snapshot(step=self.step, max_steps=int(target) if math.isfinite(target) else None)
        self.run.clock.resume_clock()

    def note_script(self) -> Script:
        """The optimizers and schedules as the script has constructed them: first called before they are restored."""
        if self._script is None:
            trainer = self._trainer
            schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
            self._script = Script(script_items(trainer.optimizers, schedules, trainer.lightning_module))
        return self._script

    def _name_changes(self, script: Script, known: object) -> None:
        """Name the values that the script has chosen otherwise than when the run began; the checkpoint's are used."""
        before = known if isinstance(known, dict) else {}
        self.run.name_changes(before, self._hyperparameters)
        changes = script.changes(before)
        self.run.name_changes(
            {each.name: each.checkpoint for each in changes}, {each.name: each.script for each in changes}
        )
        self._hyperparameters |= script.continued(before, "checkpoint")

    def _make_up_for_epoch_start(self, module: object) -> None:
        """Lightning leaves out ``on_train_epoch_start`` in an epoch that is resumed."""
        trainer = self._trainer
        for each in _kind_of("GradientAccumulationScheduler", trainer.callbacks):
            each.on_train_epoch_start(trainer, module)
        hooks = {type(each): getattr(type(each), _EPOCH_START, None) for each in (module, *trainer.callbacks)}
        named = [
            kind.__name__
            for kind, hook in hooks.items()
            if getattr(hook, "__module__", "").partition(".")[0] not in (*_PACKAGES, "unbroken")
        ]
        if named and self.run.world.is_first:
            _log.warning(
                "%s of %s is not called again in this epoch: what it sets and no checkpoint has is missing; set it in "
                "on_train_start too",
                _EPOCH_START,
                " and ".join(named),
            )

    def _must_not_change(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "world_size": self.run.world.size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
            **(self._world() if self._engine is not None else {}),
            "optimizers": [type(each).__name__ for each in trainer.optimizers],
            "lr_schedulers": [type(each.scheduler).__name__ for each in trainer.lr_scheduler_configs],
            **sizes_of(trainer.train_dataloader),
        }

    def begin_epoch(self) -> None:
        """Lightning may have made another loader, with ``reload_dataloaders_every_n_epochs``."""
        loaders = self._trainer.train_dataloader
        if self._position is not None and self._position.loaders is not loaders:
            self._position = position = TrainPosition(loaders)
            self._fixed |= sizes_of(loaders)
            self._require_position(position)

    def _require_position(self, position: TrainPosition) -> None:
        problems = position.problems
        if not problems and not math.isfinite(self._trainer.num_training_batches):
            problems = ["it has no length, so that Lightning fetches one batch ahead; set limit_train_batches"]
        if not problems:
            return
        if _DATA not in self.run.settings.accept:
            raise ValueError(
                f"the training data cannot be resumed inside an epoch: {'; '.join(problems)}. Use torchdata's "
                f'StatefulDataLoader, which takes the same arguments; with accept=("{_DATA}",) every resumed epoch '
                "starts over and samples are repeated"
            )
        if self.run.world.is_first:
            _log.warning("not exact: accepted: %s: %s", _DATA, "; ".join(problems))

    def _name_inexact(self, module: object) -> None:
        hook = getattr(type(module), "on_train_batch_end", None)
        if getattr(hook, "__module__", "").partition(".")[0] not in _PACKAGES:
            _log.warning(
                "not exact: on_train_batch_end of the module runs after a checkpoint of its batch is saved, and not "
                "again after a resume from there; move what it changes to a callback"
            )
        if any(each.reduce_on_plateau and each.interval == "step" for each in self._trainer.lr_scheduler_configs):
            _log.warning("not exact: a ReduceLROnPlateau by steps is updated after the checkpoint of its step is saved")
        if self._trainer.reload_dataloaders_every_n_epochs > 1:
            _log.warning(
                "not exact: reload_dataloaders_every_n_epochs=%d: a resume makes the loader of its epoch; 1 is exact",
                self._trainer.reload_dataloaders_every_n_epochs,
            )
        if any(type(each).__name__ == "StochasticWeightAveraging" for each in self._trainer.callbacks):
            _log.warning(
                "not exact: StochasticWeightAveraging leaves out its schedule after a resume inside an epoch; "
                "WeightAveraging and EMAWeightAveraging resume exactly"
            )

    def log_step(self, outputs: object) -> None:
        """A batch is trained, and no other callback was called: its loss stands before any save of its step."""
        step = self._trainer.global_step
        if step != self.step:
            self._log_loss(step, outputs)

    def end_batch(self) -> bool:
        """A batch is trained, and every other callback was called; whether the job has to stop now.

        Raises:
            LeaseLost: another job has taken the run.
            UnbrokenError: the job stops, and its last save failed.
        """
        self._hear()
        step, self._is_overdue = self._trainer.global_step, False
        if step == self.step:
            # A step is not over: its gradients are in no checkpoint.
            return False
        self.step = step
        if self.stop is None:
            self.stop = self.run.step_done(step)
        is_target = 0 < self._trainer.max_steps <= step
        is_wanted = self.stop is not None or is_target or self._is_periodic(step) or self._is_due
        if not self._is_quiet():
            # The end of the epoch or a validation comes first: Lightning would leave it out after a resume.
            self._wait(is_wanted=is_wanted)
            return False
        if is_wanted:
            self._save(is_last=self.stop is not None or is_target)
        return self.stop is not None

    def _is_periodic(self, step: int) -> bool:
        """Whether a multiple of ``save_steps`` was reached since the last save; several optimizers count several."""
        every = self.save_steps
        return every is not None and step // every > self._saved_step // every

    def _wait(self, *, is_wanted: bool) -> None:
        self._waited = self._waited + 1 if is_wanted else 0
        self._is_overdue = self._waited >= _OVERDUE
        if self._waited == _MANY and self.run.world.is_first:
            _log.warning(
                "no save and no stop for %d steps: after each of them an epoch ends or a validation comes, where "
                "Lightning cannot resume exactly; make the epochs longer, or set max_epochs without max_steps",
                _MANY,
            )

    def end_pause(self) -> bool:
        """What follows a batch, a validation or the end of an epoch, is over; whether the job has to stop now.

        Where no step is quiet, a save is made here, if a resume from here is exact.

        Raises:
            LeaseLost: another job has taken the run.
            UnbrokenError: the job stops, and its last save failed.
        """
        if not self._is_overdue or not self._is_exact_at(progress_now(self._trainer.fit_loop)):
            return False
        self._hear()
        self._save(is_last=self.stop is not None)
        return self.stop is not None

    @property
    def save_steps(self) -> int | None:
        """How often this job saves by itself; in a drill, as often as it says."""
        return self.run.save_steps_of_drill or self._options.save_steps

    def end_epoch(self, module: Any) -> None:  # noqa: ANN401 - a LightningModule
        """An epoch is over, and the module and every other callback were called; save if it was the last one."""
        self._hear()
        trainer = self._trainer
        is_untold = trainer.should_stop and not self._is_ending
        if self._is_last_epoch() and (self._saved_batch != self._batch or is_untold):
            # What is saved already at this batch does not say that the training has ended.
            self._saved_batch = None
            self._save(is_last=True)
        if trainer.fit_loop.restarting and module.automatic_optimization:
            self._step_plateau(module)

    def _is_last_epoch(self) -> bool:
        """Whether the training ends with this epoch, at whose end all batches are done."""
        trainer = self._trainer
        is_last = trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
        return is_last or (trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs)

    def _step_plateau(self, module: Any) -> None:  # noqa: ANN401
        """Step a ReduceLROnPlateau, which Lightning leaves out at the end of the epoch that was resumed."""
        for config in self._trainer.lr_scheduler_configs:
            is_due = config.interval == "epoch" and (self._trainer.current_epoch + 1) % config.frequency == 0
            metric = self._trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
            if is_due and metric is not None:
                module.lr_scheduler_step(config.scheduler, metric)

    @property
    def _batch(self) -> int:
        return int(self._trainer.fit_loop.total_batch_idx)

    def _is_quiet(self) -> bool:
        """Whether neither the end of the epoch nor a validation follows this batch."""
        trainer = self._trainer
        return not (trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or self._validation_follows())

    def _validation_follows(self) -> bool:
        trainer = self._trainer
        every, interval = trainer.check_val_every_n_epoch, trainer.val_check_batch
        if not trainer.enable_validation or not isinstance(interval, int):
            return False
        if every is not None and (trainer.current_epoch + 1) % every:
            return False
        batch = self._batch if every is None else trainer.fit_loop.batch_idx
        return bool((batch + 1) % interval == 0)

    # ---- saving ----

    def _save(self, *, is_last: bool) -> None:
        if self._saved_batch == self._batch:
            # By a ModelCheckpoint, at this edge.
            return
        self._trainer.save_checkpoint(str(self.own_path), weights_only=False)
        done = self._hear()
        if done is not None and done.name is not None:
            self._point_last(done.name)
        elif done is not None and done.error is not None and is_last:
            raise done.error

    def describe(self, checkpoint: dict[str, Any]) -> None:
        """Add the RNG states of all ranks to what Lightning is about to write; called on all of them."""
        progress = progress_of(checkpoint)
        self._is_exact, self._is_told, self._done = self._is_exact_at(progress), False, None
        self._described_at = self._batch, int(checkpoint["global_step"])
        # A ModelCheckpoint may save the end of the training before this callback would.
        self._is_ending = not progress.is_inside and self._is_last_epoch()
        position = self._position if self._position is not None else TrainPosition(None)
        states = {**position.states(), _METRICS: metrics_of(self._trainer)}
        gathered = self.run.world.all_gather(packed(states))
        self._edge = (progress, gathered)
        checkpoint[OURS] = {
            "rng": [torch.tensor(list(each), dtype=torch.uint8) for each in gathered],
            "should_stop": bool(self._trainer.should_stop),
        }
        if self._engine is not None:
            checkpoint[OURS][_MICRO_STEPS] = self._engine.micro_steps

    def _is_exact_at(self, progress: Progress) -> bool:
        trainer = self._trainer
        if not progress.is_inside:
            # With max_steps Lightning starts the end of an epoch over, a ReduceLROnPlateau is stepped after it, and the
            # state of a loader is restored inside an epoch alone.
            has_plateau = any(each.reduce_on_plateau for each in trainer.lr_scheduler_configs)
            is_made_anew = self._position is not None and self._position.is_made_from_global_rng
            return trainer.max_steps == -1 and is_made_anew and not has_plateau
        if progress.is_last_batch or progress.batches % trainer.accumulate_grad_batches:
            return False
        if self._engine is not None and is_accumulating(self._engine):
            return False
        return progress.is_settled or not self._validation_follows()

    def write(self, checkpoint: dict[str, Any], path: Path, write: Write) -> None:
        """Commit what Lightning saves, and let its path lead there; for the ranks that write, rank 0 or all of them."""
        links = self._links
        is_own = path == self.own_path
        is_place = self._is_exact or (is_own and self._is_ending)
        if links is None or OURS not in checkpoint or not is_place or not (is_own or links.holds(path)):
            # A file of the script, weights alone, or no place to resume from: written as Lightning writes it. The last
            # one is what a resume starts from: it gets its link at the next edge.
            if OURS not in checkpoint or is_place or not self._is_last_path(path):
                write(path)
                if self.run.world.is_first:
                    self._note_written(path, int(checkpoint["global_step"]))
            self._held = held_by(self._savers, kept_all=False)
            return
        if self._committed is not None and self._committed[0] == self._edge and self._is_last_path(path):
            # Its best was saved an instant ago, and nothing but the name of this file has changed since.
            self._done = self._committed[1]
            if self.run.world.is_first:
                self._point(path, str(self._done.name))
            return
        self._flush_metrics(durable=True)
        metrics = {key: float(value) for key, value in self._trainer.callback_metrics.items() if value.numel() == 1}
        metadata: dict[str, Any] = {_FIXED: self._fixed, _HYPERPARAMETERS: self._hyperparameters}
        if not is_own:
            metadata[SAVED_AS] = path.name
            gone = given_up(self._held, self._savers, self._trainer.ckpt_path, self.run.store.root)
            metadata |= metadata_of(gone)
            self._held = held_by(self._savers, kept_all=False)
        if self._is_ending:
            metadata |= {_ENDED: self._target(), _EXTENDS: self._is_exact}
        folder = Folder(
            int(checkpoint["global_step"]),
            ORIGIN,
            {key: value for key, value in metrics.items() if math.isfinite(value)},
            metadata,
            self._policies(links),
            described(checkpoint) if self._engine is None else {},
        )
        self._done = done = self._commit(folder, lambda at: write(at / FILE), size_of(checkpoint))
        if (name := done.name) is None:
            return
        if is_own or self._of_those_who_write(lambda: self._point(path, name)):
            self._committed = (self._edge, done)
        else:
            write(path)

    def _commit(self, folder: Folder, write: Write, size_bytes: int) -> Published:
        run = self.run
        if self._engine is None:
            return run.save_by_first(folder, write, coming_bytes=size_bytes)
        staged = run.stage(folder.step, coming_bytes=coming_bytes(self._engine))
        if isinstance(staged, StorageError):
            return Published(None, staged)
        write(staged / folder.name)
        return run.publish(folder, is_staged=True)

    def _of_those_who_write(self, action: Callable[[], bool]) -> bool:
        """What rank 0 does and finds, for all ranks that write."""
        return action() if self._engine is None else self.run.world.from_first(action)

    def _note_written(self, path: Path, step: int) -> None:
        try:
            note_written(self.run.recorder.event, self.run.store.files, path, self.run.store.root, step)
        except StorageFailed as refused:
            _log.warning("%s", refused.headline())

    def _is_last_path(self, path: Path) -> bool:
        return any(saver.last_model_path == str(path) for saver in self._savers)

    def _policies(self, links: Links) -> tuple[Policy, ...]:
        return LastK(self._options.keep_last_k), Linked(links.all())

    def remove(self, path: Path) -> bool:
        """Remove a link that a ``ModelCheckpoint`` gives up, and what it alone kept; False if it is no link of ours."""
        if self._done is not None and self._done.error is not None:
            # What was to replace it was not saved.
            return True
        if self._links is None or not self._links.remove(path):
            return False
        self.run.sweep(self._policies(self._links))
        return True

    def _hear(self) -> Published | None:
        """What became of the save since the last edge; None if there was none. Collective.

        Raises:
            LeaseLost: another job has taken the run.
        """
        if self._is_told:
            return None
        done: Published | None = self.run.world.from_first(lambda: self._done)
        self._is_told = True
        if done is None:
            # A file of the script, or no place to resume from.
            self._is_due = self._is_due or not self._is_exact
        elif done.name is None:
            self._is_due = True
            if isinstance(done.error, LeaseLost):
                raise done.error
        else:
            self._is_due, self._waited = False, 0
            self._saved_batch, self._saved_step = self._described_at
        return done

    # ---- metrics ----

    def _log_loss(self, step: int, outputs: object) -> None:
        if step % self._trainer.log_every_n_steps and not self.run.is_drill:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._log(step, {"loss": float(loss)})

    def log_validation(self) -> None:
        """A validation is over: its metrics belong to the last step."""
        found = {key: float(value) for key, value in self._trainer.callback_metrics.items() if value.numel() == 1}
        self._log(self._trainer.global_step, found)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if step != self._row[0]:
            self._flush_metrics()
            self._row = (step, {})
        self._row[1].update(values)

    def _flush_metrics(self, *, durable: bool = False) -> None:
        step, values = self._row
        if values:
            self.run.recorder.metrics(step, values)
            if "loss" in values:
                self.run.recorder.snapshot(loss=values["loss"], loss_step=step)
            self._row = (step, {})
        self.run.recorder.flush(durable=durable)

    # ---- ending ----

    def ending(self) -> StopReason:
        """Why the training is complete: its target is reached, or a callback has ended it before."""
        trainer = self._trainer
        epochs, limit = int(trainer.fit_loop.epoch_progress.current.processed), trainer.max_epochs
        is_reached = 0 < trainer.max_steps <= trainer.global_step or (limit not in (None, -1) and epochs >= limit)
        if is_reached or not trainer.should_stop:
            return StopReason("done")
        names = sorted({type(each).__name__ for each in _kind_of("EarlyStopping", trainer.callbacks)})
        return StopReason("done", f"ended before its target by {' or '.join(names) or 'trainer.should_stop'}")

    def end_untrained(self, module: object) -> None:
        """Lightning has found the training complete, and left out its end: leave what the job before has left."""
        saved, self._loaded, self._saved_rng = self._saved_rng, None, None
        if saved is None:
            return
        resume_metrics(self._trainer, module, saved.get(_METRICS, {}), is_inside=False)
        for each in _kind_of("WeightAveraging", self._trainer.callbacks):
            # The average takes the place of the weights.
            each.on_train_end(self._trainer, module)
        restore_rng(saved["rng"])

    def leave(self, ending: StopReason | BaseException) -> None:
        """Release the run."""
        try:
            for saver in self._savers:
                ask_again(saver)
            self._flush_metrics()
            self.run.close(ending, step=self.step)
        finally:
            self._hide_lines()


def _kind_of(name: str, callbacks: Iterable[object]) -> list[Any]:
    """The callbacks of a class of Lightning, which this module does not import."""
    return [each for each in callbacks if any(kind.__name__ == name for kind in type(each).__mro__)]


def is_sharded(path: Path) -> bool:
    """Whether a path is a folder that ``DeepSpeedStrategy`` wrote."""
    return (path / "latest").is_file() and (path / "checkpoint").is_dir()


def _require_complete(path: Path) -> None:
    """A folder of ours with what Lightning wrote in it, or a file or a folder that Lightning wrote elsewhere."""
    if path.is_dir() and not is_sharded(path) and not (path / FILE).exists():
        raise WeightsOnly(path=path, missing=(FILE,))
