"""Small trainings with the ``CheckpointManager`` of torchtitan in the loop of its Trainer, each described by a dict."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components import checkpointer

from tests.frameworks.dcp_trainings import Training, process_group
from unbroken.frameworks.torchtitan import CheckpointManager


class Optimizers:
    """The optimizer of a training, as torchtitan's container holds it: loaded apart from the model."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._training.state_dict()["optimizer"]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._training.load_state_dict({**self._training.state_dict(), "optimizer": state})


class Counter:
    """The step, as torchtitan's Trainer keeps it; also in place of its schedulers and its data."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Trainer:
    """What ``torchtitan.trainer.Trainer`` does with its manager."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self.training, self.counters = job, Training(), [Counter(), Counter(), Counter()]
        owner: Any = checkpointer.CheckpointManager if job.get("plain") else CheckpointManager
        asked = {"enable": True, "interval": 4, "keep_latest_k": 2, "async_mode": job.get("mode", "disabled")}
        more = {"last_save_model_only": False} if job.get("plain") else {}
        self._config = owner.Config(folder=job["directory"], **{**asked, **more, **job.get("config", {})})
        state, scheduler, data = self.counters
        self.manager: Any = self._config.build(
            dataloader=data,
            model_parts=[self.training.model],
            optimizers=Optimizers(self.training),
            lr_schedulers=scheduler,
            states={"train_state": state},
            sd_adapter=None,
        )

    @record
    def train(self) -> None:
        job, steps = self._job, self._job.get("steps", 12)
        if job.get("is_seed"):
            self.manager.save(curr_step=0, last_step=True)
            return
        self.manager.load(step=self._config.load_step)
        self.first, self.began = self.counters[0].step, self.training.digest()
        for step in range(self.first + 1, steps + 1):
            self.training.step(step)
            for counter in self.counters:
                counter.step = step
            for name, at in job.get("signals", {}).items():
                if at == step:
                    os.kill(os.getpid(), getattr(signal, name))
            if job.get("raises") == step:
                raise ValueError("the loss is odd")
            self.manager.save(step, last_step=step == steps)

    first, began = 0, ""


def train(job: dict[str, Any]) -> None:
    """Do one job as torchtitan's ``main`` does. ``plain``: without unbroken. ``result``: where its end is written."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trainer: Trainer | None = None
    with process_group():
        try:
            trainer = Trainer(job)
            trainer.train()
        except Exception:
            if trainer is not None:
                trainer.manager.close()
            raise
        trainer.manager.close()
        run = getattr(trainer.manager, "run", None)
        found = {
            "digest": trainer.training.digest(),
            "began": trainer.began,
            "first": trainer.first,
            "step": trainer.counters[0].step,
            "counters": [counter.step for counter in trainer.counters],
            "is_stopping": run is not None and run.is_stopping,
        }
        if dist.get_rank() == 0:
            Path(job["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
