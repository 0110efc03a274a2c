"""Attention with grouped key and value heads, over one of two kernels: SDPA, or flex attention with a block mask.

Both compute the same function; which one runs follows from the config's mode, the device and whether deterministic
algorithms are asked for. Query, key and value projection are one matrix, in this order: the input is read once and the
backward pass needs one product where three would have to be added. An export splits it by rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody knows
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from unbroken.config.sections import ModelConfig
from unbroken.gpt.rope import Angles, rotate

# ---- key-value cache ----


@dataclass
class LayerCache:
    """The keys and values of one block, (batch, heads, room, width), of which the first ``length`` are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those of all tokens so far."""
        end = self.length + key.shape[2]
        self.keys[:, :, self.length : end] = key
        self.values[:, :, self.length : end] = value
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(frozen=True)
class KeyValueCache:
    """One ``LayerCache`` per block; all of them hold the same tokens."""

    layers: tuple[LayerCache, ...]

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self.layers[0].length

    @property
    def room(self) -> int:
        """How many tokens it can hold."""
        return self.layers[0].keys.shape[2]

    @classmethod
    def empty(
        cls, config: ModelConfig, *, batch: int, room: int, dtype: torch.dtype, device: torch.device
    ) -> "KeyValueCache":
        """An empty cache for ``room`` tokens."""
        shape = (batch, config.kv_heads, room, config.n_embd // config.n_head)

        def layer() -> LayerCache:
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            return LayerCache(keys, values)

        return cls(tuple(layer() for _ in range(config.n_layer)))


# ---- masks ----


def dense_mask(doc_ids: Tensor) -> Tensor:
    """True where a token may look, (batch, 1, time, time), from the document of each token, (batch, time)."""
    length = doc_ids.shape[1]
    past = torch.ones(length, length, dtype=torch.bool, device=doc_ids.device).tril()
    return ((doc_ids[:, :, None] == doc_ids[:, None, :]) & past)[:, None]


def cached_mask(start: int, length: int, device: torch.device) -> Tensor:
    """True where one of ``length`` new tokens may look, (length, start + length), when ``start`` tokens are cached."""
    columns = torch.arange(start + length, device=device)
    return columns <= columns[start:, None]


def block_mask(tokens: Tensor, doc_ids: Tensor | None) -> BlockMask:
    """The same as blocks for flex attention; without documents one mask serves every row of the batch."""
    batch, length = tokens.shape
    is_fused = torch.compiler.is_compiling() or not tokens.is_cuda
    create = create_block_mask if is_fused else _compiled_creation()

    def looks_back(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    if doc_ids is None:
        return create(looks_back, None, None, length, length, device=tokens.device)

    def looks_back_in_document(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (doc_ids[row, query] == doc_ids[row, key])

    return create(looks_back_in_document, batch, None, length, length, device=tokens.device)


@cache
def _compiled_creation() -> Any:  # noqa: ANN401 -- create_block_mask as the compiler returns it
    # Uncompiled it would fill a tensor of batch x time x time first.
    return torch.compile(create_block_mask)


# ---- attention ----

Kernel = Literal["sdpa", "flex"]
# Tiles of flex attention by width of a head, where others than its own choice were measured to be faster. Of 16 bits:
# elements twice as wide would need more of a multiprocessor's memory than most devices have.
TILES: Final[Mapping[int, Mapping[str, int]]] = {
    64: {
        "fwd_BLOCK_M": 64,
        "fwd_BLOCK_N": 64,
        "fwd_num_warps": 4,
        "fwd_num_stages": 3,
        "bwd_BLOCK_M1": 32,
        "bwd_BLOCK_N1": 128,
        "bwd_BLOCK_M2": 128,
        "bwd_BLOCK_N2": 64,
        "bwd_num_warps": 4,
        "bwd_num_stages": 3,
    }
}


class ForwardContext:
    """What all blocks share in one forward pass.

    A plain class, no tuple and no dataclass: FSDP2 looks into those and casts the tensors it finds to the dtype of the
    parameters, and angles in bf16 would put tokens in wrong places.
    """

    def __init__(self, angles: Angles, mask: Tensor | BlockMask | None, *, keeps_documents_apart: bool = False) -> None:
        self.angles = angles
        self.mask = mask
        self.keeps_documents_apart = keeps_documents_apart


def kernel_for(config: ModelConfig, device: torch.device) -> Kernel:
    """The kernel for a model: flex on CUDA where the mode says so or where bits must repeat, SDPA everywhere else.

    On CUDA the deterministic backward of SDPA is slower than flex attention by half, and with a mask there is none.
    Flex attention has no backward on a CPU.
    """
    if device.type != "cuda":
        return "sdpa"
    return "flex" if config.attention_mode == "flex" or torch.are_deterministic_algorithms_enabled() else "sdpa"


def mask_for(kernel: Kernel, tokens: Tensor, doc_ids: Tensor | None) -> Tensor | BlockMask | None:
    """The mask of one forward pass; None is plainly causal."""
    if kernel == "flex":
        return block_mask(tokens, doc_ids)
    return None if doc_ids is None else dense_mask(doc_ids)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention by the number of key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.n_embd // config.n_head
        self.heads, self.kv_heads = config.n_head, config.kv_heads
        projected = (self.heads + 2 * self.kv_heads) * width
        self.qkv = nn.Linear(config.n_embd, projected, bias=config.has_qkv_bias)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=config.has_attn_out_bias)

    def forward(self, hidden: Tensor, context: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        """Mix each token with those it may look at; with a cache, also with the tokens of earlier calls."""
        batch, length, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, length, self.heads + 2 * self.kv_heads, -1)
        parts = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        # Rotated before they are transposed, so that what the kernel reads and writes is laid out by time and needs no
        # copy afterwards. The values are copied: a view would keep all three alive until the backward pass.
        query, key = (rotate(part, context.angles).transpose(1, 2) for part in parts[:2])
        value = parts[2].contiguous().transpose(1, 2)
        if cache is None:
            mixed = self._attend(query, key, value, context)
        else:
            mixed = self._attend_cached(query, *cache.extend(key, value))
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        is_grouped = self.heads != self.kv_heads
        if isinstance(context.mask, BlockMask):
            attend = flex_attention if _needs_no_compiler(query) else _compiled_flex()
            options = _kernel_options(query, context) if query.is_cuda else None
            mixed: Tensor = attend(
                query, key, value, block_mask=context.mask, enable_gqa=is_grouped, kernel_options=options
            )
            return mixed
        is_causal = context.mask is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=context.mask, is_causal=is_causal, enable_gqa=is_grouped
        )

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        new, total = query.shape[2], key.shape[2]
        # One new token looks at everything there is; as many as there are, at themselves alone.
        mask = cached_mask(total - new, new, query.device) if 1 < new < total else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=new == total, enable_gqa=self.heads != self.kv_heads
        )


def _kernel_options(query: Tensor, context: ForwardContext) -> dict[str, int | bool]:
    # Of a mask that is plainly causal: the blocks that are looked at follow one another, and a row finds something in
    # the first of them. Documents leave rows for which a whole block is hidden, and a softmax that assumes otherwise
    # divides nothing by nothing.
    is_plain = not context.keeps_documents_apart
    known = {"ROWS_GUARANTEED_SAFE": is_plain, "BLOCKS_ARE_CONTIGUOUS": is_plain}
    is_narrow = query.dtype in (torch.bfloat16, torch.float16)
    return {**known, **(TILES.get(query.shape[3], {}) if is_narrow else {})}


def _needs_no_compiler(query: Tensor) -> bool:
    # Uncompiled, flex attention fills a tensor of time x time; a CPU has no other way.
    return torch.compiler.is_compiling() or query.device.type == "cpu"


@cache
def _compiled_flex() -> Any:  # noqa: ANN401 -- flex_attention as the compiler returns it
    return torch.compile(flex_attention)
