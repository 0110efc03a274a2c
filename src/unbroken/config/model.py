"""The section ``model``: the network's shape and options, and the numbers that follow from them."""

from dataclasses import dataclass
from typing import Final, Literal

from unbroken.config.fields import ResumeClass, field

FIXED, DECLARED = ResumeClass.FIXED, ResumeClass.DECLARED
# What matrix products are cut into on a GPU.
_ROWS_MULTIPLE: Final = 128
# Far above any model there is; a digit too many is told before torch is asked for more than it can count.
_WIDEST: Final = 1 << 20
_MOST_ROWS: Final = 1 << 24
MOST_POSITIONS: Final = 1 << 24
_DEEPEST: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int | None = field(
        None,
        "Rows of the embedding; not smaller than the tokenizer's vocabulary.",
        FIXED,
        minimum=1,
        maximum=_MOST_ROWS,
        null_means="the tokenizer's vocabulary, rounded up to a multiple of 128",
        example=50304,
    )
    n_embd: int = field(768, "Width of the residual stream.", FIXED, minimum=1, maximum=_WIDEST)
    n_layer: int = field(12, "Number of blocks.", FIXED, minimum=1, maximum=_DEEPEST)
    n_head: int = field(12, "Attention heads; divides n_embd.", FIXED, minimum=1)
    n_kv_head: int | None = field(
        None,
        "Key and value heads; divides n_head (1: multi-query).",
        FIXED,
        minimum=1,
        null_means="as many as n_head",
        example=4,
    )
    n_positions: int = field(
        2048, "Longest sequence the model takes, in tokens.", FIXED, minimum=1, maximum=MOST_POSITIONS
    )
    dropout: float = field(0.0, "Dropout probability.", DECLARED, minimum=0, below=1)
    use_bias: bool = field(False, "Biases in all linear layers, unless a group below says otherwise.", FIXED)
    qkv_bias: bool | None = field(
        None, "Bias of the query, key and value projections.", FIXED, null_means="as use_bias", example=True
    )
    attn_out_bias: bool | None = field(
        None, "Bias of the attention's output projection.", FIXED, null_means="as use_bias", example=True
    )
    mlp_bias: bool | None = field(None, "Biases of the MLP.", FIXED, null_means="as use_bias", example=True)
    activation: Literal["swish", "gelu", "relu"] = field("swish", "The MLP's nonlinearity.", FIXED)
    mlp_type: Literal["gated", "mlp"] = field(
        "gated", "With a gate (SwiGLU, GeGLU, ReGLU by activation) or without.", FIXED
    )
    intermediate_size: int | None = field(
        None,
        "Hidden width of the MLP.",
        FIXED,
        minimum=1,
        maximum=_MOST_ROWS,
        null_means="8/3 of n_embd rounded up to a multiple of 256 if gated, else 4 times n_embd",
        example=2048,
    )
    norm: Literal["rmsnorm", "layernorm"] = field("rmsnorm", "Normalisation before each layer.", FIXED)
    norm_eps: float = field(1e-5, "Added under the root of the normalisation.", FIXED, above=0)
    tie_word_embeddings: bool = field(True, "The output layer shares the embedding's weights.", FIXED)
    rope_base: float = field(10000.0, "Base of the rotary position frequencies.", FIXED, above=0)
    rope_scaling_type: Literal["linear", "ntk", "yarn"] | None = field(
        None, "How rotary positions are stretched.", FIXED, null_means="not at all", example="yarn"
    )
    rope_scaling_factor: float = field(1.0, "How far rotary positions are stretched.", FIXED, above=0)
    attention_mode: Literal["causal", "sdpa_mask", "flex"] = field(
        "causal", "Attention across packed documents (causal), or within each one (sdpa_mask, flex).", FIXED
    )

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with null resolved."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with null resolved."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        if self.mlp_type == "mlp":
            return 4 * self.n_embd
        return -(-8 * self.n_embd // (3 * 256)) * 256

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases, with null resolved."""
        return self.use_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_attn_out_bias(self) -> bool:
        """Whether the attention's output projection has a bias, with null resolved."""
        return self.use_bias if self.attn_out_bias is None else self.attn_out_bias

    @property
    def has_mlp_bias(self) -> bool:
        """Whether the MLP has biases, with null resolved."""
        return self.use_bias if self.mlp_bias is None else self.mlp_bias

    def rows(self, ids: int | None) -> int | None:
        """Rows of the embedding for a tokenizer of so many ids, with null resolved; None where nobody says."""
        if self.vocab_size is not None or ids is None:
            return self.vocab_size
        return -(-ids // _ROWS_MULTIPLE) * _ROWS_MULTIPLE

    def embedding_parameters(self, vocab_size: int) -> int:
        """Parameters of the embedding and, where it is not tied, of the output layer."""
        return vocab_size * self.n_embd * (1 if self.tie_word_embeddings else 2)

    def block_parameters(self) -> int:
        """Parameters of all blocks and the final norm: everything but embedding and output layer."""
        width, hidden = self.n_embd, self.mlp_width
        kv_width = width // self.n_head * self.kv_heads
        norm = width if self.norm == "rmsnorm" else 2 * width
        attention = 2 * width * width + 2 * width * kv_width
        attention += (width + 2 * kv_width) * self.has_qkv_bias + width * self.has_attn_out_bias
        up_projections = 2 if self.mlp_type == "gated" else 1
        mlp = (up_projections + 1) * width * hidden + (up_projections * hidden + width) * self.has_mlp_bias
        return self.n_layer * (2 * norm + attention + mlp) + norm

    def parameters(self, vocab_size: int) -> int:
        """All parameters, tied weights counted once."""
        return self.embedding_parameters(vocab_size) + self.block_parameters()
