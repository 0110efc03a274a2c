"""Jobs of the trainer in spawned worlds, with an end of their own; and the corpus they train on."""

import importlib
import json
import math
import multiprocessing
import os
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unbroken.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from unbroken.data.ingest.request import TokenizeRequest
from unbroken.data.ingest.tokenize import tokenize

CPU = torch.device("cpu")
STEPS = 12
SOURCES = {"train": ("argparse", "calendar", "csv", "dis", "enum"), "val": ("heapq", "queue")}


def write_text(folder: Path) -> Path:
    """A few modules of the standard library as documents, in the two splits; gives the folder back."""
    library = Path(sysconfig.get_path("stdlib"))
    for split, names in SOURCES.items():
        (folder / split).mkdir(parents=True)
        lines = [json.dumps({"text": (library / f"{name}.py").read_text()}) for name in names]
        (folder / split / "library.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def tokenize_text(text: Path, data: Path) -> Path:
    """The same as shards of bytes; gives the folder back."""
    for split in SOURCES:
        tokenize(TokenizeRequest(input_dir=text / split, output_dir=data / split, tokenizer="bytes"))
    return data


def tiny(data: Path, run: Path, **training: Any) -> Config:  # noqa: ANN401 - as TrainingConfig takes it
    """A run of seconds: seven lanes, which no world above one divides, and dropout."""
    return Config(
        model=ModelConfig(n_embd=32, n_layer=2, n_head=2, n_positions=32, dropout=0.1),
        data=DataConfig(path=str(data), tokenizer="bytes", max_length=32, overlap_size=4, num_workers=0),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3),
        training=TrainingConfig(
            **{
                "per_device_batch_size": 2,
                "global_batch_size": 14,
                "max_steps": STEPS,
                "mixed_precision": "no",
                "gradient_checkpointing": False,
                "compile": False,
                "eval_steps": 4,
                "max_eval_batches": 5,
                "logging_steps": 1,
                "save_steps": 3,
                "output_dir": str(run),
                **training,
            }
        ),
    )


@dataclass(frozen=True)
class Job:
    """One job: its world, how the model is held, its workers, and the step in which it is killed or stopped.

    In the steps of ``overflow_in`` a gradient is infinite.
    """

    ranks: int = 1
    sharding: str = "replicated"
    workers: int = 0
    kill_in: int | None = None
    stop_at: int | None = None
    overflow_in: tuple[int, ...] = ()

    def config(self, config: Config) -> Config:
        """The run's config as this job has it."""
        training = replace(config.training, sharding=self.sharding)  # type: ignore[arg-type]
        return replace(config, data=replace(config.data, num_workers=self.workers), training=training)


def train(config: Config, job: Job, accept: Sequence[str] = ()) -> Any:  # noqa: ANN401 - a Trained
    """Run one rank of a job."""
    torch.set_num_threads(1)
    # The ranks of a spawned world may have no children otherwise, and workers are some.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    trainer = importlib.import_module("unbroken.gpt.train")
    clip = trainer.Training._clip

    def clip_or_end(training: Any) -> torch.Tensor:  # noqa: ANN401 - the trainer's own loop
        step = training.run.step + 1
        if step == job.kill_in:
            # Gradients are there and no weight has moved: the middle of a step.
            os.kill(os.getpid(), signal.SIGKILL)
        if step in job.overflow_in:
            gradient = next(iter(training.model.parameters())).grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[0, 0] = math.inf
        if step == job.stop_at:
            training.run.stop("asked")
        norm: torch.Tensor = clip(training)
        return norm

    trainer.Training._clip = clip_or_end
    return trainer.train(job.config(config), accept=accept)
