"""The network: a pre-norm decoder with rotary positions, built from ``config.ModelConfig``.

Names in its state, all plain: ``embedding.weight``, ``blocks.0.attention_norm.weight``,
``blocks.0.attention.qkv.weight`` (query, key and value rows), ``blocks.0.attention.out.weight``,
``blocks.0.mlp_norm.weight``, ``blocks.0.mlp.gate_up.weight`` (gate and up rows; ``up`` in a plain MLP),
``blocks.0.mlp.down.weight``, ``norm.weight`` and, where it is not tied to the embedding, ``head.weight``; ``bias``
beside each ``weight`` where the config has one.
The residual stream has the dtype of the products (autocast's, or that of the weights): fp32 weights under autocast and
weights cast beforehand compute the same bits. Dropout acts on the embedding and on what each layer adds to the stream.
"""

from collections.abc import Callable
from typing import Self, overload

import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody knows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unbroken.config.model import ModelConfig
from unbroken.errors import SequenceTooLong
from unbroken.gpt.attention import Attention, Context, Kernel, kernel_for, mask_for
from unbroken.gpt.cache import KeyValueCache, LayerCache
from unbroken.gpt.loss import LossSum, loss_sum, next_token_targets
from unbroken.gpt.mlp import make_mlp
from unbroken.gpt.norm import make_norm
from unbroken.gpt.rope import Angles, tables


class Block(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, hidden: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
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
        # A change of dtype would round the angles, and ``to_empty`` would leave them unfilled: they are made anew.
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
        context = Context(angles, mask, keeps_documents_apart=doc_ids is not None)
        hidden = self._embedded(tokens)
        for number, block in enumerate(self.blocks):
            if self.training and self.checkpoint_every and number % self.checkpoint_every == 0:
                # Without dropout there is no generator to put back, and asking for it would wait for the device.
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
        context = Context(self._angles(tokens.shape[1], cache.length, None), None)
        hidden = self._embedded(tokens)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            hidden = block(hidden, context, layer)
        return self._logits(self.norm(hidden[:, -1:]))[:, 0]

    def new_cache(self, *, batch: int, room: int) -> KeyValueCache:
        """An empty cache for ``extend``, where the model is and in the dtype it computes in."""
        device = self.embedding.weight.device
        dtype = self._stream_dtype(device)
        return KeyValueCache.empty(self.config, batch=batch, room=room, dtype=dtype, device=device)

    def _stream_dtype(self, device: torch.device) -> torch.dtype:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.embedding.weight.dtype

    def _embedded(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.embedding.weight).to(self._stream_dtype(tokens.device))
        return F.dropout(hidden, self.config.dropout, self.training) if self.config.dropout else hidden

    def _angles(self, length: int, start: int, positions: Tensor | None) -> Angles:
        if start + length > self.config.n_positions:
            raise SequenceTooLong(tokens=start + length, positions=self.config.n_positions)
        places = slice(start, start + length) if positions is None else positions
        # One row of angles per token, the same for all heads.
        return Angles(self.cosine[places].unsqueeze(-2), self.sine[places].unsqueeze(-2))

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.output_weight).float()
