"""Trainings with Lightning's ``DeepSpeedStrategy`` on the CPU: ``fits`` in a process that has DeepSpeed."""

import importlib
import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from tests.frameworks import fits
from tests.frameworks.deepspeed_trainings import ALONE

# The ranks exchange over gloo: the compiled op for one machine is not needed.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
SMALLEST = {"plain": True, "zero": 1, "trainer": {"max_steps": 2}, "environ": ALONE}


class OnCpu(DeepSpeedStrategy):  # type: ignore[misc, unused-ignore]
    """Lightning asks for a GPU, for which DeepSpeed has no need."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def strategy(stage: int) -> DeepSpeedStrategy:
    return OnCpu(stage=stage, process_group_backend="gloo", logging_batch_size_per_gpu=4)


def weights_of(engine: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """The live weights, gathered on every rank."""
    held = [each for each in engine.module.parameters() if hasattr(each, "ds_id")]
    if not held:
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(held):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def converted(trainer: Any, savers: list[Any], to: Path) -> list[bool]:  # noqa: ANN401
    """Whether Lightning's converter makes the live weights of the last folder of each callback; on rank 0."""
    live = weights_of(trainer.strategy.deepspeed_engine)
    return [_converts(Path(saver.last_model_path), live, to) for saver in savers if trainer.global_rank == 0]


def _converts(path: Path, live: dict[str, torch.Tensor], to: Path) -> bool:
    found = convert_zero_checkpoint_to_fp32_state_dict(path, to)["state_dict"]
    return found.keys() == live.keys() and all(torch.equal(found[name], live[name]) for name in live)


def train(job: dict[str, Any]) -> None:
    """Do one job; ``of``: by the trainings of another framework."""
    trainings = importlib.import_module(f"tests.frameworks.{job['of']}_trainings") if "of" in job else fits
    trainings.train(job)
