"""Small runs of the trainer's kind, saved without training: a config, a tokenizer, checkpoints with given weights."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from unbroken.config import Config, DataConfig, ModelConfig, TrainingConfig
from unbroken.data.ingest.encoders import TokenizerFile, find_tokenizer, load_encoder
from unbroken.gpt.average import WeightAverage
from unbroken.gpt.build import initialize
from unbroken.gpt.model import GPT
from unbroken.loop.run import Run
from unbroken.loop.settings import Settings

CONFIG = ModelConfig(n_embd=32, n_layer=2, n_head=2, n_positions=48)
TEXT = (
    "def first(numbers):\n    return sorted(numbers)[0]\n\nclass Many:\n    def __init__(self):\n        self.n = 0\n"
)


def model_with(rows: int, config: ModelConfig = CONFIG, seed: int = 7) -> GPT:
    model = GPT(config, rows)
    initialize(model, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger, so that attention matters and texts differ.
            parameter.mul_(4)
    return model


def save_run(
    run: Path,
    *,
    tokenizer: str = "bytes",
    steps: int = 2,
    config: ModelConfig = CONFIG,
    keeps_tokenizer: bool = True,
    rows: int | None = None,
    seed: int = 7,
) -> GPT:
    """A run with a checkpoint after every step; returns the model as the last one has it."""
    file = find_tokenizer(tokenizer)
    identity = load_encoder(file).identity
    model = model_with(rows or -(-identity.vocab_size // 128) * 128, config, seed)
    with Run(run, settings=Settings(save_steps=1, keep_last_k=None), model=model) as saved:
        for _ in saved.steps(steps):
            with torch.no_grad():
                model.norm.weight.add_(0.25)
    described = Config(
        model=config,
        data=DataConfig(path="data", tokenizer=tokenizer, max_length=48, overlap_size=4),
        training=TrainingConfig(output_dir=str(run)),
    )
    (run / "config.json").write_text(described.settled(1).to_json())
    if keeps_tokenizer:
        _keep(run / "tokenizer", file)
    return model.eval()


def save_averaged(run: Path) -> dict[str, torch.Tensor]:
    """A run that keeps an average of its weights, far from them; returns it."""
    model = save_run(run, steps=1)
    average = WeightAverage(model, 0.5)
    settings = Settings(save_steps=1, keep_last_k=None, accept=("ema",))
    with Run(run, settings=settings, model=model, ema=average) as saved:
        for _ in saved.steps(2):
            with torch.no_grad():
                model.norm.weight.add_(1.0)
            average.update()
    return dict(average.state_dict())


def _keep(folder: Path, file: TokenizerFile) -> None:
    folder.mkdir()
    if file.content is not None:
        (folder / "tokenizer.json").write_bytes(file.content)
    identity = replace(load_encoder(file).identity, name=file.name)
    (folder / "identity.json").write_text(json.dumps(asdict(identity)))


def train_bpe(folder: Path, vocab_size: int = 300, text: str = TEXT) -> Path:
    """A tokenizer of one's own; returns its file."""
    from unbroken.data.ingest.train_tokenizer import train_tokenizer

    (folder / "words").mkdir(parents=True)
    (folder / "words" / "a.txt").write_text(text)
    train_tokenizer(folder / "words", folder / "tokenizer.json", vocab_size=vocab_size)
    return folder / "tokenizer.json"


def damage(checkpoint: Path) -> Path:
    """Turn one byte of the weights over, and leave names and sizes as they are."""
    part = max((checkpoint / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 0xFF
    part.chmod(0o644)
    part.write_bytes(bytes(data))
    return part
