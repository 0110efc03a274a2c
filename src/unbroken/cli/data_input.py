"""The input of the data commands: a data directory, or the data section of a config."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from unbroken.cli.arguments import DiskPath
from unbroken.cli.output import Output
from unbroken.config import Config, DataConfig
from unbroken.config.reading import load
from unbroken.data.corpus.catalogue import Corpus
from unbroken.data.from_config import corpus_of, phases_of, stream_of
from unbroken.data.packing.windows import MOST_TOKENS
from unbroken.data.stream import Stream
from unbroken.errors import BadUsage, TokenizersDiffer

BYTE_MAX: Final = 255


@dataclass(frozen=True)
class Input:
    """A config, read or built from a directory and options, and its corpus."""

    config: Config
    corpus: Corpus
    is_config: bool

    def stream(self, output: Output) -> Stream:
        """The samples of a run; packing plans that are not cached are computed, with a progress bar."""
        documents = sum(bucket.entries for bucket in self.corpus.buckets)
        with output.progress("plan", documents) as advance:
            return stream_of(self.config, self.corpus, phases=phases_of(self.config.data), progress=advance)


def window_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options on how documents are cut into sequences."""
    for option in (
        click.option(
            "--cache-dir",
            type=DiskPath(),
            metavar="DIR",
            help="Cache of packing plans; default: DIR/.unbroken.",
        ),
        click.option(
            "--seed",
            type=click.IntRange(0),
            metavar="N",
            help="Seed of the sample order; default: the config's, or 42.",
        ),
        click.option("--no-packing", is_flag=True, help="Put one document into each sequence."),
        click.option(
            "--overlap-size",
            type=click.IntRange(0),
            metavar="N",
            help="Tokens shared by two windows; default: the config's, or 256.",
        ),
        click.option(
            "--max-length",
            type=click.IntRange(2, MOST_TOKENS),
            metavar="N",
            help="Tokens per sequence; default: the config's, or 2048.",
        ),
        click.option("--split", default="train", metavar="NAME", help="Subdirectory of the data."),
        click.option(
            "--config",
            "config_path",
            type=DiskPath(),
            metavar="FILE",
            help="Config of a run, instead of DIR.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True)
class DataArguments:
    """The arguments of a data command."""

    command: str
    directory: Path | None
    config_path: Path | None
    split: str
    max_length: int | None
    overlap_size: int | None
    no_packing: bool
    seed: int | None
    cache_dir: Path | None

    def open(self) -> Input:
        """Open the corpus.

        Raises:
            BadUsage: neither directory nor config is given, or both, or the lengths are impossible.
            DataError: the data is missing, damaged or incomplete.
        """
        config = self._config()
        return Input(config, corpus_of(config.data, self.split), self.config_path is not None)

    def _config(self) -> Config:
        if (self.directory is None) == (self.config_path is None):
            raise BadUsage(command=self.command, complaint="give either DIR or --config FILE")
        if self.config_path is not None:
            config = load(self.config_path).config
        else:
            config = Config(data=DataConfig(path=str(self.directory)))
        max_length = self.max_length or config.data.max_length
        overlap = self.overlap_size
        if overlap is None:
            # With --max-length alone the overlap is kept if it fits.
            overlap = min(config.data.overlap_size, max_length // 8 if self.max_length else max_length // 2)
        if 2 * overlap > max_length:
            complaint = f"--overlap-size {overlap} is more than half of --max-length {max_length}"
            raise BadUsage(command=self.command, complaint=complaint)
        data = replace(
            config.data,
            max_length=max_length,
            overlap_size=overlap,
            packing=config.data.packing and not self.no_packing,
            check="quick",
            cache_dir=config.data.cache_dir if self.cache_dir is None else str(self.cache_dir),
        )
        training = config.training if self.seed is None else replace(config.training, seed=self.seed)
        return replace(config, data=data, training=training)


Decode = Callable[[list[int]], str]


def decoder_of(corpus: Corpus, named: str | None) -> Decode | None:
    """The function that decodes token ids; None if the tokenizer is unknown.

    Raises:
        TokenizerUnknown: the named tokenizer does not exist.
        TokenizersDiffer: the shards were written with another tokenizer.
    """
    from unbroken.data.ingest.encoders import BYTES, find_tokenizer, load_encoder

    made_by = corpus.tokenizer
    asked = named or (BYTES if made_by and made_by.name == BYTES else None)
    if asked is None:
        return None
    file = find_tokenizer(asked)
    identity = load_encoder(file).identity
    if made_by is not None and made_by.digest != identity.digest:
        found = ((each.name, f"{each.vocab_size:,} ids, {each.digest}") for each in (made_by, identity))
        raise TokenizersDiffer(path=corpus.root, found=tuple(found), is_asked=True)
    if file.content is None:
        return lambda ids: bytes(each for each in ids if each <= BYTE_MAX).decode(errors="replace")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(file.content.decode())
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))
