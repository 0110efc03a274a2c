"""The log lines of a training job: a few lines at its start, then one line every few steps.

Speeds are averaged over the steps since the previous line, including evaluation and waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from unbroken.config import Config
from unbroken.gpt.device import RankDevice
from unbroken.gpt.speed import Speed
from unbroken.gpt.training_data import TrainingData
from unbroken.launch.accepted import AcceptedValue
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.event_lines import event

_log = logger(__name__)


@dataclass
class StepLog:
    """The step lines of one job; only rank 0 logs."""

    max_steps: int
    speed: Speed
    is_first: bool

    def line(
        self, step: int, loss: float, rate: float, norm: float | None, left_out: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Log the line after ``step`` steps; ``left_out`` counts skipped steps by reason.

        Returns the measured metrics.
        """
        each_s, measured = self.speed.look(step)
        if self.is_first:
            said = self.wording(step, loss, rate, norm, each_s, measured)
            text = "  ".join([said, *(f"{count} {why}" for why, count in (left_out or {}).items())])
            fields = {"loss": loss, "lr": rate, "grad_norm": norm, "step_s": each_s, **measured}
            fields |= {"tokens": step * self.speed.tokens_per_step, "max_steps": self.max_steps}
            _log.info("%s", text, extra=event("step", step=step, **fields))
        return measured

    def wording(
        self, step: int, loss: float, rate: float, norm: float | None, each_s: float, measured: dict[str, float]
    ) -> str:
        """The text of one line."""
        total = amounts.count(self.max_steps)
        parts = [
            f"step {amounts.count(step):>{len(total)}}/{total}",
            f"{100 * step / self.max_steps:5.1f} %",
            f"loss {loss:.4f}",
            f"lr {rate:.2e}",
            *([] if norm is None else [f"norm {norm:.2f}"]),
            f"{1000 * each_s:.0f} ms",
            f"{_short(measured['tokens_per_s'])} tokens/s",
            *([f"MFU {100 * measured['mfu']:.1f} %"] if "mfu" in measured else []),
            f"{amounts.duration((self.max_steps - step) * each_s)} left" if step < self.max_steps else "done",
        ]
        return "  ".join(parts)


def _short(number: float) -> str:
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if number >= 10 ** (power + (power == 3)):
            return f"{number / 10**power:.3g} {unit}"
    return f"{number:.0f}"


def say_first_lines(
    config: Config,
    data: TrainingData,
    place: RankDevice,
    step: int,
    dtype: torch.dtype | None,
    changed: Sequence[AcceptedValue] = (),
    accepted: Sequence[str] = (),
) -> None:
    """Log model, batch, data and exactness at the start of a job."""
    model, training = config.model, config.training
    parameters = _short(model.parameters(data.vocab_size))
    held = "sharded over" if training.sharding == "fsdp2" and place.world.size > 1 else "whole on"
    precision = str(dtype or torch.float32).removeprefix("torch.")
    compiled = ", compiled" if training.compile else ""
    ranks = amounts.plural(place.world.size, "rank")
    batch, lane = config.global_batch_size(1), training.per_device_batch_size
    tokens = amounts.plural(batch * config.data.max_length, "token")
    started = event(
        "start",
        run=training.output_dir,
        step=step,
        max_steps=training.max_steps,
        world_size=place.world.size,
        parameters=model.parameters(data.vocab_size),
        tokens_per_step=batch * config.data.max_length,
        is_exact=training.exact,
    )
    _log.info("model %s parameters, %s, %s %s%s", parameters, precision, held, ranks, compiled, extra=started)
    _log.info("batch %s in %s, %s a step", batch, amounts.plural(batch // lane, "lane"), tokens)
    end = "without end" if data.train.end is None else f"of {amounts.count(data.train.end)}"
    _log.info("data %s, at sample %s %s", config.data.path, amounts.count(step * batch), end)
    names = dict.fromkeys((*(change.field for change in changed), *accepted))
    if training.exact and names and step:
        # An accepted change may have changed the bits: the run is no longer comparable to one long job.
        since = step if accepted else changed[-1].step
        _log.info("exact from step %s on (accepted: %s)", amounts.count(since), ", ".join(names))
    elif training.exact:
        _log.info("exact: the same bits on any number of ranks and over any number of jobs")
    else:
        _log.info("not exact: torch's own reductions, bits depend on the number of ranks")
    if training.sharding == "fsdp2" and place.world.size == 1:
        _log.info("sharding fsdp2 has no effect on one rank")
