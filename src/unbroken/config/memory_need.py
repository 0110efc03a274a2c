"""How much memory a rank needs to train a config, by counting: no device is looked at.

Counted is what lives at the widest moment of a step: weights, their copies in the type that is computed in, their
average, sums of gradients, moments of the optimizer, activations of one lane, and one chunk of logits. Not counted is
what the device's own libraries take and what an allocator leaves between pieces. A compiler keeps fewer activations
than counted here.
"""

from dataclasses import dataclass
from typing import Final

from unbroken.config.document import Config
from unbroken.config.sections import ModelConfig

FULL_BYTES: Final = 4
# As the loss has them on a GPU.
CHUNK_LOGITS: Final = 1 << 29
# Gradients on their way between ranks: three buckets there and back.
_BUCKET_BYTES: Final = 25 << 20
_BUFFERS: Final = 6


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by what they are for; the activations as the config has them, and both other ways."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    logits: int
    activations_kept: int
    activations_recomputed: int

    @property
    def total(self) -> int:
        """All of it at once."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + self.logits


def estimate(config: Config, vocab_size: int, world: int) -> Memory:
    """The memory of one rank of a world."""
    model, training = config.model, config.training
    parameters = model.parameters(vocab_size)
    compute = compute_bytes(config)
    sharded = training.sharding == "fsdp2" and world > 1
    share = -(-parameters // world) if sharded else parameters
    lowered = compute != FULL_BYTES
    if sharded:
        # The embedding is whole from the first use to the last; of the blocks, the one at work and the next.
        whole = model.embedding_parameters(vocab_size) + 2 * block_parameters(model)
        weights = FULL_BYTES * share + compute * whole
        gradients = FULL_BYTES * share + compute * whole
    else:
        weights = FULL_BYTES * parameters + (compute * parameters if lowered else 0)
        gradients = FULL_BYTES * parameters
        if world > 1:
            # The own slice of the sum beside the whole of it, and buckets under way.
            gradients += FULL_BYTES * -(-parameters // world) + min(_BUFFERS * _BUCKET_BYTES, 2 * compute * parameters)
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=2 * FULL_BYTES * share,
        average=0 if training.ema_decay is None else FULL_BYTES * share,
        activations=activations(config, int(training.gradient_checkpointing)),
        logits=logits(config, vocab_size),
        activations_kept=activations(config, 0),
        activations_recomputed=activations(config, 1),
    )


def compute_bytes(config: Config) -> int:
    """Bytes of a number in the forward pass; where the device decides, those of a GPU."""
    return FULL_BYTES if config.training.mixed_precision == "no" else 2


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one block."""
    norm = model.n_embd if model.norm == "rmsnorm" else 2 * model.n_embd
    return (model.block_parameters() - norm) // model.n_layer


def activations(config: Config, every: int, *, is_fused: bool = True) -> int:
    """Activations of one lane at the end of the forward pass, where every n-th block is recomputed; 0: none is.

    ``is_fused`` is a GPU, whose gated MLP keeps gate and up alone.
    """
    model, tokens = config.model, _lane_tokens(config)
    compute = compute_bytes(config)
    recomputed = 0 if every == 0 else -(-model.n_layer // every)
    stream = compute * model.n_embd * tokens
    one_block = block_activations(config, is_fused=is_fused)
    # What a recomputed block keeps is its input; in its turn, in the backward pass, it is there whole.
    blocks = (model.n_layer - recomputed) * one_block + recomputed * stream + (one_block if recomputed else 0)
    last_norm = (FULL_BYTES + compute) * model.n_embd * tokens
    return blocks + last_norm + (stream if model.dropout else 0)


def block_activations(config: Config, *, is_fused: bool = True) -> int:
    """What one block keeps for the backward pass of one lane."""
    model, compute = config.model, compute_bytes(config)
    width, hidden = model.n_embd, model.mlp_width
    kv_width = width // model.n_head * model.kv_heads
    # A norm: its input in full width, what is scaled, and its output for the next layer.
    norms = 2 * width * (FULL_BYTES + 2 * compute)
    # Query, key, value and what attention makes of them, with a number per head for its backward.
    attention = compute * (2 * width + 2 * kv_width) + FULL_BYTES * model.n_head
    # Gate and up, and unfused the factors of their product too; without a gate, the sum and its nonlinearity.
    mlp = compute * hidden * (4 if model.mlp_type == "gated" and not is_fused else 2)
    dropout = 2 * compute * width if model.dropout else 0
    return (norms + attention + mlp + dropout) * _lane_tokens(config)


def logits(config: Config, vocab_size: int) -> int:
    """The largest chunk of logits, the gradient of the output weights, and that of what went into them."""
    compute, tokens, width = compute_bytes(config), _lane_tokens(config), config.model.n_embd
    chunk = min(CHUNK_LOGITS, tokens * vocab_size)
    return compute * chunk + FULL_BYTES * vocab_size * width + compute * tokens * width


def _lane_tokens(config: Config) -> int:
    return config.training.per_device_batch_size * config.data.max_length
