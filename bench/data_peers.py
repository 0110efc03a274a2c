"""Other loaders over the same tokens, each as its own documentation has it, without workers."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

Batches = Callable[[], Iterator[torch.Tensor]]


class Unavailable(Exception):
    """A peer cannot run here."""


@dataclass(frozen=True)
class Corpus:
    """The tokens of every shard, where its documents begin, and the shape of a batch."""

    maps: list[NDArray[np.uint16]]
    offsets: list[NDArray[np.int64]]
    batch: int
    length: int

    @property
    def rows(self) -> int:
        return sum(len(tokens) // self.length for tokens in self.maps)

    def row(self, number: int) -> NDArray[np.int64]:
        """Row ``number`` of all shards cut into rows."""
        for tokens in self.maps:
            here = len(tokens) // self.length
            if number < here:
                return tokens[number * self.length : (number + 1) * self.length].astype(np.int64)
            number -= here
        raise IndexError(number)

    def document(self, number: int) -> NDArray[np.int64]:
        """Document ``number`` of all shards, cut to the length of a row."""
        for tokens, offsets in zip(self.maps, self.offsets, strict=True):
            if number < len(offsets) - 1:
                end = min(offsets[number + 1], offsets[number] + self.length)
                return tokens[offsets[number] : end].astype(np.int64)
            number -= len(offsets) - 1
        raise IndexError(number)

    @property
    def documents(self) -> int:
        return sum(len(offsets) - 1 for offsets in self.offsets)


def _imported(name: str) -> Any:  # noqa: ANN401 - a package of somebody else
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Unavailable(str(missing)) from None


class Rows(Dataset[torch.Tensor]):
    """Rows cut one after the other, by number: what a memory-mapped dataset usually is."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return self.corpus.rows

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.corpus.row(number))


def torch_loader(corpus: Corpus) -> Batches:
    return lambda: _endless(lambda: iter(DataLoader(Rows(corpus), batch_size=corpus.batch, shuffle=True)))


def stateful_loader(corpus: Corpus) -> Batches:
    stateful = _imported("torchdata.stateful_dataloader").StatefulDataLoader
    return lambda: _endless(lambda: iter(stateful(Rows(corpus), batch_size=corpus.batch, shuffle=True)))


def torchdata_nodes(corpus: Corpus) -> Batches:
    nodes = _imported("torchdata.nodes")
    rows = Rows(corpus)

    def make() -> Iterator[torch.Tensor]:
        order = nodes.SamplerWrapper(torch.utils.data.RandomSampler(rows))
        mapped = nodes.Mapper(order, rows.__getitem__)
        batched = nodes.Mapper(nodes.Batcher(mapped, batch_size=corpus.batch), torch.stack)
        return iter(nodes.Loader(batched))

    return lambda: _endless(make)


def grain_rows(corpus: Corpus) -> Batches:
    grain = _imported("grain.python")
    source = Rows(corpus)

    def make() -> Iterator[torch.Tensor]:
        rows = grain.MapDataset.range(corpus.rows).shuffle(seed=1).map(lambda number: source.corpus.row(number))
        return (torch.from_numpy(batch) for batch in rows.batch(corpus.batch))

    return lambda: _endless(make)


def grain_packed(corpus: Corpus) -> Batches:
    experimental = _imported("grain.experimental")
    grain = _imported("grain.python")

    def make() -> Iterator[torch.Tensor]:
        documents = grain.MapDataset.range(corpus.documents).shuffle(seed=1)
        documents = documents.map(lambda number: {"tokens": corpus.document(number)}).to_iter_dataset(
            grain.ReadOptions(num_threads=0)
        )
        packed = experimental.FirstFitPackIterDataset(
            documents, length_struct={"tokens": corpus.length}, num_packing_bins=64
        )
        batches = packed.batch(corpus.batch)
        return (torch.from_numpy(np.asarray(_tokens(batch))) for batch in batches)

    return lambda: _endless(make)


def _tokens(batch: Any) -> Any:  # noqa: ANN401 - a tuple or a mapping, as the release has it
    return batch["tokens"] if isinstance(batch, Mapping) else batch[0]["tokens"]


def _endless(make: Batches) -> Iterator[torch.Tensor]:
    while True:
        yield from make()


PEERS: Mapping[str, Callable[[Corpus], Batches]] = {
    "torch DataLoader, rows of a map": torch_loader,
    "torchdata StatefulDataLoader, rows": stateful_loader,
    "torchdata nodes, rows": torchdata_nodes,
    "Grain, rows": grain_rows,
    "Grain, first-fit packing": grain_packed,
}
