"""Data as a pure function: from raw text to batches, the same on any number of ranks and workers.

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
    from unbroken.data.ingest.text_corpus import open_text_corpus
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
    "TokenizerIdentity",
    "open_corpus",
    "open_text_corpus",
    "seal_shards",
]

_HOMES: Final = {
    "Batch": "loader",
    "Bucket": "corpus.catalogue",
    "Corpus": "corpus.catalogue",
    "Loader": "loader",
    "Phase": "order.schedule",
    "SampleDataset": "datasets",
    "SampleIterable": "datasets",
    "Served": "exactly_once",
    "Shard": "corpus.catalogue",
    "Stream": "stream",
    "TokenizerIdentity": "corpus.listing",
    "open_corpus": "corpus.catalogue",
    "open_text_corpus": "ingest.text_corpus",
    "seal_shards": "corpus.seal_shards",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
