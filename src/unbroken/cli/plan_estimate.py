"""What a plan can be made of before a run exists: step and save estimated from the config, this disk and this device.

Each number comes with a sentence that says how it was found, so that nobody takes an estimate for a measurement.
"""

import importlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from unbroken import amounts
from unbroken.config import Config
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL
from unbroken.run.plan import Numbers
from unbroken.store.speed import SIZE_BYTES, write_speed

# Loaded by name: it needs torch, and a plan from given numbers does not.
_SPEED: Final = "unbroken.gpt.speed"
_ASSUMED_DISK: Final = 200e6
_COPIED_PER_S: Final = 4e9
_BYTES_TOKENIZER: Final = 257
_USUAL_VOCABULARY: Final = 50_257
_WORD_BYTES: Final = 4


def with_estimates(numbers: Numbers, config: Config) -> tuple[Numbers, list[str]]:
    """The numbers with a step and a save filled in where they are missing, and how each was found."""
    said: list[str] = []
    if numbers.step_s is not None and numbers.save_s is not None:
        return numbers, said
    ids = _BYTES_TOKENIZER if config.data.tokenizer == "bytes" else _USUAL_VOCABULARY
    rows = config.model.rows(ids) or ids
    if config.model.vocab_size is None:
        said.append(f"a vocabulary of {amounts.count(rows)} tokens, since model.vocab_size is null")
    parameters = config.model.parameters(rows)
    if numbers.step_s is None and (found := _step(config, parameters)) is not None:
        numbers = replace(numbers, step_s=found[0])
        said.append(f"a step takes {_short(found[0])}: {found[1]}; --step-seconds takes a measured one")
    if numbers.save_s is None:
        size = state_bytes(config, parameters)
        speed, where = _disk_speed(Path(config.training.output_dir))
        numbers = replace(numbers, save_s=size / speed, blocked_s=min(size / _COPIED_PER_S, size / speed))
        held = f"{amounts.size(size)} at {amounts.size(int(speed))}/s, {where}"
        said.append(f"a save takes {_short(size / speed)}: {held}; --save-seconds takes a measured one")
    return numbers, said


def state_bytes(config: Config, parameters: int) -> int:
    """The size of a checkpoint: weights and two moments, and the average where there is one."""
    copies = 3 if config.training.ema_decay is None else 4
    return copies * _WORD_BYTES * parameters


def _step(config: Config, parameters: int) -> tuple[float, str] | None:
    """Seconds of a step and how they were estimated; None where nothing here can compute one."""
    try:
        estimate: Callable[[Config, int], tuple[float, str]] = importlib.import_module(_SPEED).step_seconds
    except ModuleNotFoundError:
        return None
    return estimate(config, parameters)


def _disk_speed(run: Path) -> tuple[float, str]:
    """Bytes per second where the run will be, and how that is known."""
    place = next(each for each in (run, *run.absolute().parents) if each.is_dir())
    try:
        if LOCAL.space(place).free_bytes < 8 * SIZE_BYTES:
            return _ASSUMED_DISK, f"assumed: {place} has too little room to measure"
        token = secrets.token_hex(8)
        speed = write_speed(place, clock=time.monotonic, token=token, content=os.urandom)
    except StorageFailed as refused:
        return _ASSUMED_DISK, f"assumed: {place} could not be measured ({refused.cause})"
    return speed, f"measured in {place}"


def _short(seconds: float) -> str:
    return amounts.duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"
