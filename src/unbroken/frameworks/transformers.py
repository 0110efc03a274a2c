"""The Trainer of Transformers as a run, through its callbacks: two lines.

    trainer.add_callback(unbroken_hf.Callback())
    trainer.train(resume_from_checkpoint=unbroken_hf.resume(trainer))

``resume`` takes the run and chooses the newest usable checkpoint; the Trainer loads it. The callback stops the training
at the end of a step, lets the Trainer write into a draft, and makes that ``checkpoint-N`` by one rename. It keeps the
records. It restores what the Trainer does not: the RNG states that the epoch began with, from which samplers and loader
workers get their seeds. Subclasses of the Trainer, such as those of TRL, work the same way.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unbroken.errors import UnbrokenError
from unbroken.frameworks.framework_run import open_framework_run
from unbroken.frameworks.left_training import what_left
from unbroken.frameworks.loader_pass import batch_count
from unbroken.frameworks.options import RunOptions, settings_of
from unbroken.frameworks.trainer_batches import TrainerBatches, draws_nothing
from unbroken.frameworks.trainer_job import ORIGIN, TrainerJob, home_of
from unbroken.loop.console import show_lines
from unbroken.loop.settings import Settings
from unbroken.loop.trackers import warn_of_doubled
from unbroken.quoting.log import logger
from unbroken.records.layout import absolute_run
from unbroken.records.process import before_exit
from unbroken.records.stop import StopReason
from unbroken.world import is_first_process

__all__ = ["Callback", "resume"]

_log = logger(__name__)


def resume(trainer: Trainer, checkpoint: str | os.PathLike[str] | int | None = None) -> str | None:
    """The checkpoint that ``trainer.train(resume_from_checkpoint=...)`` continues from; None to start at step 0.

    That is the newest one whose checksums all verify; a warning names each torn or damaged one that is skipped. From
    here on this job holds the run. Collective among the ranks.

    Args:
        trainer: it has a ``Callback``.
        checkpoint: another one to go back to: its step, its name, or the path of a folder. This happens once: a later
            job with the same value continues from the newest checkpoint.

    Raises:
        ValueError: the trainer has no ``Callback``, or an argument that does not go with one.
        WeightsOnly: the folder holds weights, and not what a resume needs.
        NotExact: the arguments differ from those of the checkpoint in what the bits depend on.
        RunHeld: another job trains into this directory.
        NoUsableCheckpoint: there are checkpoints, and none can be used.
        UnbrokenError: storage or a mirror refused.
    """
    found = [each for each in trainer.callback_handler.callbacks if isinstance(each, Callback)]
    if len(found) != 1:
        raise ValueError(f"resume needs a trainer with one unbroken Callback, and this one has {len(found)}")
    asked = None if checkpoint is None else str(checkpoint)
    return found[0]._open(trainer.args, asked, length_of(trainer.train_dataset), trainer)


class Callback(TrainerCallback):
    """Makes the training of a ``Trainer`` a run.

    ``TrainingArguments`` set how often the Trainer saves, evaluates and logs, and how many checkpoints are kept.

    Args:
        reread: With loader workers, read the batches of an interrupted epoch again instead of skipping them by index.
            None: do so unless the data set and the collator are known to draw no random numbers.
        options: how the run is mirrored, stopped and shown: ``RunOptions``.
    """

    def __init__(self, *, reread: bool | None = None, **options: Unpack[RunOptions]) -> None:
        known = RunOptions.__optional_keys__
        self._settings = settings_of(options, known, called="Callback", save_steps=None, keep_last_k=None)
        self._reread = reread
        self._job: TrainerJob | None = None
        self._is_stopped = False
        self._handler: Any = None

    @property
    def is_stopped(self) -> bool:
        """Whether the training ended before its target; the same command resumes it."""
        return self._is_stopped

    def _open(
        self, args: TrainingArguments, asked: str | None, length: int | None, trainer: Trainer | None = None
    ) -> str | None:
        _require_usable(args)
        directory = absolute_run(home_of(args))
        # A training that an exception left still holds its run, in a notebook for example.
        for other in [each for each in _open_callbacks if each is self or each._is_in(directory)]:
            other._abandon()
        hide = show_lines(is_wanted=self._settings.console, is_first=is_first_process())
        try:
            run = open_framework_run(directory, _settings_of(self._settings, args), origin=ORIGIN)
        except BaseException:
            hide()
            raise
        self._is_stopped = False
        batches = None if trainer is None else TrainerBatches(trainer, reread=self._reread)
        self._handler = None if trainer is None else trainer.callback_handler
        self._job = job = TrainerJob(run, args, hide, length, batches)
        _open_callbacks.add(self)
        try:
            return job.find(asked, trainer)
        except BaseException as refused:
            self._leave(refused)
            raise

    def _leave(self, ending: StopReason | BaseException) -> None:
        job, self._job = self._job, None
        _open_callbacks.discard(self)
        if job is not None:
            self._is_stopped = isinstance(ending, StopReason) and ending.kind != "done"
            job.leave(ending)

    def _abandon(self) -> None:
        """End a job whose training was left by an exception: the Trainer has no event for that."""
        if self._job is not None:
            error = what_left(self._job.step, is_through=lambda module: module.startswith("transformers."))
            self._leave(self._job.cause_of(error))

    def _is_in(self, directory: Path) -> bool:
        return self._job is not None and self._job.run.layout.run == directory

    @property
    def _open_job(self) -> TrainerJob:
        if self._job is None:
            raise RuntimeError("the run of this Callback is not open")
        return self._job

    def _name_unsaved(self, of_trainer: Mapping[str, Any]) -> None:
        """Name what callbacks of the script keep and change, and no checkpoint has."""
        given = [*of_trainer.values(), *(() if self._handler is None else vars(self._handler).values())]
        self._open_job.name_unsaved(() if self._handler is None else self._handler.callbacks, given)

    # ---- the Trainer's events ----

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """The Trainer has loaded its checkpoint, or starts."""
        if state.is_hyper_param_search:
            raise ValueError("hyperparameter_search trains many models into one directory: no run can be made of it")
        if self._job is None:
            # `resume` was not called: then a resume is what the script asked the Trainer for.
            loader = kwargs.get("train_dataloader")
            self._open(args, None, length_of(getattr(loader, "dataset", None)))
            self._open_job.forget_unless_at(state.global_step)
            if batch_count(loader) is None and is_first_process():
                _log.warning(
                    "the Trainer does not know the length of the data set, and a resume after its first epoch would "
                    "start another one over: pass resume_from_checkpoint=unbroken_hf.resume(trainer)"
                )
            elif args.dataloader_num_workers and is_first_process() and not draws_nothing(loader):
                _log.warning(
                    "loader workers may draw random numbers, and would draw others after a resume inside an epoch: "
                    "pass resume_from_checkpoint=unbroken_hf.resume(trainer)"
                )
        try:
            self._open_job.begin(state)
        except UnbrokenError as refused:
            self._leave(refused)
            raise
        _name_unrestored(args, state)
        if is_first_process():
            reported = args.report_to or ()
            warn_of_doubled(self._settings, [reported] if isinstance(reported, str) else reported, "report_to")

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """The Trainer is about to make the iterator of an epoch, which draws seeds."""
        self._open_job.begin_epoch(state, kwargs.get("train_dataloader"))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """The batches of a step are there."""
        self._open_job.begin_step()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """A step is complete: decide about a stop, and where the Trainer saves."""
        job = self._open_job
        job.end_step(state, control)
        if job.stop is not None:
            control.should_save = True
        if not job.has_looked:
            self._name_unsaved(kwargs)
        job.put_off_save(state, control)
        job.redirect(state, control, kwargs.get("model"))

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """An epoch is complete."""
        job = self._open_job
        job.end_epoch(state, control)
        job.redirect(state, control, kwargs.get("model"))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """The Trainer has written a checkpoint, on this rank."""
        job = self._open_job
        job.optimizer = kwargs.get("optimizer")
        self._name_unsaved(kwargs)
        job.publish(state)
        if job.stop is not None:
            # Only now: what was saved must not tell the next job to stop.
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Metrics of a step."""
        if self._job is not None:
            self._job.log(state.global_step, logs or {})

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """The training is over, or stopped."""
        job = self._open_job
        reached = f"ended at step {state.global_step:,} of {job.target_steps:,}"
        done = StopReason("done", "" if state.global_step >= job.target_steps else reached)
        self._leave(job.stop or done)


# ---- what is required ----


def _require_usable(args: TrainingArguments) -> None:
    if args.save_only_model:
        raise ValueError("save_only_model=True saves weights alone, from which no training can be resumed: unset it")
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True takes SIGTERM from unbroken, which saves and stops on it: unset it"
        )
    if args.ignore_data_skip:
        raise ValueError(
            "ignore_data_skip=True starts every resumed epoch over, so that samples are repeated: unset it"
        )
    if getattr(args.accelerator_config, "use_seedable_sampler", True) is False:
        raise ValueError("use_seedable_sampler=False: the order of an interrupted epoch cannot be made again; set it")


def _settings_of(settings: Settings, args: TrainingArguments) -> Settings:
    """The settings of the callback, with what ``TrainingArguments`` say about keeping, for ``unbroken prune``."""
    limit, metric = args.save_total_limit, args.metric_for_best_model
    best = None
    if metric is not None:
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        best = f"{name}:{'max' if args.greater_is_better else 'min'}"
    values = {
        **vars(settings),
        "keep_last_k": limit if limit and limit > 0 else None,
        "keep_best": best,
        "tracker_config": {**args.to_sanitized_dict(), **(settings.tracker_config or {})},
    }
    return Settings(**values)


def _name_unrestored(args: TrainingArguments, state: TrainerState) -> None:
    """Name the callbacks whose state the Trainer saves and, as its arguments are, does not restore."""
    if args.restore_callback_states_from_checkpoint or not is_first_process():
        return
    for name in sorted(set(map(str, state.stateful_callbacks or ())) - {TrainerControl.__name__}):
        _log.warning("%s starts over after a resume: set restore_callback_states_from_checkpoint=True", name)


def length_of(dataset: object) -> int | None:
    """How many samples a data set has; None where it does not say."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


_open_callbacks: set[Callback] = set()
before_exit(_open_callbacks, Callback._abandon)
