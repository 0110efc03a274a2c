"""Small trainings with the Trainer of Transformers, each described by a dict and run in a process of its own."""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from unbroken.frameworks import transformers as unbroken_hf

SAMPLES = 50
# What the process that forks the trainings does once, to import what they will.
SMALLEST = {"plain": True, "arguments": {"max_steps": 1, "save_steps": 1}}


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Short sequences, each a function of its number; counts how many were read in this process."""

    reads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        Sequences.reads += 1
        rng = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (4 + index % 9,), generator=rng)
        padded = torch.nn.functional.pad(tokens, (0, 16 - len(tokens)))
        return {"input_ids": padded, "labels": padded}


class Noisy(Sequences):
    """Sequences in which some tokens are replaced at random when they are read: by all global RNGs."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        drawn = [random.randrange(64), int(numpy.random.randint(64)), int(torch.randint(64, ()))]
        return {"input_ids": torch.cat([torch.tensor(drawn), tokens[3:]])}


class Streamed(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Sequences without a length, in an order that follows from the epoch it is told."""

    def __init__(self, samples: int) -> None:
        self._samples, self._epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        place, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        data = Sequences()
        for index in order[place::stride]:
            yield data[index]


def masking(seed: int | None) -> DataCollatorForLanguageModeling:
    """The collator of masked language models; with a seed it draws from a generator of its own."""
    vocabulary = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{str(token): token for token in range(3, 64)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=seed)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Interrupt(TrainerCallback):
    """Sends a signal to this process at the end of a step, or inside its computation; makes a flag file; or raises."""

    def __init__(
        self, step: int, number: int = 0, *, inside: bool = False, flag: str | None = None, raises: str | None = None
    ) -> None:
        self._step, self._number, self._inside, self._flag, self._raises = step, number, inside, flag, raises

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if state.global_step != self._step or self._inside:
            return
        if self._raises is not None:
            raise ValueError(self._raises)
        if self._flag is not None:
            Path(self._flag).touch()
            # It is read once a second.
            time.sleep(1.1)
        os.kill(os.getpid(), self._number)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if state.global_step + 1 == self._step and self._inside:
            os.kill(os.getpid(), self._number)


class SaveLate(TrainerCallback):
    """Asks for a save at a step, after all callbacks that were added before it."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if state.global_step == self._step:
            control.should_save = True


class EndEpoch(TrainerCallback):
    """Ends an epoch at some steps, as a curriculum might."""

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        if state.global_step in self._steps:
            control.should_epoch_stop = True


def kill_while_writing(name: str, step: int) -> None:
    """Die in the middle of one file of the Trainer's own checkpoint of a step: a half of it is there."""
    real_open = os.open
    save, write = torch.save, TrainerState.save_to_json

    def torn(path: str) -> None:
        handle = real_open(path, os.O_WRONLY | os.O_CREAT)
        os.write(handle, b"PK\x03\x04 half of it")
        die()

    def torch_save(value: object, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        if isinstance(path, str | Path) and f"checkpoint-{step}/" in str(path) and Path(path).name == name:
            torn(str(path))
        save(value, path, *rest, **more)

    def save_to_json(state: TrainerState, path: str) -> None:
        if f"checkpoint-{step}/" in path and name == "trainer_state.json":
            torn(path)
        write(state, path)

    setattr(torch, "save", torch_save)  # noqa: B010 - typed otherwise
    setattr(TrainerState, "save_to_json", save_to_json)  # noqa: B010


def make_model(dropout: float = 0.1) -> GPT2LMHeadModel:
    set_seed(7)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = dropout
    config.loss_type = "ForCausalLM"
    make: Any = GPT2LMHeadModel
    model: GPT2LMHeadModel = make(config)
    return model


def digest(trainer: Trainer, model: torch.nn.Module) -> str:
    """All that a training has come to: weights, optimizer, schedule and RNG states."""
    found = hashlib.sha256()
    for value in model.parameters():
        found.update(value.detach().numpy().tobytes())
    assert trainer.optimizer is not None
    for key, text in sorted(_flat("", trainer.optimizer.state_dict())):
        found.update(f"{key}={text}".encode())
    assert trainer.lr_scheduler is not None
    found.update(repr(trainer.lr_scheduler.state_dict()["_last_lr"]).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(repr(random.getstate()).encode() + repr(numpy.random.get_state()).encode())
    return found.hexdigest()


def _flat(at: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in _flat(f"{at}.{key}", inner)]
    if isinstance(value, list):
        return [each for place, inner in enumerate(value) for each in _flat(f"{at}.{place}", inner)]
    return [(at, value.numpy().tobytes().hex() if isinstance(value, torch.Tensor) else repr(value))]


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken; ``is_alone``: without ``resume``. ``result``: the file for its end."""
    torch.set_num_threads(1)
    model = make_model()
    arguments = TrainingArguments(
        **{
            "output_dir": job["directory"],
            "max_steps": 20,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "save_steps": 4,
            "logging_steps": 1,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **job.get("arguments", {}),
        }
    )
    data, collator = Sequences(), None
    if "masked" in job:
        data, collator = Noisy(), masking(job["masked"])
    train_data: Any = Streamed(job["streamed"]) if "streamed" in job else data
    few = torch.utils.data.Subset(data, range(4))
    trainer = Trainer(model, arguments, collator, train_dataset=train_data, eval_dataset=few)
    if job.get("scaler"):
        # On the CPU the Trainer makes none; large enough to overflow at first.
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    callback = unbroken_hf.Callback(**job.get("options", {}))
    if not job.get("plain"):
        trainer.add_callback(callback)
    for interrupted in job.get("interrupts", ()):
        trainer.add_callback(Interrupt(**interrupted))
    if "save_late" in job:
        trainer.add_callback(SaveLate(job["save_late"]))
    if "ends_epoch" in job:
        trainer.add_callback(EndEpoch(job["ends_epoch"]))
    if "patience" in job:
        trainer.add_callback(EarlyStoppingCallback(job["patience"]))
    if "torn" in job:
        kill_while_writing(**job["torn"])
    with contextlib.suppress(*([ValueError] if job.get("catches") else [])):
        if job.get("plain") or job.get("is_alone"):
            trainer.train(resume_from_checkpoint=job.get("resume"))
        else:
            trainer.train(resume_from_checkpoint=unbroken_hf.resume(trainer, job.get("resume")))
    result = {
        "digest": digest(trainer, model),
        "step": trainer.state.global_step,
        "is_stopped": callback.is_stopped,
        "reads": Sequences.reads,
        "epoch": trainer.state.epoch,
        "best": trainer.state.best_model_checkpoint,
        "scaler": trainer.accelerator.scaler.state_dict() if job.get("scaler") else None,
        "output_dir": arguments.output_dir,
        "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
    }
    if int(os.environ.get("RANK", "0")) == 0:
        Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
