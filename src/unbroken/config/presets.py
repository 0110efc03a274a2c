"""Configs to start from, by size. ``tiny`` trains in seconds on two CPU cores; the others are common GPT shapes."""

from typing import Final

from unbroken.config.document import Config
from unbroken.config.sections import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

PRESETS: Final = {
    "tiny": "about a million parameters, byte tokenizer, seconds on two CPU cores",
    "small": "about 125 million parameters",
    "medium": "about 350 million parameters",
    "large": "about 1.3 billion parameters",
}
"""The presets: name and description."""
DATA_PATH: Final = "data"


def preset(name: str) -> Config:
    """The config of a preset.

    Raises:
        KeyError: there is no such preset.
    """
    if name == "tiny":
        return _tiny()
    n_embd, n_layer, n_head = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (2048, 24, 32)}[name]
    return Config(
        model=ModelConfig(n_embd=n_embd, n_layer=n_layer, n_head=n_head),
        data=DataConfig(path=DATA_PATH),
    )


def _tiny() -> Config:
    return Config(
        model=ModelConfig(vocab_size=384, n_embd=128, n_layer=4, n_head=4, n_positions=128),
        data=DataConfig(path=DATA_PATH, tokenizer="bytes", max_length=128, overlap_size=16, num_workers=0),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20),
        training=TrainingConfig(
            gradient_accumulation_steps=2,
            max_steps=200,
            mixed_precision="no",
            gradient_checkpointing=False,
            compile=False,
            eval_steps=50,
            output_dir="runs/tiny",
        ),
    )
