"""The trainer, from top to bottom.

    import unbroken.gpt
    unbroken.gpt.train(config="run.yaml")

The same call starts a run or resumes it, on any number of ranks, and N short jobs give the bits of one long job. That
needs four things: data that is a function of the sample number (``unbroken.data``), a step that is a fixed list of
lanes, summed in lane order (``unbroken.exact``), a learning rate that is a function of the step (``optimizer``), and a
checkpoint with everything else (``unbroken.Run``). The rest is the loop below.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from unbroken import exact
from unbroken.config import Config, Resolved, load, require_sound
from unbroken.config.changes import Difference, computing_values
from unbroken.config.sections import TrainingConfig
from unbroken.data.loader import Batch
from unbroken.errors import GradientNotFinite
from unbroken.exact.reducer import DeferringReducer
from unbroken.gpt.arithmetic import Arithmetic, accepted_items
from unbroken.gpt.average import WeightAverage
from unbroken.gpt.build import build_model, is_sharded, require_compiler, require_torch
from unbroken.gpt.compiled_code import CompiledCode, find_compiled_code
from unbroken.gpt.device import RankDevice, joined, noticing_full, seed_rng
from unbroken.gpt.evaluate import Evaluated, Evaluation
from unbroken.gpt.first_step import FirstStep
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import AdamW, LossScaler, follow, make_optimizer, rate_at, set_rate
from unbroken.gpt.run_files import JobLog, keep_config, keep_tokenizer
from unbroken.gpt.speed import Speed, flops_per_token, peak_of
from unbroken.gpt.training_data import TrainingData, make_loader, open_data
from unbroken.gpt.training_log import StepLog, say_first_lines
from unbroken.launch import start_clock
from unbroken.launch.accepted import CONFIG, require_known
from unbroken.launch.run_config import RunConfig, resolve_run_config
from unbroken.launch.start_clock import StartClock
from unbroken.loop.run import Run
from unbroken.loop.settings import Settings
from unbroken.quoting.log import logger
from unbroken.records.event_lines import event
from unbroken.records.layout import Layout
from unbroken.trackers.named import trackers_in

_log = logger(__name__)
VALIDATION_LOSS = "val_loss"
AVERAGED_LOSS = "ema_val_loss"


@dataclass(frozen=True)
class Trained:
    """How a job ended; ``loss`` and ``val_loss`` are the last logged values, or None."""

    run: Path
    step: int
    tokens: int
    is_completed: bool
    loss: float | None
    val_loss: float | None
    checkpoint: Path | None


def train(
    config: Config | Resolved | str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    accept: Sequence[str] = (),
    force: bool = False,
) -> Trained:
    """Start or resume a run, and train to its last step or until a stop request. Collective.

    Args:
        config: the config, or the path of its file.
        overrides: overrides of a config file, as ``section.field=value``.
        accept: names of accepted differences to the run so far.
        force: with ``training.resume`` scratch, abandon the existing checkpoints.

    Raises:
        ValueError: there are overrides, but ``config`` is not a file.
        ConfigInvalid: the config has problems; it lists all of them.
        ConfigDiffers: the run was started with another config.
        AcceptUnknown: an accepted name is unknown.
        TorchTooOld: torch is older than 2.8, or than FSDP2 needs.
        DeviceFull: out of memory on a device.
        DataError: the data is missing, changed, exhausted or does not fit the config.
        UnbrokenError: as ``Run`` raises it.
    """
    if isinstance(config, Config | Resolved):
        if overrides:
            raise ValueError("overrides need a config file; change the fields of the Config instead")
        if isinstance(config, Config):
            require_sound(config)
        asked = config if isinstance(config, Config) else config.config
    else:
        asked = load(Path(config), overrides).config
    return run_job(asked, StartClock(), accept=accept, force=force)


def run_job(asked: Config, clock: StartClock, *, accept: Sequence[str] = (), force: bool = False) -> Trained:
    """As ``train``, with a config that is read and checked, and a clock that runs since the job was launched."""
    require_torch(asked)
    with joined() as place, noticing_full(place.device, "this training", is_training=True):
        clock.done(start_clock.PROCESS_GROUP)
        return _train(asked, place, clock, tuple(accept), force=force)


def _train(asked: Config, place: RankDevice, clock: StartClock, accept: tuple[str, ...], *, force: bool) -> Trained:
    # The config: as given, checked against the one that started the run. The global batch size is fixed from here on.
    started = place.world.from_first(lambda: resolve_run_config(asked, place.world.size, accept=accept, force=force))
    config = started.config
    training = config.training

    # The data. Config and data are checked against each other before anything is built.
    data = open_data(config, place.world)
    clock.done(start_clock.DATA)

    # The numerics: deterministic kernels, in the precision of the device.
    place.world.all_or_none(lambda: require_compiler(config, place.device))
    numerics = exact.pin(place.device) if training.exact else exact.Numerics(place.device)
    dtype = place.compute_dtype(training)
    seed_rng(training.seed)
    clock.done(start_clock.NUMERICS)

    # Model, reducer and optimizer. Initial weights, sums and moments do not depend on the number of ranks.
    compiled = find_compiled_code(config, data.vocab_size, place, dtype)
    model = build_model(config, data.vocab_size, place.device, dtype)
    optimizer = make_optimizer(model, config.optimizer)
    reducer = _reducer(model, optimizer, config, place, dtype)
    average = None if training.ema_decay is None else WeightAverage(model, training.ema_decay)
    scaler = LossScaler(place.device, tokens_per_step(config)) if dtype is torch.float16 else None
    extras: dict[str, Any] = {name: item for name, item in (("ema", average), ("scaler", scaler)) if item is not None}
    if training.load_path is None:
        require_known(accept, [f"{item}.{name}" for item in ("model", "ema") for name in model.state_dict()])

    clock.done(start_clock.MODEL)

    # The run: its checkpoints hold everything above. `Run` resumes here, and handles signals and walltime from here on.
    run = Run(
        training.output_dir,
        settings=_settings(started, accept, force=force, has_scaler=scaler is not None),
        model=model,
        optimizer=optimizer,
        arithmetic=Arithmetic(reducer, numerics, (*accept, *started.unsaved), computing_values(config)),
        data=make_loader(config, data.train, place.world),
        **extras,
    )
    with JobLog() as log, run:
        clock.done(start_clock.RESTORE)
        if place.is_first:
            log.begin(run.directory, run.job)
            say_first_lines(config, data, place, run.step, dtype, started.history(job=run.job, step=run.step), accept)
        place.world.from_first(lambda: _keep_records(run, started, data))
        follow(optimizer, config.optimizer)
        if average is not None and not average.is_restored:
            # Resumed from a checkpoint without an average, it starts from the weights of that checkpoint.
            average.begin()
        loop = Training(config, place, data, model, optimizer, reducer, scaler, average, run, clock, compiled)
        loop.to_the_end()
    return loop.result()


def _reducer(
    model: GPT, optimizer: AdamW, config: Config, place: RankDevice, dtype: torch.dtype | None
) -> DeferringReducer:
    # On all ranks or on none: where the self-test ran on one rank of a node, only that one may know what it found.
    return place.world.all_or_none(
        lambda: DeferringReducer(
            model,
            optimizer,
            lanes=config.lanes(),
            seed=config.training.seed,
            compute_dtype=None if is_sharded(config) else dtype,
            stock=not config.training.exact,
        )
    )


@dataclass
class Training:
    """The loop and what it holds."""

    config: Config
    place: RankDevice
    data: TrainingData
    model: GPT
    optimizer: AdamW
    reducer: DeferringReducer
    scaler: LossScaler | None
    average: WeightAverage | None
    run: Run
    clock: StartClock
    compiled: CompiledCode | None
    loss: float | None = None
    val_loss: float | None = None

    def to_the_end(self) -> None:
        """Train the remaining steps; ends early on a stop request, and with an error if the data is exhausted."""
        training = self.config.training
        progress = self._progress()
        evaluation = self._evaluation()
        progress.speed.begin(self.run.step)
        first = FirstStep(self.clock, self.place.device) if self.run.step < training.max_steps else None
        for step in self.run.steps(training.max_steps):
            rate = rate_at(step, self.config.optimizer, training.max_steps)
            set_rate(self.optimizer, rate)
            self._compute(step)
            norm = self._clip()
            if self._update(step, norm) and self.average is not None:
                self.average.update()
            # The next step computes its own: no checkpoint has to contain these.
            self.optimizer.zero_grad()
            done = step + 1
            self.run.log(loss=self.reducer.loss, lr=rate, grad_norm=norm, tokens=done * tokens_per_step(self.config))
            if first is not None:
                self.run.event("first-step", step=done, **first.measured())
                first = None
                self._keep_compiled()
            if evaluation is not None and self._is_due(done, training.eval_steps):
                self._evaluate(evaluation, done)
            if self._is_due(done, training.logging_steps):
                self.loss = float(self.reducer.loss)
                self.run.log(**progress.line(done, self.loss, rate, float(norm), self._left_out()))

    def _compute(self, step: int) -> None:
        """Loss and gradients of the whole step: this rank's lanes, summed with those of all others in lane order."""
        batch: Batch | None = None
        for lane in self.reducer.lanes(step):
            if batch is None or not lane.is_spare:
                batch = next(self.run.data).to(self.place.device, non_blocking=True)
            assert batch is not None
            found = self.model(batch.tokens, batch.doc_ids, labels=batch.labels)
            # Sums with their counts, not means: lanes have unequal numbers of tokens, and are divided once.
            scaled = None if self.scaler is None else self.scaler.scale(found.total)
            lane.backward(found.total, count=found.tokens, scaled=scaled)

    def _clip(self) -> torch.Tensor:
        """Clip the gradients to the maximum norm, as part of the next update; returns their norm."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.optimizer.max_grad_norm
        norm = self.reducer.norm() if limit is None else self.reducer.clip(limit)
        self.optimizer.scale_next(self.reducer.pending_scale)
        return norm

    def _update(self, step: int, norm: torch.Tensor) -> bool:
        """Update the weights, unless loss or gradient is NaN or Inf and the config says to skip such steps."""
        if self.scaler is not None:
            return self._update_scaled(self.scaler, step, norm)
        if self.config.training.non_finite == "skip" and not _are_finite(self.reducer.loss, norm):
            return self._skip(step, norm)
        # With the policy `stop` there is no synchronisation here: NaN is detected when metrics are read, which is
        # before every save.
        self.optimizer.step()
        return True

    def _update_scaled(self, scaler: LossScaler, step: int, norm: torch.Tensor) -> bool:
        """The same for fp16: after an overflow the step is skipped and the scale is halved, down to the lowest."""
        if _are_finite(norm):
            scaler.step(self.optimizer)
            scaler.update()
            return True
        if not _are_finite(self.reducer.loss):
            scaler.stay()
        elif scaler.lower():
            return self._note_overflow(step, scaler.get_scale())
        elif self.config.training.non_finite == "stop":
            self.place.world.from_first(lambda: self._refuse_gradient(step, scaler.lowest))
        # With the policy `stop` a NaN loss ends the job when metrics are read.
        return self._skip(step, norm) if self.config.training.non_finite == "skip" else False

    def _note_overflow(self, step: int, scale: float) -> bool:
        overflowed = self._count("overflowed_steps")
        self.run.event("overflowed", step=step + 1, scale=scale, overflowed=overflowed)
        return False

    def _refuse_gradient(self, step: int, scale: float) -> None:
        overflowed = self.run.counters.get("overflowed_steps", 0)
        raise GradientNotFinite(step=step + 1, loss=float(self.reducer.loss), scale=scale, overflowed=overflowed)

    def _skip(self, step: int, norm: torch.Tensor) -> bool:
        loss = float(self.reducer.loss)
        skipped = self._count("skipped_steps")
        self.run.event("step-skipped", step=step + 1, loss=loss, grad_norm=float(norm), skipped=skipped)
        if self.place.is_first:
            _log.warning("step %s skipped: loss %s, norm %s (%d so far)", f"{step + 1:,}", loss, float(norm), skipped)
        return False

    def _count(self, name: str) -> int:
        self.run.counters[name] = self.run.counters.get(name, 0) + 1
        self.run.log(**{name: self.run.counters[name]})
        count: int = self.run.counters[name]
        return count

    def _left_out(self) -> dict[str, int]:
        """Skipped steps of the run, by their name in the log line."""
        counted = {why: self.run.counters.get(f"{why}_steps", 0) for why in ("overflowed", "skipped")}
        return {why: count for why, count in counted.items() if count}

    def _evaluate(self, evaluation: Evaluation, done: int) -> None:
        """The loss on val/, with the weights and with their average."""
        found = evaluation(self.model, self.reducer.computing())
        self.val_loss = found.loss
        self._note_evaluated(VALIDATION_LOSS, found, done)
        if self.average is not None:
            with self.average.exchanged():
                averaged = evaluation(self.model, self.reducer.computing())
            self._note_evaluated(AVERAGED_LOSS, averaged, done)
        # The first evaluation of a kind of job has compiled another function.
        self._keep_compiled()

    def _keep_compiled(self) -> None:
        if self.compiled is not None and self.place.is_first:
            self.compiled.keep()

    def _note_evaluated(self, metric: str, found: Evaluated, done: int) -> None:
        """Log a loss on val/; a new best one is saved, if the config keeps the best checkpoint."""
        self.run.log(**{metric: found.loss})
        best = self.run.counters.get(f"best_{metric}", float("inf"))
        if found.loss < best:
            self.run.counters[f"best_{metric}"] = found.loss
            if (self.config.training.keep_best or "").startswith(f"{metric}:"):
                self.run.save(by_all=True)
        if self.place.is_first:
            note = "  best so far" if found.loss < best else ""
            fields = event("evaluation", step=done, metric=metric, loss=found.loss, perplexity=found.perplexity)
            shown = f"{done:,}", metric, found.loss, found.perplexity, note
            _log.info("step %s  %s %.4f  perplexity %.2f%s", *shown, extra=fields)

    def _is_due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.config.training.max_steps)

    def _evaluation(self) -> Evaluation | None:
        if self.data.validation is None:
            return None
        training = self.config.training
        return Evaluation(self.data.validation, training.per_device_batch_size, training.max_eval_batches, self.place)

    def _progress(self) -> StepLog:
        operations = flops_per_token(self.config, self.config.model.parameters(self.data.vocab_size))
        peak = peak_of(self.place.device, self.place.compute_dtype(self.config.training))
        all_peaks = None if peak is None else peak * self.place.world.size
        speed = Speed(tokens_per_step(self.config), operations, all_peaks)
        return StepLog(self.config.training.max_steps, speed, self.place.is_first)

    def result(self) -> Trained:
        """The result of the job."""
        latest = Layout(self.run.directory).checkpoints / "latest"
        return Trained(
            run=self.run.directory,
            step=self.run.step,
            tokens=self.run.step * tokens_per_step(self.config),
            is_completed=not self.run.is_stopped,
            loss=self.loss,
            val_loss=self.val_loss,
            checkpoint=latest.resolve() if latest.exists() else None,
        )


def tokens_per_step(config: Config) -> int:
    """Tokens that all ranks read in one step of a settled config."""
    return config.global_batch_size(1) * config.data.max_length


def _are_finite(*numbers: torch.Tensor) -> bool:
    """Whether all are finite; synchronises with the device."""
    return all(bool(torch.isfinite(number)) for number in numbers)


def _trackers(training: TrainingConfig) -> tuple[str, ...]:
    """The trackers of the config; a project of wandb is one, however it is named."""
    named = trackers_in(training.trackers or "")
    wandb = [] if training.wandb_project is None else [f"wandb:{training.wandb_project}"]
    return tuple(dict.fromkeys([*wandb, *named]))


def _settings(started: RunConfig, accept: tuple[str, ...], *, force: bool, has_scaler: bool) -> Settings:
    training = started.config.training
    # A job that replaces the config of a run without checkpoints computes other losses for the same steps.
    items = accepted_items((*accept, *started.unsaved))
    accepted = (*accept, *items, *((CONFIG,) if started.is_replaced else ()))
    return Settings(
        save_steps=training.save_steps,
        keep_last_k=training.keep_last_k,
        keep_milestone_every=training.keep_milestone_every,
        keep_every_seconds=training.keep_every_seconds,
        keep_best=training.keep_best,
        resume=started.resume,
        force=force,
        load_path=training.load_path,
        checkpoints=training.checkpoints,
        mirror=training.mirror,
        mirror_memory_bytes=training.mirror_memory_bytes,
        mirror_bytes_per_second=training.mirror_bytes_per_second,
        mirror_wait_seconds=training.mirror_wait_seconds,
        accept=accepted,
        max_runtime_seconds=training.max_runtime_seconds,
        walltime_reserve_seconds=training.walltime_reserve_seconds,
        non_finite="stop" if training.non_finite == "stop" else "allow",
        # In fp16 the scaler handles overflows.
        non_finite_metrics=("loss",) if has_scaler else ("loss", "grad_norm"),
        # Lanes have their own RNG.
        shared_rng=True,
        logging_steps=training.logging_steps,
        trackers=_trackers(training),
        tracker_mode=training.tracker_mode,
        tracker_run_name=training.wandb_run_name,
        tracker_config=asdict(started.config),
        spot=training.spot,
        emergency_dir=training.emergency_dir,
        persistent_dir=training.persistent_dir,
        grace_seconds=training.grace_seconds,
    )


def _keep_records(run: Run, started: RunConfig, data: TrainingData) -> None:
    """Write the records next to the checkpoints, before the first step; changes are logged and journalled."""
    layout = Layout(run.directory)
    keep_config(layout, started, job=run.job, step=run.step)
    keep_tokenizer(layout, data.tokenizer, data.tokenizer_file)
    differences = started.differences
    changes = [*differences.fixed, *differences.declared, *differences.free]
    _say_changes(started, changes)
    if changes or started.taken or started.is_replaced or started.is_rewritten:
        changed = {change.field: [change.started_with, change.now] for change in changes}
        accepted = [change.field for change in started.taken]
        run.event("config", changes=changed, is_replaced=started.is_replaced or started.is_rewritten, accepted=accepted)


def _say_changes(started: RunConfig, changes: Sequence[Difference]) -> None:
    """Log each value that differs from the config file, or from the start of the run."""
    by_field = {change.field: change for change in started.accepted}
    if started.is_rewritten:
        _log.warning(
            "config.json was missing: written again with the config of this job, accepted by --accept config.json"
        )
    if started.is_rebuilt:
        values = ", ".join(f"{field} {json.dumps(last.now)} (job {last.job})" for field, last in by_field.items())
        _log.warning("accepted.json was missing: rebuilt from the journal: %s", values)
    for kept in started.kept:
        last = by_field[kept.field]
        _log.warning(
            "config: %s is %s in the config, but %s was accepted by job %s at step %s: continuing with %s "
            "(--accept %s uses %s)",
            *(kept.field, kept.now, last.now, last.job, f"{last.step:,}", last.now, kept.field, kept.now),
        )
    for change in changes:
        if change.field not in {kept.field for kept in started.kept}:
            _log.info("config: %s is %s (%s when the run was started)", change.field, change.now, change.started_with)
