"""Restores what a loop changes before the batches of an epoch, when a resume continues inside that epoch.

The checkpoint was saved behind it, and the loop does it once more: a scheduler that steps at the start of each epoch
would be one step ahead. So the state of the checkpoint is put back where the loop is as far as the checkpoint.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_custom_state  # type: ignore[import-untyped]

from unbroken.frameworks.accelerator_contents import Held
from unbroken.loop.loop_checks import are_equal


class BeforeBatches:
    """The small state that a continued epoch begins with: schedulers and the settings of optimizers."""

    def __init__(self, held: Held, path: Path | None) -> None:
        self._held, self._path = held, path
        self._schedulers = [copy.deepcopy(each.state_dict()) for each in held.schedulers]
        self._groups = [copy.deepcopy(each) for each in _settings(held)]

    def undo(self) -> list[str]:
        """Put it back, and the registered objects as the checkpoint has them; the names of what had been changed."""
        changed = []
        for number, (scheduler, before) in enumerate(zip(self._held.schedulers, self._schedulers, strict=True)):
            if not are_equal(before, scheduler.state_dict()):
                changed.append(f"scheduler {number}")
                scheduler.load_state_dict(before)
        if not are_equal(self._groups, _settings(self._held)):
            changed.append("settings of optimizers")
            groups = [group for each in self._held.optimizers for group in each.param_groups]
            for group, settings in zip(groups, self._groups, strict=True):
                for name, value in settings.items():
                    if isinstance(group.get(name), torch.Tensor):
                        group[name].copy_(value)
                    else:
                        group[name] = value
        for number, each in enumerate(self._held.registered if self._path is not None else ()):
            # Read again and not copied before: averaged weights are as large as the model.
            load_custom_state(each, str(self._path), number)
        return changed


def _settings(held: Held) -> list[dict[str, Any]]:
    groups = [group for each in held.optimizers for group in each.param_groups]
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]
