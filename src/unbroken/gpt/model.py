"""The network: a pre-norm decoder with rotary positions, built from ``config.ModelConfig``.

Names in its state, all plain: ``embedding.weight``, ``blocks.0.attention_norm.weight``,
``blocks.0.attention.qkv.weight`` (query, key and value rows), ``blocks.0.attention.out.weight``,
``blocks.0.mlp_norm.weight``, ``blocks.0.mlp.gate_up.weight`` (gate and up rows; ``up`` in a plain MLP),
``blocks.0.mlp.down.weight``, ``norm.weight`` and, where it is not tied to the embedding, ``head.weight``; ``bias``
beside each ``weight`` where the config has one.
The residual stream has the dtype of the products (autocast's, or that of the weights), or fp32 if the config says so;
fp32 weights under autocast and weights cast beforehand compute the same bits. Dropout acts on the embedding and on what
each layer adds to the stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Self, overload

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody knows
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from unbroken.config.sections import ModelConfig
from unbroken.errors import SequenceTooLong
from unbroken.foreign.items import Contents
from unbroken.gpt.attention import Attention, ForwardContext, Kernel, KeyValueCache, LayerCache, kernel_for, mask_for
from unbroken.gpt.loss import LossSum, loss_sum, next_token_targets
from unbroken.gpt.rope import Angles, tables
from unbroken.store.foreign import Foreign

# ---- normalisation ----


def product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a product with this weight is computed: autocast's, or that of the weight."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, then scale; ``is_wide``: the stream may be wider than the products."""

    def __init__(self, width: int, eps: float, *, is_wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.is_wide = is_wide

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        dtype = product_dtype(self.weight) if self.is_wide else hidden.dtype
        return self.weight.to(dtype) * scaled.to(dtype)


class LayerNorm(nn.Module):
    """Subtract the mean and divide by the standard deviation, then scale and shift."""

    def __init__(self, width: int, eps: float, *, is_wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.is_wide = is_wide

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise over the last dimension."""
        wide = hidden.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        dtype = product_dtype(self.weight) if self.is_wide else hidden.dtype
        return self.weight.to(dtype) * scaled.to(dtype) + self.bias.to(dtype)


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The norm that the config names, over the width of the residual stream."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.n_embd, config.norm_eps, is_wide=config.residual_dtype is not None)


# ---- the MLP ----

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"swish": F.silu, "gelu": F.gelu, "relu": F.relu}


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.n_embd, config.mlp_width, config.has_mlp_bias
        self.activation = config.activation
        self.has_bias = bias
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to the width of the residual stream."""
        gate_up = self.gate_up(hidden)
        if gate_up.is_cuda and torch.is_grad_enabled():
            rows = gate_up.flatten(0, -2)
            projected: Tensor = _GatedDown.apply(rows, self.down.weight, self.activation)  # type: ignore[no-untyped-call]
            if self.has_bias:
                projected = projected + self.down.bias.to(projected.dtype)
            return projected.view(hidden.shape)
        down: Tensor = self.down(gated(gate_up, self.activation))
        return down


class PlainMLP(nn.Module):
    """``down(activation(up(x)))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden, bias = config.n_embd, config.mlp_width, config.has_mlp_bias
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From and to the width of the residual stream."""
        down: Tensor = self.down(self.activation(self.up(hidden)))
        return down


def make_mlp(config: ModelConfig) -> GatedMLP | PlainMLP:
    """The MLP that the config names."""
    return GatedMLP(config) if config.mlp_type == "gated" else PlainMLP(config)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, where the last dimension holds both."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


class _GatedDown(torch.autograd.Function):
    """``gated(gate_up) @ weight.T`` on CUDA, over rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.activation = activation  # type: ignore[attr-defined]
        return gated(gate_up, activation) @ weight.to(gate_up.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 -- what forward left on it
        # Imported here: it needs Triton, which a build of torch for CPUs does not have.
        from unbroken.gpt.kernels import gated_backward

        gate_up, weight = ctx.saved_tensors
        slope = gradients[0].contiguous()
        gate_up_slope, product = gated_backward(gate_up, slope @ weight.to(slope.dtype), ctx.activation)
        return gate_up_slope, (slope.t() @ product).to(weight.dtype), None


# ---- the network ----


class Block(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, hidden: Tensor, context: ForwardContext, cache: LayerCache | None = None) -> Tensor:
        """One step of the residual stream."""
        hidden = hidden + self._dropped(self.attention(self.attention_norm(hidden), context, cache))
        return hidden + self._dropped(self.mlp(self.mlp_norm(hidden)))

    def _dropped(self, added: Tensor) -> Tensor:
        return F.dropout(added, self.dropout, self.training) if self.dropout else added


class GPT(nn.Module):
    """The model; ``blocks`` is the list to shard, compile or checkpoint one by one.

    Args:
        config: its shape and options.
        vocab_size: rows of the embedding, where the config leaves it to the tokenizer.
        gradient_checkpointing: recompute the activations of all blocks, of none, or of every n-th.
        kernel: the attention's kernel; None chooses by mode, device and determinism.
        chunk_logits: how many logits the loss may hold at once; None chooses by the device.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int | None = None,
        *,
        gradient_checkpointing: bool | int = False,
        kernel: Kernel | None = None,
        chunk_logits: int | None = None,
    ) -> None:
        super().__init__()
        rows = config.vocab_size if vocab_size is None else vocab_size
        if rows is None:
            raise ValueError("a model needs vocab_size: the config leaves it to the tokenizer")
        self.config = config
        self.checkpoint_every = int(gradient_checkpointing)
        self.kernel = kernel
        self.chunk_logits = chunk_logits
        self.embedding = nn.Embedding(rows, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.n_embd, rows, bias=False)
        self.cosine: Tensor
        self.sine: Tensor
        self.place_angles()

    def map_foreign(self, source: Foreign, contents: Contents) -> list[str]:
        """Give another tool's weights and moments the names of this model; returns what does not fit."""
        # Imported here: it makes models of this class.
        from unbroken.gpt.foreign_names import map_names

        # With the rows that it has: the config may leave them to the tokenizer.
        return map_names(source, contents, replace(self.config, vocab_size=self.vocab_size))

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embedding.num_embeddings

    @property
    def output_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    def place_angles(self) -> None:
        """Make the tables of rotary angles where the weights are; they are in no state."""
        for name, table in zip(("cosine", "sine"), tables(self.config), strict=True):
            self.register_buffer(name, table.to(self.embedding.weight.device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A change of dtype would round the angles, and ``to_empty`` would leave them unfilled: they are recomputed.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.place_angles()
        return self

    @overload
    def forward(
        self, tokens: Tensor, doc_ids: Tensor | None = ..., positions: Tensor | None = ..., labels: None = ...
    ) -> Tensor: ...
    @overload
    def forward(
        self, tokens: Tensor, doc_ids: Tensor | None = ..., positions: Tensor | None = ..., *, labels: Tensor
    ) -> LossSum: ...
    def forward(
        self,
        tokens: Tensor,
        doc_ids: Tensor | None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | LossSum:
        """The logits in fp32, (batch, time, vocabulary), or with labels their summed loss.

        Args:
            tokens: (batch, time).
            doc_ids: the document of each token, -1 on padding; the modes sdpa_mask and flex keep documents apart.
            positions: the place of each token; None counts from 0.
            labels: unshifted, as the tokens are; -100 where nothing is to be predicted.

        Raises:
            SequenceTooLong: there are more tokens than the model has positions.
        """
        kernel = self.kernel or kernel_for(self.config, tokens.device)
        if self.config.attention_mode == "causal":
            doc_ids = None  # this mode looks across documents
        mask = mask_for(kernel, tokens, doc_ids)
        angles = self._angles(tokens.shape[1], 0, positions)
        context = ForwardContext(angles, mask, keeps_documents_apart=doc_ids is not None)
        hidden = self._embedded(tokens)
        for number, block in enumerate(self.blocks):
            if self.training and self.checkpoint_every and number % self.checkpoint_every == 0:
                # Without dropout no RNG state must be restored, and reading it would synchronise with the device.
                has_dropout = self.config.dropout > 0
                hidden = checkpoint(block, hidden, context, use_reentrant=False, preserve_rng_state=has_dropout)
            else:
                hidden = block(hidden, context)
        hidden = self.norm(hidden)
        if labels is None:
            return self._logits(hidden)
        targets = next_token_targets(labels)
        return loss_sum(hidden, self.output_weight, targets, chunk_logits=self.chunk_logits)

    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """The logits after the last of some new tokens, (batch, vocabulary), given those in the cache.

        Raises:
            SequenceTooLong: cached and new tokens are more than the model has positions.
        """
        context = ForwardContext(self._angles(tokens.shape[1], cache.length, None), None)
        hidden = self._embedded(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            hidden = block(hidden, context, layer)
        return self._logits(self.norm(hidden[:, -1:]))[:, 0]

    def new_cache(self, *, batch: int, room: int) -> KeyValueCache:
        """An empty cache for ``extend``, where the model is and in the dtype it computes in."""
        device = self.embedding.weight.device
        dtype = product_dtype(self.embedding.weight)
        return KeyValueCache.empty(self.config, batch=batch, room=room, dtype=dtype, device=device)

    def _embedded(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.embedding.weight).to(product_dtype(self.embedding.weight))
        if self.config.residual_dtype is not None:
            # What a layer adds is rounded as before; the sum of all layers is not.
            hidden = hidden.float()
        return F.dropout(hidden, self.config.dropout, self.training) if self.config.dropout else hidden

    def _angles(self, length: int, start: int, positions: Tensor | None) -> Angles:
        if start + length > self.config.n_positions:
            raise SequenceTooLong(tokens=start + length, positions=self.config.n_positions)
        places = slice(start, start + length) if positions is None else positions
        # One row of angles per token, the same for all heads.
        return Angles(self.cosine[places].unsqueeze(-2), self.sine[places].unsqueeze(-2))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output_weight).float()
