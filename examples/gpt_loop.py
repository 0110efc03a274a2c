"""A small GPT that learns the characters of a source file, in a run that resumes after any kill.

    python gpt_loop.py STEPS DIRECTORY

``gpt_loop_plain.py`` is the same loop without a ``Run``. Kill this one at any time and start it again.
"""

import hashlib
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import unbroken

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
BATCH, CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 8, 32, 64, 4, 2, 0.1
LEARNING_RATE, WARM_UP, DECAY_STEPS = 3e-3, 20, 200

text = Path(__file__).with_name("gpt_loop_plain.py").read_text()
alphabet = sorted(set(text))
tokens = torch.tensor([alphabet.index(character) for character in text])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        queries, keys, values = (
            each.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in self.attention(self.before_attention(hidden)).split(WIDTH, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        fed: torch.Tensor = self.dropout(self.mlp(self.before_mlp(hidden)))
        return hidden + fed


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(alphabet), WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(alphabet), bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs) + self.position(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,))
    rows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int) -> float:
    if step < WARM_UP:
        return LEARNING_RATE * (step + 1) / WARM_UP
    return 0.5 * LEARNING_RATE * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP) / DECAY_STEPS)))


torch.manual_seed(1337)
torch.set_num_threads(1)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def train_step(step: int) -> torch.Tensor:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    loss: torch.Tensor = model(*next_batch())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


settings = unbroken.Settings(save_steps=20)
with unbroken.Run(sys.argv[2], settings=settings, model=model, optimizer=optimizer) as run:
    for step in run.steps(STEPS):
        loss = train_step(step)
        run.log(loss=loss)
        if step % 50 == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)

weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
