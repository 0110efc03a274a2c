"""What a job says while it trains: what it is at first, then one line every few steps.

Speeds are taken over the steps since the line before, evaluation and waiting included: what a person waits is what is
told. MFU counts six operations for each parameter and token and those of causal attention, against the device's peak.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from unbroken.config import Config
from unbroken.gpt.device import Place
from unbroken.gpt.prepare import TrainingData
from unbroken.launch.accepted import AcceptedValue
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.event_lines import event

_log = logger(__name__)
# Dense operations per second in 16 bits, by a part of the device's name; the first that fits counts.
PEAKS: Final = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("RTX 4090", 165e12),
    ("V100", 125e12),
    ("T4", 65e12),
)


def flops_per_token(config: Config, parameters: int) -> int:
    """Operations of one forward and backward pass, per token."""
    model = config.model
    return 6 * parameters + 6 * model.n_layer * model.n_embd * config.data.max_length


def peak_of(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """The device's peak in operations per second; None where it is not known."""
    if device.type != "cuda" or dtype is None:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), None)


@dataclass
class Speed:
    """Steps per second since the last look, and what follows from them."""

    tokens_per_step: int
    flops_per_token: int
    peak: float | None
    clock: Callable[[], float] = time.monotonic
    _step: int = 0
    _at_s: float = 0.0

    def begin(self, step: int) -> None:
        """The loop is about to begin."""
        self._step, self._at_s = step, self.clock()

    def look(self, step: int) -> tuple[float, dict[str, float]]:
        """Seconds a step since the last look, and the metrics to be logged."""
        now_s = self.clock()
        each_s = max(now_s - self._at_s, 1e-9) / max(step - self._step, 1)
        self._step, self._at_s = step, now_s
        tokens_per_s = self.tokens_per_step / each_s
        measured = {"tokens_per_s": tokens_per_s}
        if self.peak is not None:
            measured["mfu"] = tokens_per_s * self.flops_per_token / self.peak
        return each_s, measured


@dataclass
class Progress:
    """The lines of one job; silent on all ranks but the first."""

    max_steps: int
    speed: Speed
    is_first: bool

    def line(
        self, step: int, loss: float, rate: float, norm: float | None, left_out: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Say how the training stands after ``step`` steps, ``left_out`` of which moved no weight, by their reason.

        Returns the measured metrics.
        """
        each_s, measured = self.speed.look(step)
        if self.is_first:
            said = self.wording(step, loss, rate, norm, each_s, measured)
            text = "  ".join([said, *(f"{count} {why}" for why, count in (left_out or {}).items())])
            facts = {"loss": loss, "lr": rate, "grad_norm": norm, "step_s": each_s, **measured}
            facts |= {"tokens": step * self.speed.tokens_per_step, "max_steps": self.max_steps}
            _log.info("%s", text, extra=event("step", step=step, **facts))
        return measured

    def wording(
        self, step: int, loss: float, rate: float, norm: float | None, each_s: float, measured: dict[str, float]
    ) -> str:
        """One line, every number at its place."""
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
    place: Place,
    step: int,
    dtype: torch.dtype | None,
    changed: Sequence[AcceptedValue] = (),
    accepted: Sequence[str] = (),
) -> None:
    """What is trained, on what, and what is promised, in the same order at the start of every job."""
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
        # What a person accepted may have changed the bits: one long job is no longer what this run can be held to.
        since = step if accepted else changed[-1].step
        _log.info("exact from step %s on: accepted by name: %s", amounts.count(since), ", ".join(names))
    elif training.exact:
        _log.info("exact: the same bits on any number of ranks and over any number of jobs")
    else:
        _log.info("not exact: torch's own sums, with other bits on another number of ranks")
    if training.sharding == "fsdp2" and place.world.size == 1:
        _log.info("sharding fsdp2 on one rank: it holds the whole model, with the same bits")
    if training.wandb_project is not None:
        _log.warning("training.wandb_project is set and no tracker is connected; metrics are in the run's metrics/")
