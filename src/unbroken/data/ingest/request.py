"""The request for a tokenization: what to read, where to write, and the options; without numpy, for ``--help``."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from unbroken.errors.tree import quoted

PATIENCE_S: Final = 10.0


@dataclass(frozen=True)
class TokenizeOptions:
    """The options that decide the bytes of the shards, besides documents and tokenizer."""

    text_field: str = "text"
    min_text_length: int = 0
    shard_tokens: int = 1 << 25
    val_fraction: str | None = None
    max_length: int | None = None
    overlap_size: int | None = None
    overlap_probability: str | None = None


_DEFAULTS: Final = TokenizeOptions()


@dataclass(frozen=True)
class TokenizeRequest:
    """What to tokenize, where to, and how.

    Attributes:
        input_dir: folder of text files, with all its subfolders.
        output_dir: folder for the shards; created if missing.
        tokenizer: a ``tokenizer.json``, a folder with one, a name on the Hugging Face Hub, or ``bytes``.
        options: what decides the bytes of the shards.
        eod_token: token that ends a document; by default detected from the tokenizer.
        num_workers: number of processes; 0: in this process.
        accelerate: use a faster engine if there is one.
        skip_bad: skip and count documents that cannot be read, instead of failing.
        add: tokenize files that were added after the shards were finished.
        patience_seconds: how long to wait for another process that tokenizes into the same folder.
    """

    input_dir: Path
    output_dir: Path
    tokenizer: str
    options: TokenizeOptions = _DEFAULTS
    eod_token: str | None = None
    num_workers: int = 0
    accelerate: bool = True
    skip_bad: bool = False
    add: bool = False
    patience_seconds: float = PATIENCE_S

    def command(self) -> str:
        """The command line for the same shards."""
        given = {
            "input-dir": self.input_dir,
            "output-dir": self.output_dir,
            "tokenizer-path": self.tokenizer,
            "eod-token": self.eod_token,
        }
        given |= {
            each.name.replace("_", "-"): getattr(self.options, each.name)
            for each in fields(TokenizeOptions)
            if getattr(self.options, each.name) != getattr(_DEFAULTS, each.name)
        }
        words = [f"--{name} {quoted(str(value))}" for name, value in given.items() if value is not None]
        words += ["--bake-windows"] if self.options.max_length else []
        words += ["--probabilistic-overlap"] if self.options.overlap_probability else []
        return " ".join(["unbroken tokenize", *words])
