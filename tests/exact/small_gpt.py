"""A transformer small enough for a matrix of worlds, with what tends to break exactness: tied weights, odd shapes,
dropout, gradient checkpointing, fused attention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 37  # divides by no world: uneven shards
WIDTH = 12
HEADS = 2
HIDDEN = 19
LENGTH = 9
BATCH = 2
DATA_SEED = 1234


@dataclass(frozen=True)
class Shape:
    """What a test varies."""

    dropout: float = 0.0
    is_tied: bool = True
    is_checkpointed: bool = False
    layers: int = 2


class Block(nn.Module):
    """Attention and a gated feed-forward part, each behind a norm, each with dropout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.before_attention, self.before_hidden = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        y = self.before_hidden(x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.dropout, self.training)


class SmallGpt(nn.Module):
    """Returns the mean cross-entropy of a batch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.is_checkpointed else block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(shape: Shape, seed: int = 7) -> SmallGpt:
    """The same model in every process, on the CPU, so that every device begins with the same bits."""
    torch.manual_seed(seed)
    return SmallGpt(shape)


def batch(step: int, lane: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of a lane: a pure function of step and lane."""
    generator = torch.Generator().manual_seed(DATA_SEED * 1_000_003 + step * 4_099 + lane)
    drawn = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
