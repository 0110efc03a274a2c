"""How long a step is likely to take on this machine's devices, before any was computed: an estimate, said as one."""

import time
from typing import Final

import torch

from unbroken.config import Config
from unbroken.gpt.log_lines import flops_per_token, peak_of

# Well-run training of models of a billion parameters and less reaches about this much of the peak.
_OF_PEAK: Final = 0.4
# Of what a plain matrix product reaches.
_OF_PRODUCT: Final = 0.5
_MEASURED_S: Final = 0.3
_WIDTH: Final = 1024


def step_seconds(config: Config, parameters: int) -> tuple[float, str]:
    """Seconds of one step on all devices here, and a sentence that says how they were estimated."""
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
