"""The plain models that ours is timed beside, in the two shapes that training scripts have: GPT-2's and Llama's."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from unbroken.config.sections import ModelConfig


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


class Gpt2Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.heads = config.n_head
        self.first_norm, self.second_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.first_norm(hidden)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        hidden = hidden + self.out(attended(query, key, value))
        added: Tensor = self.down(F.gelu(self.up(self.second_norm(hidden))))
        return hidden + added


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.n_embd, config.mlp_width
        self.heads = config.n_head
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        head = width // config.n_head
        angles = torch.arange(config.n_positions)[:, None] / 10000 ** (torch.arange(0, head, 2) / head)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def rotated(self, heads: Tensor) -> Tensor:
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return torch.cat(turned, dim=-1).to(heads.dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        normed = self.first_norm(hidden)
        parts = (projection(normed) for projection in (self.query, self.key, self.value))
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        hidden = hidden + self.out(attended(self.rotated(query), self.rotated(key), value))
        normed = self.second_norm(hidden)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return hidden + added


class Plain(nn.Module):
    """Embedding, blocks, norm and tied head, with the loss over all logits at once."""

    def __init__(self, config: ModelConfig, vocab_size: int, kind: type[Gpt2Block] | type[LlamaBlock]) -> None:
        super().__init__()
        width = config.n_embd
        self.embedding = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(config.n_positions, width) if kind is Gpt2Block else None
        self.blocks = nn.ModuleList(kind(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width, bias=False) if kind is Gpt2Block else nn.RMSNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.places is not None:
            hidden = hidden + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
