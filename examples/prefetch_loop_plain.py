"""A loop in nanoGPT's order: the batch fetched before the loop, the next one prefetched, gradients accumulated.

    python prefetch_loop_plain.py [STEPS]

``prefetch_loop.py`` is the same loop with a ``Run``.
"""

import hashlib
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
BATCH, CONTEXT, WIDTH, ACCUMULATION = 8, 16, 48, 2
LEARNING_RATE, WARM_UP, EVAL_EVERY, EVAL_BATCHES = 3e-3, 10, 10, 4

text = Path(__file__).with_name("prefetch_loop_plain.py").read_text()
alphabet = sorted(set(text))
tokens = torch.tensor([alphabet.index(character) for character in text])
splits = {"train": tokens[: len(tokens) * 9 // 10], "val": tokens[len(tokens) * 9 // 10 :]}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    data = splits[split]
    starts = torch.randint(len(data) - CONTEXT, (BATCH,))
    inputs = torch.stack([data[start : start + CONTEXT] for start in starts])
    return inputs, torch.stack([data[start + 1 : start + CONTEXT + 1] for start in starts])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(alphabet), WIDTH)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, len(alphabet))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.embed(inputs))
        logits = self.head(self.dropout(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = [model(*get_batch("val")).item() for _ in range(EVAL_BATCHES)]
    model.train()
    return float(sum(losses) / len(losses))


def learning_rate(step: int) -> float:
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    return 0.5 * LEARNING_RATE * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP) / 200)))


torch.manual_seed(1337)
torch.set_num_threads(1)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

best_loss = math.inf
inputs, targets = get_batch("train")
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    if step % EVAL_EVERY == 0:
        best_loss = min(best_loss, estimate_loss())
    for _ in range(ACCUMULATION):
        loss = model(inputs, targets) / ACCUMULATION
        inputs, targets = get_batch("train")
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest()[:16], "best", best_loss.hex())
