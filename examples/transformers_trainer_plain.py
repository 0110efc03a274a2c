"""The Trainer of Transformers on a small GPT-2 with dropout: one long job.

python transformers_trainer_plain.py STEPS DIRECTORY
"""

import hashlib
import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Short sequences, each a function of its number."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    set_seed(7)
    torch.set_num_threads(1)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        sys.argv[2],
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "2")),
        learning_rate=1e-2,
        save_steps=4,
        save_total_limit=2,
        logging_steps=1,
        dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences())
    trainer.train()

    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
