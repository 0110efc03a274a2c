"""Who may look at whom: each token at itself and at those before it, within its document where documents are told.

A mask is built once per forward pass and handed to every block. Padding carries a document id of its own (-1), so that
no row of a mask is empty and no softmax divides by nothing.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


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
