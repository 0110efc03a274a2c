"""Estimates the memory a rank needs to train a config, without a device.

Counts what is allocated at the peak of a step: weights, their copies in the compute dtype, their EMA, gradient sums,
optimizer moments, activations of one lane, and one chunk of logits. Does not count the memory of CUDA libraries or
allocator fragmentation. A compiled model keeps fewer activations than counted here.
"""

from dataclasses import dataclass
from typing import Final

from unbroken.config.document import Config
from unbroken.config.sections import ModelConfig

FULL_BYTES: Final = 4
# The chunk size of the loss on a GPU.
CHUNK_LOGITS: Final = 1 << 29
# Gradients in flight between ranks: three buckets in each direction.
_BUCKET_BYTES: Final = 25 << 20
_BUFFERS: Final = 6


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, by use. Activations: as configured, all kept, and all recomputed."""

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
        """The sum."""
        return self.weights + self.gradients + self.optimizer + self.average + self.activations + self.logits


def estimate(config: Config, vocab_size: int, world: int) -> Memory:
    """The memory of one rank."""
    model, training = config.model, config.training
    parameters = model.parameters(vocab_size)
    compute = compute_bytes(config)
    sharded = training.sharding == "fsdp2" and world > 1
    share = -(-parameters // world) if sharded else parameters
    lowered = compute != FULL_BYTES
    if sharded:
        # Gathered at a time: the embedding, the current block and the next one.
        whole = model.embedding_parameters(vocab_size) + 2 * block_parameters(model)
        weights = FULL_BYTES * share + compute * whole
        gradients = FULL_BYTES * share + compute * whole
    else:
        weights = FULL_BYTES * parameters + (compute * parameters if lowered else 0)
        gradients = FULL_BYTES * parameters
        if world > 1:
            # This rank's slice of the sum beside the whole of it, and buckets in flight.
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
    """Bytes per number in the forward pass; where the device decides, those of a GPU."""
    return FULL_BYTES if config.training.mixed_precision == "no" else 2


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one block."""
    norm = model.n_embd if model.norm == "rmsnorm" else 2 * model.n_embd
    return (model.block_parameters() - norm) // model.n_layer


def activations(config: Config, every: int, *, is_fused: bool = True) -> int:
    """Activations of one lane at the end of the forward pass, if every n-th block is recomputed (0: none).

    ``is_fused``: on a GPU the gated MLP keeps only gate and up.
    """
    model, tokens = config.model, _lane_tokens(config)
    compute = compute_bytes(config)
    recomputed = 0 if every == 0 else -(-model.n_layer // every)
    stream = (compute if model.residual_dtype is None else FULL_BYTES) * model.n_embd * tokens
    one_block = block_activations(config, is_fused=is_fused)
    # A recomputed block keeps its input; during its own backward it keeps everything.
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
