"""One job of a ``Trainer``, on one rank: what happens from ``resume`` to the end of ``train``.

Owns what is changed in ``TrainingArguments`` meanwhile, and gives them back.
"""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers import __version__ as transformers_version
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from unbroken.errors import RankFailed, StateDiffers, StorageError, StorageFailed, WeightsOnly
from unbroken.frameworks.epoch_rng import packed, read_rng, rng_name
from unbroken.frameworks.folders import Folder
from unbroken.frameworks.framework_run import FrameworkRun, ResumePoint, is_refusal
from unbroken.frameworks.trainer_batches import TrainerBatches
from unbroken.frameworks.unsaved_tensors import UnsavedTensors
from unbroken.quoting.amounts import plural
from unbroken.quoting.log import logger
from unbroken.records.stop import StopReason
from unbroken.state.rng import capture_rng, restore_rng, rng_devices
from unbroken.state.wrappers import real
from unbroken.store.keep import Candidate
from unbroken.store.manifest import Manifest
from unbroken.tested_versions import minor_version

_log = logger(__name__)
TESTED: Final = ("5.22",)
ORIGIN: Final = "transformers"
_NOT_OF_SCRIPT: Final = ("transformers.", "unbroken.", "trl.")
_TRAINER_STATE: Final = "trainer_state.json"
_ARGUMENTS: Final = "training_args.bin"
# In the manifest: what must not change between two jobs of one run.
_FIXED: Final = "fixed"
_HYPERPARAMETERS: Final = "hyperparameters"
# Arguments that the bits depend on, and that a script may change between two jobs.
_NAMED: Final = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("max_grad_norm", "optim", "optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_steps", "num_train_epochs", "label_smoothing_factor", "neftune_noise_alpha"),
    *("average_tokens_across_devices", "torch_compile", "use_liger_kernel"),
)
# Of those: what the optimizer keeps in its groups, whose values come from the checkpoint.
_RESTORED: Final = frozenset(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"))
# In the manifest: the class of the optimizer that was saved.
_OPTIMIZER: Final = "optimizer"
# The classes that values of ``optim`` stand for; those of other libraries are known by the value alone.
_CLASSES: Final = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"), "AdamW"),
    "adafactor": "Adafactor",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rmsprop": "RMSprop",
}
_TARGET: Final = "target"
# Logged with every summary: how long it took is not what was computed.
_TIMES: Final = ("_runtime", "_per_second")
# So many steps the RNG is watched for a data set that draws from it.
_WATCHED_STEPS: Final = 4


@dataclass(frozen=True)
class SaveTotalLimit:
    """``save_total_limit`` as the Trainer means it: the newest and the best, and then the newest others."""

    limit: int
    best: str | None

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        kept = {each.name: "the best" for each in newest_first if each.name == self.best}
        for each in newest_first:
            if not kept or len(kept) < self.limit or each is newest_first[0]:
                kept.setdefault(each.name, f"save_total_limit {self.limit}")
        return kept


class TrainerJob:
    """One job of a training, on one rank: from ``resume`` to the end of ``train``."""

    def __init__(
        self,
        run: FrameworkRun,
        args: TrainingArguments,
        hide_lines: Callable[[], None],
        length: int | None,
        batches: TrainerBatches | None,
    ) -> None:
        self.run, self._args, self._hide_lines, self._batches = run, args, hide_lines, batches
        self.point = ResumePoint()
        self.stop: StopReason | None = None
        self.step = self.target_steps = 0
        self.published_step: int | None = None
        self._unsaved = UnsavedTensors()
        # What is saved; the class that it has.
        self.optimizer: object = None
        self._fixed = _fixed_of(args, length)
        self._hyperparameters = {name: _plain(getattr(args, name, None)) for name in _NAMED}
        self._target = {"max_steps": args.max_steps, "num_train_epochs": float(args.num_train_epochs)}
        # What is changed in the arguments while this job runs, with the values of the script.
        self._own: dict[str, Any] = {}
        if run.is_drill:
            self._set("output_dir", str(run.layout.run))
        self._home = home_of(args)
        self._limit = args.save_total_limit
        self._staged: Path | None = None
        self._epoch_rng: Mapping[str, object] | None = None
        self._saved_rng: Mapping[str, Any] | None = None
        # What was logged for a step, and what of it is not in the records yet.
        self._logged: dict[str, float] = {}
        self._unwritten: dict[str, float] = {}
        self._logged_step = 0
        self._watched: tuple[torch.Tensor, int] | None = None
        # Whether the save of the last step waits for the end of its epoch.
        self._is_put_off = False

    def _set(self, name: str, value: object) -> None:
        self._own.setdefault(name, getattr(self._args, name))
        setattr(self._args, name, value)

    # ---- resuming ----

    def find(self, asked: str | None, trainer: Trainer | None = None) -> str | None:
        """Choose the checkpoint; the Trainer loads it."""
        self.point = self.run.find_resume_point(asked, _require_complete)
        path, manifest = self.point.path, self.point.manifest
        if path is None:
            return None
        if manifest is not None:
            # For the outcome, if the resume is refused.
            self.step = manifest.step
            self.run.require_same(manifest.metadata.get(_FIXED), self._fixed)
            before = manifest.metadata.get(_HYPERPARAMETERS)
            if trainer is not None:
                _require_same_optimizer(trainer, path, manifest.metadata.get(_OPTIMIZER), before)
            self.run.name_changes(before, self._hyperparameters, restored=_RESTORED)
        state = TrainerState.load_from_json(str(path / _TRAINER_STATE))
        is_reached = state.global_step >= state.max_steps > 0
        is_over = asked is None and trainer is not None and _has_stopped_early(trainer, state)
        if (is_reached or is_over) and _was_target(manifest, self._target):
            # Done: the Trainer would compute one more step where the target lies inside an epoch, and would continue to
            # the next evaluation where it stopped early.
            self._set("max_steps", -1)
            self._set("num_train_epochs", 0.0)
            self.target_steps = state.max_steps
        self._saved_rng = self.run.world.all_or_none(lambda: read_rng(path, self.run.world.rank))
        if self._batches is not None:
            self._batches.choose(path, self._saved_rng)
        return str(path)

    def forget_unless_at(self, step: int) -> None:
        """Forget the chosen checkpoint if the Trainer starts from another one."""
        if self.point.manifest is None or self.point.manifest.step != step:
            self.point, self._saved_rng = ResumePoint(), None

    def begin(self, state: TrainerState) -> None:
        """The Trainer's loop starts."""
        is_done = self.target_steps > 0
        if is_done:
            # As the script says, for whoever reads them from here on.
            state.max_steps = self.target_steps
        self.step, self.target_steps = state.global_step, state.max_steps
        if self.point.path is not None and self.point.path.parent == self.run.layout.run:
            # Of a stop in the last step of an epoch: the end of that epoch comes again.
            self.published_step = state.global_step
        self._set("save_total_limit", None)
        if (save_steps := self.run.save_steps_of_drill) is not None:
            self._set("save_strategy", SaveStrategy.STEPS)
            state.save_steps = save_steps
        if self.run.is_drill:
            self._set("logging_strategy", IntervalStrategy.STEPS)
            state.logging_steps = 1
        self._find_best(state)
        # The Trainer logs means since the last log, or since the job began.
        is_comparable = state.logging_steps == 1 or state.global_step % max(state.logging_steps, 1) == 0
        origin = f"transformers {transformers_version}"
        self.run.begin(state.global_step, self.point, is_comparable=is_comparable, origin=origin)
        if self.run.world.is_first and minor_version(transformers_version) not in TESTED:
            _log.warning("%s was not tested with unbroken (tested: %s)", origin, ", ".join(TESTED))
        self.run.recorder.snapshot(step=state.global_step, max_steps=self.target_steps)
        self.run.clock.resume_clock()

    def _find_best(self, state: TrainerState) -> None:
        """Find the best checkpoint where it is now: the Trainer forgets it if the directory has moved."""
        best = state.best_global_step
        path = os.path.join(self._home, f"checkpoint-{best}")
        if best and Path(path).is_dir():
            state.best_model_checkpoint = path

    # ---- the loop ----

    def begin_epoch(self, state: TrainerState, loader: object) -> None:
        """Restore the RNG states with which an interrupted epoch began, and keep them."""
        saved, self._saved_rng = self._saved_rng, None
        # At the end of an epoch the next one begins with the states of the checkpoint.
        is_between = float(state.epoch or 0.0).is_integer()
        if self._batches is not None and saved is not None:
            is_known = self._batches.is_between_epochs(saved)
            is_between = is_between if is_known is None else is_known
        if self._batches is not None:
            self._batches.begin_epoch(loader, None if is_between else saved)
            if saved is not None and is_between:
                self._batches.restore_own(saved)
        if saved is not None:
            restore_rng(saved["rng"] if is_between else saved["epoch"])
        self._epoch_rng = capture_rng(rng_devices())
        self._watched = None

    def put_off_save(self, state: TrainerState, control: TrainerControl) -> None:
        """In the last step of an epoch, save after the evaluation that follows: it draws random numbers."""
        is_last = float(state.epoch or 0.0).is_integer() or control.should_epoch_stop or control.should_training_stop
        if control.should_save and is_last and self._args.eval_strategy == IntervalStrategy.EPOCH:
            control.should_save, self._is_put_off = False, True

    def end_epoch(self, state: TrainerState, control: TrainerControl) -> None:
        """An epoch is over; a step that is saved already is not saved again."""
        control.should_save, self._is_put_off = control.should_save or self._is_put_off, False
        if self.published_step == state.global_step:
            control.should_save = False
            if self.stop is not None:
                # Inside the epoch: its evaluation is the next job's.
                control.should_evaluate = control.should_log = False
        if self._batches is None:
            return
        pending = self._batches.pending_batches
        if pending and control.should_save and self.run.world.is_first:
            _log.warning(
                "not exact: the epoch ended with gradients of %s that no optimizer step has used, and a checkpoint "
                "saved here does not hold them: let an epoch have a multiple of gradient_accumulation_steps batches",
                plural(pending, "batch", "batches"),
            )
        self._batches.end_epoch(is_stopping=control.should_training_stop)

    def begin_step(self) -> None:
        """Notice a data set that draws random numbers: the RNG has moved since the last step ended."""
        if self._staged is not None:
            # The Trainer evaluated, and found no new best to save.
            self.run.unstage()
        self.put_back()
        if self._batches is not None:
            self._batches.settle()
            if self._batches.is_noting:
                return
        if self._watched is not None and not torch.equal(self._watched[0], torch.get_rng_state()):
            if self.run.world.is_first:
                _log.warning(
                    "the data set or the collator draws from torch's global RNG: after a resume inside an epoch it "
                    "draws other numbers; derive them from the sample, or from a seed of its own"
                )
            self.run.recorder.event("data", notices=["draws from the global RNG while batches are made"])
            self._watched = (torch.get_rng_state(), _WATCHED_STEPS)

    def end_step(self, state: TrainerState, control: TrainerControl) -> None:
        """A step is complete."""
        self._flush_metrics(self.step)
        self.step = state.global_step
        if self.stop is None:
            self.stop = self.run.step_done(self.step)
        seen = 0 if self._watched is None else self._watched[1]
        is_quiet = not (control.should_evaluate or control.should_log or control.should_save)
        if seen < _WATCHED_STEPS:
            self._watched = (torch.get_rng_state(), seen + 1) if is_quiet else None

    def redirect(self, state: TrainerState, control: TrainerControl, model: object) -> None:
        """Let the Trainer write its next checkpoint into a draft; without room for it, not at all.

        Raises:
            StorageError: there is no room for the last save of this job.
        """
        is_possible = self._args.save_strategy == SaveStrategy.BEST and control.should_evaluate
        if not (control.should_save or is_possible) or self._args.push_to_hub:
            # The hub is sent what stands under the final name: then that is sealed where it is.
            return
        staged = self.run.stage(state.global_step, coming_bytes=_size_of(model))
        if isinstance(staged, StorageError):
            control.should_save = False
            if self.stop is not None or state.global_step >= self.target_steps:
                raise staged
            return
        self._staged = staged
        self._args.output_dir = str(staged)

    def put_back(self) -> None:
        """The Trainer's directory is its own again."""
        if self._staged is not None:
            self._args.output_dir, self._staged = self._home, None

    def publish(self, state: TrainerState) -> None:
        """Make a checkpoint of what the Trainer wrote.

        Raises:
            UnbrokenError: the job stops, and its last save failed.
        """
        staged, name = self._staged, f"checkpoint-{state.global_step}"
        self.put_back()
        self._flush_metrics(state.global_step, durable=True)
        try:
            self.run.world.all_or_none(lambda: self._complete(state, (staged or Path(self._home)) / name, staged))
        except (StorageError, RankFailed) as refused:
            self.run.note_refusal(state.global_step, refused)
            if self.stop is not None:
                raise
            return
        # Of this step alone: with an earlier evaluation a later checkpoint would count as the best.
        logged = self._logged if self._logged_step == state.global_step else {}
        metrics = {key: float(value) for key, value in logged.items() if math.isfinite(value)}
        best = state.best_model_checkpoint
        policies = (
            () if not self._limit or self._limit < 1 else (SaveTotalLimit(self._limit, best and Path(best).name),)
        )
        optimizer = None if self.optimizer is None else type(real(self.optimizer)).__name__
        metadata = {
            _FIXED: self._fixed,
            _TARGET: self._target,
            _HYPERPARAMETERS: self._hyperparameters,
            _OPTIMIZER: optimizer,
        }
        folder = Folder(state.global_step, ORIGIN, metrics, metadata, policies)
        done = self.run.publish(folder, is_staged=staged is not None)
        if done.error is None:
            self.published_step = state.global_step
        elif self.stop is not None:
            raise done.error

    def _complete(self, state: TrainerState, folder: Path, staged: Path | None) -> None:
        """Add what the Trainer does not save, and correct what names the draft.

        Raises:
            StorageFailed: I/O error.
        """
        rng = {"epoch": self._epoch_rng, "rng": capture_rng(rng_devices())}
        if self._batches is not None:
            rng |= self._batches.state()
        files = self.run.store.files
        files.write_new(folder / rng_name(self.run.world.rank), [packed(rng)])
        best = state.best_model_checkpoint
        if staged is not None and best is not None and Path(best).parent == staged:
            state.best_model_checkpoint = os.path.join(self._home, Path(best).name)
        if not self.run.world.is_first or staged is None:
            return
        try:
            state.save_to_json(str(folder / _TRAINER_STATE))
            torch.save(self._args, folder / _ARGUMENTS)
        except (OSError, RuntimeError) as refused:
            raise StorageFailed(operation="write", path=folder, cause=str(refused)) from refused

    @property
    def has_looked(self) -> bool:
        """Whether the callbacks were looked at in this job."""
        return self._unsaved.has_looked

    def name_unsaved(self, callbacks: Collection[object], given: Collection[object]) -> None:
        """Name the tensors that callbacks of the script change and no checkpoint has, at the first saves.

        Args:
            callbacks: those of the trainer.
            given: what the Trainer gives to callbacks: model, optimizer, loaders.
        """
        if self._unsaved.is_over or not self.run.world.is_first:
            return
        candidates = {
            f"{type(each).__name__}.{name}": value
            for each in callbacks
            if not isinstance(each, ExportableState) and not type(each).__module__.startswith(_NOT_OF_SCRIPT)
            for name, value in vars(each).items()
        }
        unsaved = self._unsaved.changed(candidates, saved=given)
        for each in unsaved:
            _log.warning(
                "not saved by the Trainer, so a resume starts it over: the tensors of the callback in %s "
                "(make the callback an ExportableState)",
                each,
            )
        if unsaved:
            self.run.recorder.event("audit", unsaved=unsaved)

    # ---- metrics ----

    def log(self, step: int, logs: Mapping[str, object]) -> None:
        """Keep what was logged for a step until the step is over: the loss and an evaluation come one by one."""
        if "train_runtime" in logs:
            # The summary of this job, not of a step.
            return
        if step != self._logged_step:
            self._flush_metrics(self._logged_step)
            self._logged, self._logged_step = {}, step
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        shown = {key: value for key, value in numbers.items() if not key.endswith(_TIMES)}
        self._logged |= shown
        self._unwritten |= shown

    def _flush_metrics(self, step: int, *, durable: bool = False) -> None:
        if self._unwritten and self._logged_step <= step:
            self.run.recorder.metrics(self._logged_step, self._unwritten)
            if (loss := self._unwritten.get("loss")) is not None:
                self.run.recorder.snapshot(loss=loss, loss_step=self._logged_step)
            self._unwritten = {}
        self.run.recorder.flush(durable=durable)

    # ---- ending ----

    def cause_of(self, error: BaseException) -> BaseException:
        """What an error that left the training is: storage that refused the Trainer's own write, or itself."""
        if self._staged is None or not is_refusal(error):
            return error
        return StorageFailed(operation="write the checkpoint", path=self._staged, cause=str(error))

    def leave(self, ending: StopReason | BaseException) -> None:
        """Release the run, and give the script its arguments back."""
        if self._staged is not None and isinstance(ending, StopReason):
            self.run.unstage()
        self.put_back()
        try:
            self._flush_metrics(self._logged_step, durable=True)
            self.run.close(ending, step=self.step)
        finally:
            for name, value in self._own.items():
                setattr(self._args, name, value)
            if self._batches is not None:
                self._batches.close()
            self._hide_lines()


def _require_complete(path: Path) -> None:
    """Raise unless a folder has what the Trainer needs to continue exactly.

    Raises:
        WeightsOnly: it has not, as what ``save_model`` writes.
    """
    names = [each.name for each in path.iterdir()]
    is_deepspeed = any(name.startswith("global_step") for name in names)
    wanted = {
        _TRAINER_STATE: _TRAINER_STATE in names,
        "optimizer.pt": is_deepspeed or any(name.startswith("optimizer") for name in names),
        "scheduler.pt": is_deepspeed or "scheduler.pt" in names,
        "rng_state.pth": any(name.startswith("rng_state") for name in names),
    }
    missing = tuple(name for name, is_there in wanted.items() if not is_there)
    if missing:
        raise WeightsOnly(path=path, missing=missing)


def _fixed_of(args: TrainingArguments, length: int | None) -> dict[str, Any]:
    """What the bits depend on, and the Trainer takes without a word if it has changed."""
    return {
        "world_size": args.world_size,
        "train_batch_size": args.train_batch_size,
        "precision": args.mixed_precision,
        "tf32": args.tf32,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "seed": args.seed,
        "data_seed": args.data_seed,
        "dataset_length": length,
    }


def _require_same_optimizer(trainer: Trainer, path: Path, saved: object, hyperparameters: object) -> None:
    """Refuse a checkpoint of another optimizer, whose state this one cannot take.

    Raises:
        StateDiffers: it is of another class; nothing was loaded.
    """
    args, given = trainer.args, trainer.optimizer
    if args.deepspeed or type(trainer).create_optimizer is not Trainer.create_optimizer:
        # Made by the engine or the subclass; ``optim`` does not say what.
        return
    before, now = saved, _CLASSES.get(optim := str(_plain(args.optim)))
    if given is not None:
        now = type(real(given)).__name__
    elif trainer.optimizer_cls_and_kwargs is not None:
        now = trainer.optimizer_cls_and_kwargs[0].__name__
    if now is None and isinstance(hyperparameters, dict):
        before, now = hyperparameters.get("optim"), optim
    if before is not None and before != now:
        raise StateDiffers(checkpoint=str(path), changed=(f"optimizer: {before} saved, {now} now (optim={optim})",))


def _plain(value: object) -> object:
    """A value as a manifest has it: an enumeration by its value, a table as text in the order of its names."""
    inner = getattr(value, "value", value)
    if isinstance(inner, dict):
        return json.dumps(inner, sort_keys=True, default=repr)
    return inner if inner is None or isinstance(inner, bool | int | float | str) else repr(inner)


def home_of(args: TrainingArguments) -> str:
    """The directory of the run.

    Raises:
        ValueError: there is none.
    """
    if args.output_dir is None:
        raise ValueError("TrainingArguments(output_dir=...) is the directory of the run: set it")
    return args.output_dir


def _size_of(model: object) -> int:
    """About the bytes of a first save: the weights, and twice as much for an optimizer."""
    if not isinstance(model, torch.nn.Module):
        return 0
    return 3 * sum(value.numel() * value.element_size() for value in model.parameters())


def _was_target(manifest: Manifest | None, target: Mapping[str, Any]) -> bool:
    return manifest is not None and bool(manifest.metadata.get(_TARGET) == target)


def _has_stopped_early(trainer: Trainer, state: TrainerState) -> bool:
    """Whether an early stopping that the trainer still has, with the same patience, has ended the training."""
    # A dict where it was read from a file, whatever its type says.
    states: Any = state.stateful_callbacks or {}
    saved = states.get(EarlyStoppingCallback.__name__, ())
    patiences = [
        each.early_stopping_patience
        for each in trainer.callback_handler.callbacks
        if isinstance(each, EarlyStoppingCallback)
    ]
    counters = [each["attributes"]["early_stopping_patience_counter"] for each in _listed(saved)]
    return any(counter >= patience for counter, patience in zip(counters, patiences, strict=False))


def _listed(saved: Any) -> list[Any]:  # noqa: ANN401
    """The states of the callbacks of one class: the Trainer saves a lone one without a list."""
    return [saved] if isinstance(saved, dict) else list(saved)
