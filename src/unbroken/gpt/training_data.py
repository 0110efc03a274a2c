"""The data of a training run: streams, loader and tokenizer, opened on rank 0 first and then on all ranks.

Rank 0 does what must be done once (tokenizes text, builds packing plans) and checks that config and data fit; the other
ranks find the result in the cache.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.config import Config
from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.data.forecast import Forecast, forecast
from unbroken.data.from_config import corpus_of, phases_of, stream_of
from unbroken.data.ingest.encoders import TokenizerFile, find_tokenizer, load_encoder
from unbroken.data.loader import Loader
from unbroken.data.stream import Stream
from unbroken.errors import (
    ConfigInvalid,
    DataMissing,
    NoEodToken,
    PackageMissing,
    Problem,
    TokenizerUnknown,
    TooManyRanks,
)
from unbroken.quoting.log import logger
from unbroken.world import World

_log = logger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """The streams of a run, and what its ids mean."""

    train: Stream
    validation: Stream | None
    vocab_size: int
    tokenizer: TokenizerIdentity | None
    tokenizer_file: TokenizerFile | None


def open_data(config: Config, world: World) -> TrainingData:
    """Open all data of a run. Collective.

    Raises:
        TooManyRanks: a step has fewer lanes than there are ranks.
        DataUnfit: config and data do not fit; it lists all problems.
        DataError: the data is missing, damaged or unfinished.
        ConfigInvalid: the vocabulary size is unknown.
        StorageFailed: an I/O error while reading, or writing the cache.
    """
    lanes = config.lanes()
    if world.size > lanes:
        raise TooManyRanks(ranks=world.size, lanes=lanes)
    found = world.from_first(lambda: _forecast(config, world.size))
    for warning in found.warnings if world.is_first else ():
        _log.warning("data: %s", warning)
    return world.all_or_none(lambda: _open(config))


def make_loader(config: Config, stream: Stream, world: World) -> Loader:
    """One rank's lanes of every step."""
    return Loader(
        stream,
        global_batch_size=config.global_batch_size(1),
        per_device_batch_size=config.training.per_device_batch_size,
        rank=world.rank,
        world_size=world.size,
        num_workers=config.data.num_workers,
    )


def _forecast(config: Config, world: int) -> Forecast:
    path = Path(config.data.path)
    if not path.is_dir():
        raise DataMissing(path=path, lacks="the folder that data.path names does not exist")
    found = forecast(config, world)
    found.require_fit()
    return found


def _open(config: Config) -> TrainingData:
    train = stream_of(config, corpus_of(config.data), phases=phases_of(config.data))
    file, identity = _tokenizer(config, train.corpus.tokenizer)
    return TrainingData(train, _validation(config), _rows(config, identity), identity, file)


def _validation(config: Config) -> Stream | None:
    """All of val/ once, in order; None if there is no evaluation."""
    if config.training.eval_steps is None or not Path(config.data.path, "val").is_dir():
        return None
    return validation_stream(config)


def validation_stream(config: Config) -> Stream:
    """All of val/ once, whatever the config says about training.

    Raises:
        DataError: it is missing, damaged or unfinished.
        StorageFailed: an I/O error while reading, or writing the cache.
    """
    data = replace(config.data, epochs=1, curriculum=None, allow_bucket_exhaustion=True)
    return stream_of(replace(config, data=data), corpus_of(data, "val"))


def _tokenizer(
    config: Config, made_by: TokenizerIdentity | None
) -> tuple[TokenizerFile | None, TokenizerIdentity | None]:
    """The tokenizer's file and identity, as far as known."""
    try:
        file = find_tokenizer(config.data.tokenizer)
        return file, made_by or load_encoder(file).identity
    except (TokenizerUnknown, PackageMissing, NoEodToken) as unknown:
        # Training on shards works without it; only generating text needs it.
        _log.warning("the tokenizer is not kept with the run: %s", unknown.message)
        return None, made_by


def _rows(config: Config, identity: TokenizerIdentity | None) -> int:
    rows = config.model.rows(None if identity is None else identity.vocab_size)
    if rows is None:
        complaint = "is not set, and neither the shards nor the tokenizer give the vocabulary size"
        problem = Problem("config", None, "model.vocab_size", complaint, None, "model.vocab_size")
        raise ConfigInvalid(problems=(problem,))
    return rows
