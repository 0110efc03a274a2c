"""Rules between fields, as pure functions of a config; each complaint names its fields."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from unbroken.config.document import Config
from unbroken.config.source import shown
from unbroken.errors import BadMirror
from unbroken.mirror.address import addresses_in, parse_address
from unbroken.trackers.named import parse_tracker, trackers_in

# Metrics for keep_best. A name that is never logged would silently keep nothing.
METRICS: Final = ("loss", "grad_norm", "val_loss", "ema_val_loss")
# Metrics that come from evaluations, and the fields that turn those on.
_MEASURED_BY: Final = {
    "val_loss": ("training.eval_steps",),
    "ema_val_loss": ("training.eval_steps", "training.ema_decay"),
}


@dataclass(frozen=True)
class Complaint:
    """A broken rule: its fields, the one to change first, and what is wrong."""

    fields: tuple[str, ...]
    text: str


def complaints(config: Config) -> Iterator[Complaint]:
    """Every broken rule."""
    for rule in RULES:
        yield from rule(config)


def _names_are_given(config: Config) -> Iterator[Complaint]:
    if not config.data.path.strip():
        yield Complaint(("data.path",), "is not set; set it to the folder with train/ and val/")
    for name in ("data.tokenizer", "training.output_dir", "training.resume"):
        if not config.value(name).strip():
            yield Complaint((name,), "is empty")


def _heads_divide(config: Config) -> Iterator[Complaint]:
    model = config.model
    fields = ("model.n_head", "model.n_embd")
    if model.n_embd % model.n_head:
        yield Complaint(fields, f"must divide model.n_embd ({model.n_embd}), is {model.n_head}")
    elif model.n_embd // model.n_head % 2:
        width = model.n_embd // model.n_head
        yield Complaint(fields, f"must leave an even width per head for rotary positions, leaves {width}")
    if model.n_head % model.kv_heads:
        text = f"must divide model.n_head ({model.n_head}), is {model.kv_heads}"
        yield Complaint(("model.n_kv_head", "model.n_head"), text)


def _lengths_fit(config: Config) -> Iterator[Complaint]:
    data, positions = config.data, config.model.n_positions
    if data.max_length > positions:
        text = f"must be at most model.n_positions ({positions}), is {data.max_length}"
        yield Complaint(("data.max_length", "model.n_positions"), text)
    if 2 * data.overlap_size > data.max_length:
        text = f"must be at most half of data.max_length ({data.max_length}), is {data.overlap_size}"
        yield Complaint(("data.overlap_size", "data.max_length"), text)


def _schedule_fits(config: Config) -> Iterator[Complaint]:
    optimizer, max_steps = config.optimizer, config.training.max_steps
    if optimizer.warmup_steps >= max_steps:
        text = f"must be below training.max_steps ({max_steps}), is {optimizer.warmup_steps}"
        yield Complaint(("optimizer.warmup_steps", "training.max_steps"), text)
    elif optimizer.schedule == "wsd" and optimizer.warmup_steps + optimizer.resolved_decay_steps(max_steps) > max_steps:
        text = (
            f"and optimizer.warmup_steps must fit into training.max_steps ({max_steps}), "
            f"are {optimizer.decay_steps} and {optimizer.warmup_steps}"
        )
        fields = ("optimizer.decay_steps", "optimizer.warmup_steps", "training.max_steps", "optimizer.schedule")
        yield Complaint(fields, text)


def _batch_is_whole_lanes(config: Config) -> Iterator[Complaint]:
    training = config.training
    if training.global_batch_size is not None and training.global_batch_size % training.per_device_batch_size:
        text = (
            f"must be a multiple of training.per_device_batch_size ({training.per_device_batch_size}), "
            f"is {training.global_batch_size}"
        )
        yield Complaint(("training.global_batch_size", "training.per_device_batch_size"), text)


def _checkpointed_blocks_exist(config: Config) -> Iterator[Complaint]:
    every = config.training.gradient_checkpointing
    if every is not True and every > config.model.n_layer:
        text = f"must be at most model.n_layer ({config.model.n_layer}), is {every}; false turns it off"
        yield Complaint(("training.gradient_checkpointing", "model.n_layer"), text)


def _best_names_a_metric(config: Config) -> Iterator[Complaint]:
    best = config.training.keep_best
    if best is not None:
        metric, _, direction = best.rpartition(":")
        if not metric.strip() or direction not in ("min", "max"):
            yield Complaint(("training.keep_best",), f"must be name:min or name:max, is {shown(best)}")
        elif metric not in METRICS:
            text = f"names the metric {shown(metric)}; the trainer has {', '.join(METRICS)}"
            yield Complaint(("training.keep_best",), text)


def _best_is_measured(config: Config) -> Iterator[Complaint]:
    metric = (config.training.keep_best or "").rpartition(":")[0]
    for name in _MEASURED_BY.get(metric, ()):
        if config.value(name) is None:
            yield Complaint(
                ("training.keep_best", name), f"names {metric}, but {name} is null, so {metric} is never measured"
            )


def _reserve_leaves_time(config: Config) -> Iterator[Complaint]:
    limit, reserve = config.training.max_runtime_seconds, config.training.walltime_reserve_seconds
    if limit is not None and reserve is not None and reserve >= limit:
        text = f"must be below training.max_runtime_seconds ({limit:g}), is {reserve:g}; no step would ever run"
        yield Complaint(("training.walltime_reserve_seconds", "training.max_runtime_seconds"), text)


def _copies_have_an_original(config: Config) -> Iterator[Complaint]:
    if config.training.persistent_dir is not None and config.training.emergency_dir is None:
        text = "is set and training.emergency_dir is not: there is nothing to copy"
        yield Complaint(("training.persistent_dir", "training.emergency_dir"), text)


def _mirrors_are_addresses(config: Config) -> Iterator[Complaint]:
    direct = config.training.checkpoints
    named = [("training.mirror", text) for text in addresses_in(config.training.mirror or "")]
    for field, text in [*named, *([] if direct is None else [("training.checkpoints", direct)])]:
        try:
            parse_address(text)
        except BadMirror as wrong:
            yield Complaint((field,), f"has {shown(wrong.text)}: {wrong.complaint}")


def _trackers_are_known(config: Config) -> Iterator[Complaint]:
    for text in trackers_in(config.training.trackers or ""):
        try:
            parse_tracker(text)
        except ValueError as wrong:
            yield Complaint(("training.trackers",), f"has {wrong}")


def _object_store_stands_alone(config: Config) -> Iterator[Complaint]:
    if config.training.checkpoints is None:
        return
    for name in ("mirror", "emergency_dir"):
        if getattr(config.training, name) is not None:
            text = "is for local checkpoints, and training.checkpoints is set"
            yield Complaint((f"training.{name}", "training.checkpoints"), text)


RULES: Final[tuple[Callable[[Config], Iterator[Complaint]], ...]] = (
    _names_are_given,
    _heads_divide,
    _lengths_fit,
    _schedule_fits,
    _batch_is_whole_lanes,
    _checkpointed_blocks_exist,
    _best_names_a_metric,
    _best_is_measured,
    _reserve_leaves_time,
    _copies_have_an_original,
    _mirrors_are_addresses,
    _trackers_are_known,
    _object_store_stands_alone,
)
