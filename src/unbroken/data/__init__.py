"""Batches as a pure function of the corpus, the seed and the step: the same on any number of ranks and workers.

    corpus = data.open_corpus("corpus", "train")                        # shards made by `unbroken tokenize`
    stream = data.Stream(corpus, max_length=2048, seed=0)               # sequence i is the same everywhere
    loader = data.Loader(stream, global_batch_size=64, per_device_batch_size=8)
    run = unbroken.Run("runs/a", model=model, optimizer=optimizer, data=loader)

Importing this package imports neither torch nor numpy; each name is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from unbroken.data.corpus.catalogue import Bucket, Corpus, Shard, open_corpus
    from unbroken.data.corpus.listing import TokenizerIdentity
    from unbroken.data.corpus.seal_shards import seal_shards
    from unbroken.data.datasets import SampleDataset, SampleIterable
    from unbroken.data.exactly_once import Served
    from unbroken.data.ingest.engine import tokenize_with
    from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
    from unbroken.data.ingest.text_corpus import open_text_corpus
    from unbroken.data.ingest.tokenize import TokenizeReport
    from unbroken.data.loader import Batch, Loader
    from unbroken.data.order.schedule import Phase
    from unbroken.data.stream import Stream

__all__ = [
    "Batch",
    "Bucket",
    "Corpus",
    "Loader",
    "Phase",
    "SampleDataset",
    "SampleIterable",
    "Served",
    "Shard",
    "Stream",
    "TokenizeOptions",
    "TokenizeReport",
    "TokenizeRequest",
    "TokenizerIdentity",
    "open_corpus",
    "open_text_corpus",
    "seal_shards",
    "tokenize_with",
]

_HOMES: Final = {
    "Batch": "unbroken.data.loader",
    "Bucket": "unbroken.data.corpus.catalogue",
    "Corpus": "unbroken.data.corpus.catalogue",
    "Loader": "unbroken.data.loader",
    "Phase": "unbroken.data.order.schedule",
    "SampleDataset": "unbroken.data.datasets",
    "SampleIterable": "unbroken.data.datasets",
    "Served": "unbroken.data.exactly_once",
    "Shard": "unbroken.data.corpus.catalogue",
    "Stream": "unbroken.data.stream",
    "TokenizeOptions": "unbroken.data.ingest.request",
    "TokenizeReport": "unbroken.data.ingest.tokenize",
    "TokenizeRequest": "unbroken.data.ingest.request",
    "TokenizerIdentity": "unbroken.data.corpus.listing",
    "open_corpus": "unbroken.data.corpus.catalogue",
    "open_text_corpus": "unbroken.data.ingest.text_corpus",
    "seal_shards": "unbroken.data.corpus.seal_shards",
    "tokenize_with": "unbroken.data.ingest.engine",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public name
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
