"""Speed of a step: measured while a job trains, or estimated before the first step.

MFU counts six operations per parameter and token plus those of causal attention, against the peak of the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from unbroken.config import Config

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


# ---- measured ----


@dataclass
class Speed:
    """Seconds per step, tokens per second and MFU since the last call."""

    tokens_per_step: int
    flops_per_token: int
    peak: float | None
    clock: Callable[[], float] = time.monotonic
    _step: int = 0
    _at_s: float = 0.0

    def begin(self, step: int) -> None:
        """Start measuring at a step."""
        self._step, self._at_s = step, self.clock()

    def look(self, step: int) -> tuple[float, dict[str, float]]:
        """Seconds per step since the last call, and the metrics to log."""
        now_s = self.clock()
        each_s = max(now_s - self._at_s, 1e-9) / max(step - self._step, 1)
        self._step, self._at_s = step, now_s
        tokens_per_s = self.tokens_per_step / each_s
        measured = {"tokens_per_s": tokens_per_s}
        if self.peak is not None:
            measured["mfu"] = tokens_per_s * self.flops_per_token / self.peak
        return each_s, measured


# ---- estimated ----

# Well-run training of models of a billion parameters and less reaches about this much of the peak.
_OF_PEAK: Final = 0.4
# Of what a plain matrix product reaches.
_OF_PRODUCT: Final = 0.5
_MEASURED_S: Final = 0.3
_WIDTH: Final = 1024


def step_seconds(config: Config, parameters: int) -> tuple[float, str]:
    """Estimated seconds per step on all devices of this machine, and how they were estimated."""
    ranks = torch.cuda.device_count() if torch.cuda.is_available() else 1
    per_s, how = _operations_per_s()
    operations = flops_per_token(config, parameters) * config.global_batch_size(ranks) * config.data.max_length
    if config.training.gradient_checkpointing:
        # The forward pass is computed twice.
        operations = operations * 4 // 3
    return operations / (per_s * ranks), f"estimated from {parameters / 1e6:,.1f} M parameters and {ranks} x {how}"


def _operations_per_s() -> tuple[float, str]:
    if not torch.cuda.is_available():
        per_s = _OF_PRODUCT * _product(torch.device("cpu"), torch.float32)
        return per_s, f"this CPU at {per_s / 1e9:,.0f} GFLOP/s"
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    peak = peak_of(device, torch.bfloat16)
    per_s = _OF_PEAK * peak if peak is not None else _OF_PRODUCT * _product(device, torch.bfloat16)
    return per_s, f"{name} at {per_s / 1e12:,.0f} TFLOP/s"


def _product(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product."""
    factor = torch.ones(_WIDTH, _WIDTH, device=device, dtype=dtype)
    torch.mm(factor, factor)
    started_s, products = time.monotonic(), 0
    while time.monotonic() - started_s < _MEASURED_S:
        torch.mm(factor, factor).sum().item()
        products += 1
    return 2 * _WIDTH**3 * products / (time.monotonic() - started_s)
