"""The section ``training``: batch, length, saving, keeping, stopping, precision."""

from dataclasses import dataclass
from typing import Final, Literal

from unbroken.config.fields import ResumeClass, field

FIXED, DECLARED, FREE = ResumeClass.FIXED, ResumeClass.DECLARED, ResumeClass.FREE
# Samples are counted in 63 bits over all steps; no step comes near these.
_LARGEST_LANE: Final = 1 << 20
_LARGEST_BATCH: Final = 1 << 31


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a run is trained, saved and stopped."""

    per_device_batch_size: int = field(
        4, "Sequences in one lane, the micro-batch of fixed shape.", FIXED, minimum=1, maximum=_LARGEST_LANE
    )
    gradient_accumulation_steps: int = field(
        4,
        "Lanes per rank and step when the run starts; later jobs derive it from the global batch.",
        FIXED,
        minimum=1,
        maximum=_LARGEST_LANE,
    )
    global_batch_size: int | None = field(
        None,
        "Sequences per step on any world size; a multiple of per_device_batch_size.",
        FIXED,
        minimum=1,
        maximum=_LARGEST_BATCH,
        null_means="per_device_batch_size x gradient_accumulation_steps x ranks of the first job",
        example=512,
    )
    max_steps: int = field(1000, "Steps after which the run is complete.", DECLARED, minimum=1)
    seed: int = field(42, "Seed of initialisation, data order and dropout.", FIXED, minimum=0)
    exact: bool = field(True, "The same bits on any number of ranks; false uses stock reductions.", DECLARED)
    mixed_precision: Literal["bf16", "fp16", "no"] | None = field(
        None, "Precision of the forward pass.", DECLARED, null_means="bf16 where the device has it", example="bf16"
    )
    sharding: Literal["replicated", "fsdp2"] = field("replicated", "Every rank holds the model, or a shard.", FREE)
    gradient_checkpointing: bool | int = field(
        True, "Recompute activations in the backward pass: all blocks, none, or every n-th.", DECLARED, minimum=1
    )
    compile: bool = field(True, "Compile the model with torch.compile.", DECLARED)
    non_finite: Literal["stop", "skip"] = field(
        "stop", "At a loss or gradient that is not finite: end the job, or skip the step and count it.", DECLARED
    )

    ema_decay: float | None = field(
        None,
        "Keep an exponential moving average of the weights, which keeps this share of itself at every step.",
        DECLARED,
        above=0,
        below=1,
        null_means="no average",
        example=0.999,
    )

    logging_steps: int = field(10, "Steps between two log lines.", FREE, minimum=1)
    eval_steps: int | None = field(
        500, "Steps between two evaluations on val/.", FREE, minimum=1, null_means="no evaluation"
    )
    max_eval_batches: int | None = field(
        None, "Batches per evaluation.", FREE, minimum=1, null_means="all of val/", example=100
    )

    output_dir: str = field("./outputs", "The run's directory.", FREE)
    resume: str = field("auto", "auto (newest usable checkpoint, or a fresh start), scratch, or a path.", FREE)
    load_path: str | None = field(
        None,
        "Checkpoint of another run to start from; ignored once this run has its own.",
        FREE,
        null_means="start from fresh weights",
        example="runs/a",
    )

    save_steps: int | Literal["auto"] = field(
        "auto", "Steps between two checkpoints; auto: by measured save cost and failure rate.", FREE, minimum=1
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
        None, "Keep one checkpoint per this many seconds.", FREE, above=0, null_means="none by time", example=3600.0
    )
    keep_best: str | None = field(
        None,
        "Keep the best checkpoint by loss, grad_norm, val_loss or ema_val_loss: name:min or name:max.",
        FREE,
        null_means="none by metric",
        example="val_loss:min",
    )

    max_runtime_seconds: float | None = field(
        None,
        "Wall time of one job.",
        FREE,
        above=0,
        null_means="the scheduler's limit where it tells one",
        example=72000.0,
    )
    walltime_reserve_seconds: float | None = field(
        None,
        "Stop this long before the wall time ends.",
        FREE,
        minimum=0,
        null_means="learned from measured save times",
        example=300.0,
    )

    spot: Literal["aws", "gcp", "azure", "auto", "off"] | None = field(
        None,
        "Save and stop when this cloud takes the machine away; auto: the cloud that the firmware names.",
        FREE,
        null_means="UNBROKEN_SPOT, else none",
        example="auto",
    )

    grace_seconds: float | None = field(
        None,
        "Seconds between a signal and the kill; too few for a save, they make a dump in emergency_dir.",
        FREE,
        minimum=0,
        null_means="as long as a save takes",
        example=30.0,
    )
    emergency_dir: str | None = field(
        None,
        "Directory on a fast disk of each host, for what a rank saves alone when there is no time for more.",
        FREE,
        null_means="no emergency saves",
        example="/scratch/unbroken",
    )
    persistent_dir: str | None = field(
        None,
        "Directory that every host sees; emergency saves are copied there, so that another host can resume.",
        FREE,
        null_means="they count on the host that wrote them",
        example="/shared/unbroken",
    )

    wandb_project: str | None = field(
        None, "Weights & Biases project.", FREE, null_means="no such tracker", example="my-project"
    )
    wandb_run_name: str | None = field(
        None, "Weights & Biases run name.", FREE, null_means="named by the tracker", example="my-run"
    )
