"""The trainer, from top to bottom.

    import unbroken.gpt
    unbroken.gpt.train(config="run.yaml")

The same call starts a run and goes on with it, on any number of ranks, and N short jobs leave the bits of one long one.
That needs four things, each in a place of its own: data that is a function of a sample's number (``unbroken.data``), a
step that is a fixed list of lanes, summed in lane order (``unbroken.exact``), a rate that is a function of the step
(``rates``), and a checkpoint with everything else (``unbroken.Run``). What is left is the loop below.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unbroken import exact
from unbroken.config import Config, load, require_sound
from unbroken.config.changes import Difference, computing_values
from unbroken.data.loader import Batch
from unbroken.errors import GradientNotFinite
from unbroken.gpt.arithmetic import Arithmetic, accepted_items
from unbroken.gpt.average import WeightAverage
from unbroken.gpt.build import build_model, is_sharded, require_compiler
from unbroken.gpt.device import Place, joined, noticing_full, seed_generators
from unbroken.gpt.evaluate import Evaluated, Evaluation
from unbroken.gpt.log_lines import Progress, Speed, flops_per_token, peak_of, say_first_lines
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import AdamW, LossScaler, follow, make_optimizer, rate_at, set_rate
from unbroken.gpt.prepare import TrainingData, lanes_of, make_loader, open_data
from unbroken.gpt.run_files import JobLog, keep_config, keep_tokenizer
from unbroken.launch.accepted import CONFIG, require_known
from unbroken.launch.started import Started, settle
from unbroken.loop.run import Run
from unbroken.loop.settings import Settings
from unbroken.quoting.log import logger
from unbroken.records.event_lines import event
from unbroken.records.layout import Layout

_log = logger(__name__)
VALIDATION_LOSS = "val_loss"
AVERAGED_LOSS = "ema_val_loss"


@dataclass(frozen=True)
class Trained:
    """How a job of a run ended; ``loss`` and ``val_loss`` are the last ones it told, None if none."""

    run: Path
    step: int
    tokens: int
    is_completed: bool
    loss: float | None
    val_loss: float | None
    checkpoint: Path | None


def train(
    config: Config | str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    accept: Sequence[str] = (),
    force: bool = False,
) -> Trained:
    """Start a run, or go on with it, to its last step or until it is asked to stop. Collective.

    Args:
        config: what to train, or the file that says it.
        overrides: laid over a file, as ``section.field=value``.
        accept: differences to the run so far that a person accepts by name.
        force: with ``training.resume`` scratch, set the checkpoints that are there aside.

    Raises:
        ValueError: there are overrides, and no file that they could be laid over.
        ConfigInvalid: the config has problems; all of them are in it.
        ConfigDiffers: the run was started with another config.
        AcceptUnknown: a name is accepted that nothing has which could differ.
        DeviceFull: a device has no room for it.
        DataError: the data is missing, changed, exhausted or does not fit the config.
        UnbrokenError: as ``Run`` raises it.
    """
    if isinstance(config, Config):
        if overrides:
            raise ValueError("overrides are laid over a file; of a Config, change the fields themselves")
        require_sound(config)
    else:
        config = load(Path(config), overrides).config
    with joined() as place, noticing_full(place.device, "this training", is_training=True):
        return _train(config, place, tuple(accept), force=force)


def _train(asked: Config, place: Place, accept: tuple[str, ...], *, force: bool) -> Trained:
    # What the run is: the config as asked, held to the one that started it. Its global batch never changes again.
    started = place.world.from_first(lambda: settle(asked, place.world.size, accept=accept, force=force))
    config = started.config
    training = config.training

    # What it reads. Everything that config and data must agree about is looked at before anything is built.
    data = open_data(config, place.world)

    # How it computes: kernels that repeat their bits, in the precision of the device.
    place.world.all_or_none(lambda: require_compiler(config, place.device))
    numerics = exact.pin(place.device) if training.exact else exact.Numerics(place.device)
    dtype = place.compute_dtype(training)
    seed_generators(training.seed)

    # What is trained. First weights, sums and moments do not depend on the number of ranks.
    model = build_model(config, data.vocab_size, place.device, dtype)
    optimizer = make_optimizer(model, config.optimizer)
    reducer = exact.Reducer(
        model,
        optimizer,
        lanes=lanes_of(config),
        seed=training.seed,
        compute_dtype=None if is_sharded(config) else dtype,
        stock=not training.exact,
        defer_scale=True,
    )
    average = None if training.ema_decay is None else WeightAverage(model, training.ema_decay)
    scaler = LossScaler(place.device, tokens_per_step(config)) if dtype is torch.float16 else None
    extras: dict[str, Any] = {name: item for name, item in (("ema", average), ("scaler", scaler)) if item is not None}
    if training.load_path is None:
        require_known(accept, [f"{item}.{name}" for item in ("model", "ema") for name in model.state_dict()])

    # What a checkpoint holds: all of it. `Run` resumes here, and from here on answers to signals and the clock.
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
        if place.is_first:
            log.begin(run.directory, run.job)
            say_first_lines(config, data, place, run.step, dtype, started.history(job=run.job, step=run.step), accept)
        place.world.from_first(lambda: _keep_records(run, started, data))
        follow(optimizer, config.optimizer)
        if average is not None and not average.is_restored:
            # Of a run that goes on from a checkpoint without one, it begins with the weights of that checkpoint.
            average.begin()
        loop = Training(config, place, data, model, optimizer, reducer, scaler, average, run)
        loop.to_the_end()
    return loop.result()


@dataclass
class Training:
    """The loop and what it holds."""

    config: Config
    place: Place
    data: TrainingData
    model: GPT
    optimizer: AdamW
    reducer: exact.Reducer
    scaler: LossScaler | None
    average: WeightAverage | None
    run: Run
    loss: float | None = None
    val_loss: float | None = None

    def to_the_end(self) -> None:
        """Every step that is left; ends early when somebody asks for it, and with an error when the data runs dry."""
        training = self.config.training
        progress = self._progress()
        evaluation = self._evaluation()
        progress.speed.begin(self.run.step)
        for step in self.run.steps(training.max_steps):
            rate = rate_at(step, self.config.optimizer, training.max_steps)
            set_rate(self.optimizer, rate)
            self._compute(step)
            norm = self._clip()
            if self._update(step, norm) and self.average is not None:
                self.average.update()
            done = step + 1
            self.run.log(loss=self.reducer.loss, lr=rate, grad_norm=norm, tokens=done * tokens_per_step(self.config))
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
        """Bring the gradients down to the largest norm allowed, as part of the next update; returns what theirs was."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        limit = self.config.optimizer.max_grad_norm
        norm = self.reducer.norm() if limit is None else self.reducer.clip(limit)
        assert self.reducer.pending_scale is not None
        self.optimizer.scale_next(self.reducer.pending_scale)
        return norm

    def _update(self, step: int, norm: torch.Tensor) -> bool:
        """Move the weights, unless loss or gradient are no numbers and the config says to skip such a step."""
        if self.scaler is not None:
            return self._update_scaled(self.scaler, step, norm)
        if self.config.training.non_finite == "skip" and not _are_finite(self.reducer.loss, norm):
            return self._skip(step, norm)
        # With the policy `stop` nobody waits for the device here: what is no number is found when metrics are read,
        # which is before every save.
        self.optimizer.step()
        return True

    def _update_scaled(self, scaler: LossScaler, step: int, norm: torch.Tensor) -> bool:
        """The same for fp16: a gradient that overflowed moves nothing and halves the scale, down to the lowest."""
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
        # With the policy `stop` a loss that is no number ends the job when metrics are read.
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
        self.run.event("skipped", step=step + 1, loss=loss, grad_norm=float(norm), skipped=skipped)
        if self.place.is_first:
            _log.warning("step %s is skipped: loss %s, norm %s; %d so far", f"{step + 1:,}", loss, float(norm), skipped)
        return False

    def _count(self, name: str) -> int:
        self.run.counters[name] = self.run.counters.get(name, 0) + 1
        self.run.log(**{name: self.run.counters[name]})
        count: int = self.run.counters[name]
        return count

    def _left_out(self) -> dict[str, int]:
        """The steps of the run that moved no weight, by what the lines call them."""
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

    def _note_evaluated(self, metric: str, found: Evaluated, done: int) -> None:
        """Say and log a loss on val/; the best one so far is worth a checkpoint, where the config keeps the best."""
        self.run.log(**{metric: found.loss})
        best = self.run.counters.get(f"best_{metric}", float("inf"))
        if found.loss < best:
            self.run.counters[f"best_{metric}"] = found.loss
            if (self.config.training.keep_best or "").startswith(f"{metric}:"):
                self.run.save(by_all=True)
        if self.place.is_first:
            note = "  best so far" if found.loss < best else ""
            facts = event("evaluation", step=done, metric=metric, loss=found.loss, perplexity=found.perplexity)
            shown = f"{done:,}", metric, found.loss, found.perplexity, note
            _log.info("step %s  %s %.4f  perplexity %.2f%s", *shown, extra=facts)

    def _is_due(self, done: int, every: int | None) -> bool:
        return every is not None and (done % every == 0 or done == self.config.training.max_steps)

    def _evaluation(self) -> Evaluation | None:
        if self.data.validation is None:
            return None
        training = self.config.training
        return Evaluation(self.data.validation, training.per_device_batch_size, training.max_eval_batches, self.place)

    def _progress(self) -> Progress:
        operations = flops_per_token(self.config, self.config.model.parameters(self.data.vocab_size))
        peak = peak_of(self.place.device, self.place.compute_dtype(self.config.training))
        all_peaks = None if peak is None else peak * self.place.world.size
        speed = Speed(tokens_per_step(self.config), operations, all_peaks)
        return Progress(self.config.training.max_steps, speed, self.place.is_first)

    def result(self) -> Trained:
        """What came of it."""
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
    """Whether all of these are numbers; waits for the device."""
    return all(bool(torch.isfinite(number)) for number in numbers)


def _settings(started: Started, accept: tuple[str, ...], *, force: bool, has_scaler: bool) -> Settings:
    training = started.config.training
    # A job that replaces the config of one that never saved computes other losses under the same step numbers.
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
        accept=accepted,
        max_runtime_s=training.max_runtime_seconds,
        reserve_s=training.walltime_reserve_seconds,
        non_finite="stop" if training.non_finite == "stop" else "allow",
        # In fp16 a gradient that overflows is the scaler's business.
        finite=("loss",) if has_scaler else ("loss", "grad_norm"),
        # Lanes draw from generators of their own.
        shared_generators=True,
        log_steps=training.logging_steps,
        spot=training.spot,
        emergency_dir=training.emergency_dir,
        persistent_dir=training.persistent_dir,
        grace_s=training.grace_seconds,
    )


def _keep_records(run: Run, started: Started, data: TrainingData) -> None:
    """What stands beside the checkpoints, before the first step; changes are said and journalled."""
    layout = Layout(run.directory)
    keep_config(layout, started, job=run.job, step=run.step)
    keep_tokenizer(layout, data.tokenizer, data.tokenizer_file)
    differences = started.differences
    changes = [*differences.fixed, *differences.declared, *differences.free]
    _say_changes(started, changes)
    if changes or started.taken or started.is_replaced or started.is_rewritten:
        facts = {change.field: [change.started_with, change.now] for change in changes}
        accepted = [change.field for change in started.taken]
        run.event("config", changes=facts, is_replaced=started.is_replaced or started.is_rewritten, accepted=accepted)


def _say_changes(started: Started, changes: Sequence[Difference]) -> None:
    """One line for each value that is not the config file's, or not what the run was started with."""
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
