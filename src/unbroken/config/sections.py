"""The four sections of a config, field by field: ``model``, ``data``, ``optimizer``, ``training``."""

from dataclasses import dataclass
from typing import Final, Literal

from unbroken.config.fields import ResumeClass, field

FIXED, DECLARED, FREE = ResumeClass.FIXED, ResumeClass.DECLARED, ResumeClass.FREE

# ---- model ----

# GPU matrix products are tiled by this.
_ROWS_MULTIPLE: Final = 128
# Far above any real model: a typo is reported here, before torch fails on a size it cannot allocate.
_WIDEST: Final = 1 << 20
_MOST_ROWS: Final = 1 << 24
MOST_POSITIONS: Final = 1 << 24
_DEEPEST: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int | None = field(
        None,
        "Rows of the embedding; at least the tokenizer's vocabulary size.",
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
    n_positions: int = field(2048, "Context length, in tokens.", FIXED, minimum=1, maximum=MOST_POSITIONS)
    dropout: float = field(0.0, "Dropout probability.", DECLARED, minimum=0, below=1)
    use_bias: bool = field(False, "Biases in all linear layers; the three fields below override it.", FIXED)
    qkv_bias: bool | None = field(
        None, "Bias of the query, key and value projections.", FIXED, null_means="as use_bias", example=True
    )
    attn_out_bias: bool | None = field(
        None, "Bias of the attention's output projection.", FIXED, null_means="as use_bias", example=True
    )
    mlp_bias: bool | None = field(None, "Biases of the MLP.", FIXED, null_means="as use_bias", example=True)
    activation: Literal["swish", "gelu", "relu"] = field("swish", "Activation function of the MLP.", FIXED)
    mlp_type: Literal["gated", "mlp"] = field(
        "gated", "Gated MLP (SwiGLU, GeGLU or ReGLU, by activation) or plain MLP.", FIXED
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
    norm_eps: float = field(1e-5, "Epsilon of the normalisation.", FIXED, above=0)
    tie_word_embeddings: bool = field(True, "The output layer shares the embedding's weights.", FIXED)
    rope_base: float = field(10000.0, "Base of the rotary position frequencies.", FIXED, above=0)
    rope_scaling_type: Literal["linear", "ntk", "yarn"] | None = field(
        None, "RoPE scaling method.", FIXED, null_means="no scaling", example="yarn"
    )
    rope_scaling_factor: float = field(1.0, "RoPE scaling factor.", FIXED, above=0)
    attention_mode: Literal["causal", "sdpa_mask", "flex"] = field(
        "causal", "Attend across packed documents (causal) or within each document (sdpa_mask, flex).", FIXED
    )
    residual_dtype: Literal["fp32"] | None = field(
        None,
        "Precision of the residual stream; products stay in training.mixed_precision.",
        DECLARED,
        null_means="as the products",
        example="fp32",
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
        """Rows of the embedding for a tokenizer with ``ids`` ids, with null resolved; None if neither is known."""
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


# ---- data ----

# More would exhaust the machine's memory before the first step.
_MOST_WORKERS: Final = 1024


@dataclass(frozen=True)
class CurriculumPhase:
    """One phase of the curriculum: a number of tokens, drawn from buckets in proportion to their weights.

    The mix is a tuple of pairs sorted by bucket, so that equal configs compare equal and are hashable.
    """

    duration_tokens: int
    mix: tuple[tuple[str, float], ...]

    @property
    def weights(self) -> dict[str, float]:
        """The mix as fractions that sum to 1."""
        # Scaled by the largest first: the plain sum of two huge weights would overflow to infinity.
        largest = max(weight for _, weight in self.mix)
        total = sum(weight / largest for _, weight in self.mix)
        return {bucket: weight / largest / total for bucket, weight in self.mix}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data, and how documents become sequences."""

    path: str = field(
        "", "Folder with train/ and val/. It may be moved between jobs; its contents must not change.", FREE
    )
    tokenizer: str = field("gpt2", "Tokenizer name or path; bytes is built in and works offline.", FIXED)
    format: Literal["pretokenized", "jsonl"] = field(
        "pretokenized", "Token shards (.bin, .idx), or text tokenized on the fly.", FIXED
    )
    max_length: int = field(
        2048, "Sequence length, in tokens; at most model.n_positions.", FIXED, minimum=2, maximum=MOST_POSITIONS
    )
    overlap_size: int = field(
        256,
        "Tokens shared by adjacent windows of a long document; at most half of max_length; 0: none.",
        FIXED,
        minimum=0,
    )
    packing: bool = field(True, "Pack several documents into one sequence.", FIXED)
    epochs: int | None = field(
        1,
        "Passes over a bucket before it is exhausted.",
        DECLARED,
        minimum=1,
        null_means="unlimited",
        example=4,
    )
    check: Literal["quick", "full", "read"] = field(
        "read",
        "Verify each sequence as it is read (read), all bytes at start (full), or sizes and indexes (quick).",
        FREE,
    )
    cache_dir: str | None = field(
        None,
        "Directory for packing plans and checksums.",
        FREE,
        null_means=".unbroken in data.path",
        example="/scratch/plans",
    )
    num_workers: int = field(
        4,
        "Worker processes per rank that prepare batches; 0: in the trainer process.",
        FREE,
        minimum=0,
        maximum=_MOST_WORKERS,
    )
    curriculum: tuple[CurriculumPhase, ...] | None = field(
        None,
        "Phases, each with duration_tokens and a mix of bucket weights.",
        FIXED,
        null_means="one phase over all data",
        example="[{duration_tokens: 5_000_000_000, mix: {web: 0.8, code: 0.2}}]",
    )
    allow_bucket_exhaustion: bool = field(
        False, "When a bucket is exhausted, continue with the others in proportion instead of halting.", FREE
    )
    allow_budget_mismatch: bool = field(
        False, "Allow a curriculum whose length differs from the tokens that max_steps reads.", FREE
    )


# ---- optimizer ----


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the learning rate schedule."""

    learning_rate: float = field(3e-4, "Peak learning rate, reached at the end of warmup.", DECLARED, above=0)
    weight_decay: float = field(0.1, "Decoupled weight decay; applied to matrices only.", DECLARED, minimum=0)
    beta1: float = field(0.9, "AdamW beta1.", DECLARED, minimum=0, below=1)
    beta2: float = field(0.95, "AdamW beta2.", DECLARED, minimum=0, below=1)
    eps: float = field(1e-8, "AdamW epsilon.", DECLARED, above=0)
    max_grad_norm: float | None = field(
        1.0, "Clip gradients to this norm.", DECLARED, above=0, null_means="no clipping"
    )
    schedule: Literal["cosine", "linear", "wsd"] = field(
        "cosine", "Learning rate schedule after warmup: cosine, linear, or constant and then linear (wsd).", DECLARED
    )
    warmup_steps: int = field(
        100, "Steps of linear warmup from zero; fewer than training.max_steps.", DECLARED, minimum=0
    )
    decay_steps: int | None = field(
        None,
        "Steps of decay from the peak to the minimum.",
        DECLARED,
        minimum=1,
        null_means="all steps after the warmup; with wsd the last tenth of the run",
        example=10000,
    )
    min_lr_ratio: float = field(0.1, "Final learning rate as a fraction of the peak.", DECLARED, minimum=0, maximum=1)

    def resolved_decay_steps(self, max_steps: int) -> int:
        """Steps of the decay, with null resolved."""
        if self.decay_steps is not None:
            return self.decay_steps
        after_warmup = max(1, max_steps - self.warmup_steps)
        return min(after_warmup, max(1, max_steps // 10)) if self.schedule == "wsd" else after_warmup


# ---- training ----

# Samples are counted in 63 bits over all steps; these limits leave room.
_LARGEST_LANE: Final = 1 << 20
_LARGEST_BATCH: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch size, length of the run, checkpoints, stopping, precision."""

    per_device_batch_size: int = field(
        4, "Micro-batch size: sequences in one lane.", FIXED, minimum=1, maximum=_LARGEST_LANE
    )
    gradient_accumulation_steps: int = field(
        4,
        "Lanes per rank and step in the first job; later jobs derive it from the global batch size.",
        FIXED,
        minimum=1,
        maximum=_LARGEST_LANE,
    )
    global_batch_size: int | None = field(
        None,
        "Sequences per step, on any world size; a multiple of per_device_batch_size.",
        FIXED,
        minimum=1,
        maximum=_LARGEST_BATCH,
        null_means="per_device_batch_size x gradient_accumulation_steps x ranks of the first job",
        example=512,
    )
    max_steps: int = field(1000, "Length of the run, in optimizer steps.", DECLARED, minimum=1)
    seed: int = field(42, "Seed for initialisation, data order and dropout.", FIXED, minimum=0)
    exact: bool = field(
        True, "Compute the same bits on any number of ranks; false: PyTorch's own reductions.", DECLARED
    )
    mixed_precision: Literal["bf16", "fp16", "no"] | None = field(
        None, "Precision of the forward pass.", DECLARED, null_means="bf16 if the device supports it", example="bf16"
    )
    sharding: Literal["replicated", "fsdp2"] = field(
        "replicated", "Every rank holds the whole model (replicated) or a shard (fsdp2).", FREE
    )
    gradient_checkpointing: bool | int = field(
        True,
        "Recompute activations in the backward pass: true (all blocks), false, or every n-th block.",
        DECLARED,
        minimum=1,
    )
    compile: bool = field(True, "Compile the model with torch.compile.", DECLARED)
    non_finite: Literal["stop", "skip"] = field(
        "stop", "When the loss or a gradient is NaN or infinite: stop the job, or skip the step and count it.", DECLARED
    )

    ema_decay: float | None = field(
        None,
        "Decay of an exponential moving average (EMA) of the weights.",
        DECLARED,
        above=0,
        below=1,
        null_means="no EMA",
        example=0.999,
    )

    logging_steps: int = field(10, "Steps between log lines.", FREE, minimum=1)
    eval_steps: int | None = field(
        500, "Steps between evaluations on val/.", FREE, minimum=1, null_means="no evaluation"
    )
    max_eval_batches: int | None = field(
        None, "Batches per evaluation.", FREE, minimum=1, null_means="all of val/", example=100
    )

    output_dir: str = field("./outputs", "Run directory.", FREE)
    resume: str = field(
        "auto", "auto (newest usable checkpoint, or start), scratch, or a checkpoint to go back to, once.", FREE
    )
    load_path: str | None = field(
        None,
        "Checkpoint of another run or tool to start from; ignored once this run has its own.",
        FREE,
        null_means="newly initialised weights",
        example="runs/a",
    )

    save_steps: int | Literal["auto"] = field(
        "auto", "Steps between checkpoints; auto: from the measured save cost and failure rate.", FREE, minimum=1
    )
    keep_last_k: int | None = field(3, "Newest checkpoints to keep.", FREE, minimum=1, null_means="keep all")
    keep_milestone_every: int | None = field(
        None,
        "Keep every checkpoint whose step is a multiple of this.",
        FREE,
        minimum=1,
        null_means="no milestones",
        example=10000,
    )
    keep_every_seconds: float | None = field(
        None,
        "Keep one checkpoint per this many seconds.",
        FREE,
        above=0,
        null_means="no time-based keeping",
        example=3600.0,
    )
    keep_best: str | None = field(
        None,
        "Keep the best checkpoint by loss, grad_norm, val_loss or ema_val_loss: name:min or name:max.",
        FREE,
        null_means="no best checkpoint",
        example="val_loss:min",
    )

    checkpoints: str | None = field(
        None,
        "Save straight to an object store (s3://, gs://, az://, file:///) and resume from there.",
        FREE,
        null_means="save in output_dir",
        example="s3://bucket/runs/a",
    )
    mirror: str | None = field(
        None,
        "Second stores for every checkpoint: s3://, gs://, az:// or file:/// addresses, separated by commas.",
        FREE,
        null_means="no mirror",
        example="s3://bucket/runs/a",
    )
    mirror_memory_bytes: int = field(
        256 << 20, "Bytes that uploads to mirrors may hold in memory.", FREE, minimum=48 << 20
    )
    mirror_bytes_per_second: float | None = field(
        None,
        "Bandwidth of uploads to each mirror.",
        FREE,
        above=0,
        null_means="as fast as possible",
        example=50000000.0,
    )
    mirror_wait_seconds: float = field(300.0, "How long a job that ends waits for uploads to mirrors.", FREE, minimum=0)

    max_runtime_seconds: float | None = field(
        None,
        "Walltime of one job.",
        FREE,
        above=0,
        null_means="the scheduler's limit, if it sets one",
        example=72000.0,
    )
    walltime_reserve_seconds: float | None = field(
        None,
        "Stop this many seconds before the walltime ends.",
        FREE,
        minimum=0,
        null_means="learned from measured save times",
        example=300.0,
    )

    spot: Literal["aws", "gcp", "azure", "auto", "off"] | None = field(
        None,
        "Save and stop when this cloud reclaims the machine; auto: detected from the firmware.",
        FREE,
        null_means="UNBROKEN_SPOT, else none",
        example="auto",
    )

    grace_seconds: float | None = field(
        None,
        "Seconds between a signal and the kill. If too few for a save, each rank dumps to emergency_dir.",
        FREE,
        minimum=0,
        null_means="every stop saves",
        example=30.0,
    )
    emergency_dir: str | None = field(
        None,
        "Directory on a fast local disk of each host, for emergency dumps when there is no time for a save.",
        FREE,
        null_means="no emergency dumps",
        example="/scratch/unbroken",
    )
    persistent_dir: str | None = field(
        None,
        "Directory that all hosts share; dumps are copied there, so that another host can resume.",
        FREE,
        null_means="a dump can be used only on the host that wrote it",
        example="/shared/unbroken",
    )

    wandb_project: str | None = field(
        None,
        "Weights & Biases project: the same as wandb:PROJECT in trackers.",
        FREE,
        null_means="not asked for",
        example="my-project",
    )
    wandb_run_name: str | None = field(
        None, "Run name in the trackers.", FREE, null_means="the name of output_dir", example="my-run"
    )
    trackers: str | None = field(
        None,
        "Trackers: wandb, trackio, tensorboard, mlflow, with or without :PROJECT, separated by commas.",
        FREE,
        null_means="no tracker but wandb_project",
        example="tensorboard",
    )
    tracker_mode: Literal["live", "committed"] = field(
        "live", "live: steps are sent as they are logged; committed: when a checkpoint has committed them.", FREE
    )
