"""Small trainings with the ``SFTTrainer`` of TRL, each described by a dict and run in a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from datasets.utils.logging import disable_progress_bar  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from tests.frameworks.trainings import Interrupt, digest, make_model
from unbroken.frameworks import transformers as unbroken_hf

STEPS = 24
# What the process that forks the trainings does once, to import what they will.
SMALLEST = {"plain": True, "arguments": {"max_steps": 1, "save_steps": 1}}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{f"w{token}": token for token in range(3, 64)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    make: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = make(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
    return found


def texts() -> Dataset:
    """Sentences of 4 to 12 words."""
    lines = [" ".join(f"w{3 + (line * 7 + word) % 61}" for word in range(4 + line % 9)) for line in range(40)]
    return Dataset.from_list([{"text": line} for line in lines])


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken. ``arguments``: more of them. ``result``: where its end is written."""
    torch.set_num_threads(1)
    disable_progress_bar()
    arguments = SFTConfig(
        **{
            "output_dir": job["directory"],
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "save_steps": 4,
            "logging_steps": 1,
            "max_length": 16,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            **job.get("arguments", {}),
        }
    )
    model = make_model()
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=texts(), processing_class=make_tokenizer())
    callback = unbroken_hf.Callback()
    if not job.get("plain"):
        trainer.add_callback(callback)
    for interrupted in job.get("interrupts", ()):
        trainer.add_callback(Interrupt(**interrupted))
    trainer.train(resume_from_checkpoint=None if job.get("plain") else unbroken_hf.resume(trainer))
    result = {
        "digest": digest(trainer, model),
        "step": trainer.state.global_step,
        "is_stopped": callback.is_stopped,
    }
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
