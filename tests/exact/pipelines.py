"""Pipelines of torchdata, Hugging Face's datasets and Grain, by the names that the table of docs/loaders.md has."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets  # type: ignore[import-untyped]
import grain  # type: ignore[import-untyped]
import torch
from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]
from grain.experimental import WindowShuffleIterDataset  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes  # type: ignore[import-untyped]
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # type: ignore[import-untyped]

from tests.exact.orders import Order, train
from unbroken.state.cursor import Cursor

SAMPLES, BATCH = 22, 3
NUMBERS = list(range(SAMPLES))
# Of a stream each sample is a batch.
STREAMED = 2 * SAMPLES + 6
Make = Callable[[int], Any]
datasets.disable_progress_bars()


@dataclass(frozen=True)
class Pipeline:
    """One row of the table: how it is made with so many workers, and how it resumes."""

    library: str
    name: str
    make: Make
    workers: tuple[int, ...] = (0,)
    is_replayed: bool = False
    # Whether each epoch of the loader has an order of its own.
    is_reshuffled: bool = True
    total: int = 18

    @property
    def way(self) -> str:
        """How it resumes."""
        return "replays its epoch" if self.is_replayed else "from its own state"


def ids_of(batch: Any) -> list[int]:  # noqa: ANN401 - whatever a pipeline gives
    """The sample ids in a batch, or in one sample."""
    if isinstance(batch, list):
        return [number for each in batch for number in ids_of(each)]
    if isinstance(batch, dict):
        return ids_of(batch["id"])
    return [int(batch)] if isinstance(batch, int) else [int(each) for each in batch]


def ready(folder: Path) -> None:
    """Write the files that pipelines read: five of JSON lines."""
    global _FOLDER
    _FOLDER = folder
    for number in range(5):
        path = folder / f"{number}.jsonl"
        if not path.exists():
            path.write_text("".join(json.dumps({"id": each}) + "\n" for each in NUMBERS[number::5]))


_FOLDER = Path()


def serve(number: int, order: Order) -> tuple[int, list[str]]:
    """Train with a pipeline, to the end or to the batch at which the job dies: where it began, what is said of it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ready(Path(order.directory).parent)
    cursor = Cursor(ALL[number].make(order.workers))
    assert cursor.is_stateful != ALL[number].is_replayed
    return train(order, cursor, ids_of), cursor.notices


def _more(workers: int) -> dict[str, Any]:
    if not workers:
        return {}
    # A child of a fork server would start its workers with a server of its own, which outlives it.
    return {"num_workers": workers, "prefetch_factor": 2, "multiprocessing_context": "fork"}


# ---- Hugging Face ----


def rows() -> Any:  # noqa: ANN401 - the library is not typed
    return datasets.Dataset.from_dict({"id": NUMBERS})


def streamed() -> Any:  # noqa: ANN401
    return rows().to_iterable_dataset(num_shards=5)


def from_files() -> Any:  # noqa: ANN401
    files = [str(_FOLDER / f"{number}.jsonl") for number in range(5)]
    cache = str(_FOLDER / "cache")
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=cache)


def _numbers(first: list[int]) -> Iterator[dict[str, int]]:
    # Drawn from the RNG of the process: the state of the dataset cannot bring this order back.
    yield from ({"id": first[0] + at} for at in torch.randperm(SAMPLES).tolist())


def generated() -> Any:  # noqa: ANN401
    return datasets.IterableDataset.from_generator(_numbers, gen_kwargs={"first": [0]})


def mapped(example: dict[str, Any]) -> dict[str, Any]:
    """A function of the user's."""
    return {"id": example["id"], "twice": 2 * example["id"]}


def mapped_batch(batch: dict[str, Any]) -> dict[str, Any]:
    """The same for several."""
    return {"id": batch["id"], "twice": [2 * each for each in batch["id"]]}


def is_kept(example: dict[str, Any]) -> bool:
    """A filter of the user's."""
    return bool(example["id"] % 7)


def _mixed() -> Any:  # noqa: ANN401
    more = datasets.Dataset.from_dict({"id": [100 + each for each in range(9)]}).to_iterable_dataset(num_shards=2)
    mix = datasets.interleave_datasets(
        [streamed().map(mapped), more.map(mapped)], probabilities=[0.7, 0.3], seed=5, stopping_strategy="all_exhausted"
    )
    return mix.filter(is_kept)


def _loaded(make: Callable[[], Any], loader: Any, workers: int) -> Any:  # noqa: ANN401
    return loader(make(), batch_size=BATCH, **_more(workers))


def _shuffled(loader: Any, workers: int) -> Any:  # noqa: ANN401
    return loader(rows().with_format("torch"), batch_size=BATCH, shuffle=True, **_more(workers))


_FILES = ("streaming JSON lines, `map`", lambda: from_files().map(mapped))
_SHUFFLED = ("streaming, `shuffle(seed=, buffer_size=)`", lambda: streamed().shuffle(seed=3, buffer_size=8))


def _of_two_nodes() -> Any:  # noqa: ANN401
    return split_dataset_by_node(streamed().map(mapped_batch, batched=True, batch_size=5), rank=1, world_size=2)


def _alone(make: Callable[[], Any], _: int) -> Any:  # noqa: ANN401
    return make()


_HF = "`datasets`"
_BOTH = (0, 2)
HUGGING_FACE = (
    Pipeline(_HF, "`DataLoader(shuffle=True)`, `Dataset`", partial(_shuffled, DataLoader), _BOTH, True),
    Pipeline(_HF, "`StatefulDataLoader(shuffle=True)`, `Dataset`", partial(_shuffled, StatefulDataLoader), _BOTH),
    Pipeline(_HF, _FILES[0], partial(_alone, _FILES[1]), total=STREAMED),
    Pipeline(
        _HF, "streaming, batched `map`, `split_dataset_by_node`", partial(_alone, _of_two_nodes), total=STREAMED // 2
    ),
    Pipeline(_HF, "streaming, `interleave_datasets`, `filter`", partial(_alone, _mixed), total=2 * STREAMED),
    Pipeline(_HF, _SHUFFLED[0], partial(_alone, _SHUFFLED[1]), is_replayed=True, total=STREAMED),
    Pipeline(_HF, "streaming, `from_generator`", partial(_alone, generated), is_replayed=True, total=STREAMED),
    Pipeline(_HF, f"`StatefulDataLoader`, {_FILES[0]}", partial(_loaded, _FILES[1], StatefulDataLoader), _BOTH),
    Pipeline(
        _HF, f"`StatefulDataLoader`, {_SHUFFLED[0]}", partial(_loaded, _SHUFFLED[1], StatefulDataLoader), _BOTH, True
    ),
    Pipeline(_HF, f"`DataLoader`, {_SHUFFLED[0]}", partial(_loaded, _SHUFFLED[1], DataLoader), _BOTH, True),
)

# ---- torchdata.nodes ----


def _distributed() -> Any:  # noqa: ANN401
    numbers: Any = NUMBERS
    return DistributedSampler(numbers, num_replicas=1, rank=0, shuffle=True, seed=3)


def _doubled(batch: list[int]) -> list[int]:
    return [each * 2 for each in batch]


def _graph(source: Any, workers: int) -> Any:  # noqa: ANN401
    batches = nodes.Batcher(source, BATCH, drop_last=False)
    if workers:
        batches = nodes.ParallelMapper(batches, _doubled, num_workers=workers, snapshot_frequency=2)
    return nodes.Prefetcher(batches, prefetch_factor=2)


def _sampled(sampler: Any) -> Any:  # noqa: ANN401
    return nodes.MapStyleWrapper(NUMBERS, sampler)


def _weighted() -> Any:  # noqa: ANN401
    both = {"a": _sampled(_distributed()), "b": nodes.IterableWrapper(range(100, 107))}
    return nodes.MultiNodeWeightedSampler(both, {"a": 0.7, "b": 0.3}, seed=1)


def _seeded() -> Any:  # noqa: ANN401
    return RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(2))


def _stateful() -> Any:  # noqa: ANN401
    return StatefulDistributedSampler(NUMBERS, num_replicas=1, rank=0, shuffle=True, seed=3)


def _streamed_ids() -> Any:  # noqa: ANN401
    return nodes.Mapper(nodes.IterableWrapper(streamed().map(mapped)), ids_of)


def _loader(source: Callable[[], Any], workers: int) -> Any:  # noqa: ANN401
    return nodes.Loader(_graph(source(), workers))


_NODES = "`torchdata.nodes`"
NODES = (
    Pipeline(_NODES, "`DistributedSampler`", partial(_loader, lambda: _sampled(_distributed())), (0, 2)),
    Pipeline(_NODES, "a node without `Loader`", lambda workers: _graph(_sampled(_distributed()), workers)),
    Pipeline(_NODES, "`RandomSampler`", partial(_loader, lambda: _sampled(RandomSampler(NUMBERS))), (0, 2), True),
    Pipeline(_NODES, "`RandomSampler(generator=)`", partial(_loader, lambda: _sampled(_seeded())), (0,), True),
    Pipeline(_NODES, "`StatefulDistributedSampler`", partial(_loader, lambda: _sampled(_stateful())), (0,), True),
    Pipeline(_NODES, "`MultiNodeWeightedSampler`", partial(_loader, _weighted), (0, 2), True),
    Pipeline(_NODES, "streaming `datasets`", partial(_loader, _streamed_ids)),
)

# ---- Grain ----


def _random(number: int, rng: Any) -> int:  # noqa: ANN401
    return number + 1000 * int(rng.integers(0, 100))


class RandomNumber(grain.transforms.RandomMap):  # type: ignore[misc]
    """An operation with random numbers of Grain's."""

    def random_map(self, element: int, rng: Any) -> int:  # noqa: ANN401
        return _random(element, rng)


class Source:
    """A data source as people write them, without a repr."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return int(index)


def _grain_map(workers: int) -> Any:  # noqa: ANN401
    made = grain.MapDataset.source(NUMBERS).seed(3).shuffle().random_map(_random).repeat(3).batch(BATCH)
    return made.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else made


def _grain_iter(_: int) -> Any:  # noqa: ANN401
    made = WindowShuffleIterDataset(grain.MapDataset.source(NUMBERS).to_iter_dataset(), window_size=5, seed=4)
    return made.seed(1).random_map(_random).batch(BATCH)


def _grain_mix(_: int) -> Any:  # noqa: ANN401
    one = grain.MapDataset.source(NUMBERS).seed(1).shuffle().repeat()
    other = grain.MapDataset.range(100, 107).seed(2).shuffle().repeat()
    return grain.MapDataset.mix([one, other], [0.7, 0.3])[:60].batch(BATCH)


def _grain_loader(workers: int) -> Any:  # noqa: ANN401
    sampler = grain.samplers.IndexSampler(SAMPLES, shuffle=True, seed=1, num_epochs=3)
    operations = [RandomNumber(), grain.transforms.Batch(BATCH)]
    return grain.DataLoader(data_source=Source(), sampler=sampler, operations=operations, worker_count=workers)


_GRAIN = "`grain`"
GRAIN = (
    Pipeline(_GRAIN, "`MapDataset`, `shuffle`, `random_map`, `repeat`", _grain_map, (0,), is_reshuffled=False),
    Pipeline(_GRAIN, "`IterDataset`, `WindowShuffleIterDataset`", _grain_iter, (0,), is_reshuffled=False),
    Pipeline(_GRAIN, "`MapDataset.mix`", _grain_mix, (0,), is_reshuffled=False),
    Pipeline(_GRAIN, "`DataLoader`, `IndexSampler`", _grain_loader, (0, 2), is_reshuffled=False),
)

ALL = (*HUGGING_FACE, *NODES, *GRAIN)
