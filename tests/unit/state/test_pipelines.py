"""Pipelines of other libraries: resumed at every position, and what is said of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import grain  # type: ignore[import-untyped]
import pytest
import torch
from datasets.distributed import split_dataset_by_node  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata import nodes  # type: ignore[import-untyped]
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import unbroken
from tests.exact import pipelines
from tests.exact.pipelines import ALL, Pipeline, ids_of
from unbroken.errors import NotExact
from unbroken.state.cursor import Cursor
from unbroken.state.encode import decode, encode
from unbroken.state.rng import capture_rng, restore_rng

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # torchdata: a thread of a graph that is collected in that very thread.
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]


def stored(state: dict[str, Any]) -> Any:  # noqa: ANN401
    """A state as a checkpoint keeps it."""
    tensors: list[torch.Tensor] = []

    def take(_: str, tensor: torch.Tensor) -> int:
        tensors.append(tensor.clone())
        return len(tensors) - 1

    text = json.dumps(encode(state, item="data", path="data", take_tensor=take, allow_pickle=False))
    return decode(json.loads(text), item="data", give_tensor=lambda at: tensors[int(str(at))], allow_pickle=False)


def draw(cursor: Cursor[Any]) -> list[int]:
    batch = ids_of(next(cursor))
    torch.rand(2)  # a model draws too
    return batch


@pytest.mark.promise("C13", "U10")
@pytest.mark.parametrize("pipeline", ALL, ids=lambda each: f"{each.library} {each.name}".replace("`", ""))
def test_a_pipeline_resumes_at_every_position(pipeline: Pipeline, tmp_path: Path) -> None:
    pipelines.ready(tmp_path)
    torch.manual_seed(4)
    first = Cursor(pipeline.make(0))
    assert first.is_stateful != pipeline.is_replayed
    saved, whole = [], []
    for _ in range(pipeline.total):
        saved.append((stored(first.state_dict()), capture_rng()))
        whole.append(draw(first))
    # Grain starts many threads for each iterator.
    for at in range(0, pipeline.total, 4 if pipeline in pipelines.GRAIN else 1 if pipeline.total < 20 else 3):
        torch.manual_seed(99)
        again = Cursor(pipeline.make(0))
        state, rng = saved[at]
        assert again.changes(state) == [] and again.complaint(state) is None
        again.load_state_dict(state)
        restore_rng(rng)
        assert [draw(again) for _ in range(pipeline.total - at)] == whole[at:], (
            f"from batch {at} of epoch {state['epoch']}"
        )


@pytest.mark.promise("C13", "U10")
@pytest.mark.parametrize("pipeline", ALL, ids=lambda each: f"{each.library} {each.name}".replace("`", ""))
def test_a_pipeline_resumes_job_after_job(pipeline: Pipeline, tmp_path: Path) -> None:
    pipelines.ready(tmp_path)
    torch.manual_seed(4)
    cursor = Cursor(pipeline.make(0))
    whole = [draw(cursor) for _ in range(pipeline.total)]
    torch.manual_seed(4)
    found: list[list[int]] = []
    state, rng = None, capture_rng()
    while len(found) < pipeline.total:
        cursor = Cursor(pipeline.make(0))
        if state is not None:
            torch.manual_seed(99)
            cursor.load_state_dict(state)
            restore_rng(rng)
        found += [draw(cursor) for _ in range(min(pipeline.total // 4, pipeline.total - len(found)))]
        state, rng = stored(cursor.state_dict()), capture_rng()
    assert found == whole


@pytest.mark.promise("C13", "U10")
def test_a_worker_that_gave_nothing_since_a_resume_is_saved_where_it_stands(tmp_path: Path) -> None:
    pipelines.ready(tmp_path)

    def cursor() -> Cursor[Any]:
        data = pipelines.from_files().map(pipelines.mapped)
        return Cursor(StatefulDataLoader(data, batch_size=3, num_workers=2, multiprocessing_context="fork"))

    whole = cursor()
    expected = [draw(whole) for _ in range(12)]
    found, state = [], None
    # One batch a job is of one worker alone; the place before the first batch of a job is a place too.
    for _ in range(12):
        again = cursor()
        if state is not None:
            again.load_state_dict(state)
            assert stored(again.state_dict()) == state
        found.append(draw(again))
        state = stored(again.state_dict())
    assert found == expected


# ---- what a position depends on ----


def loaded(samples: int = 22, batch: int = 3, ranks: int = 1) -> Any:  # noqa: ANN401
    data: Any = list(range(samples))
    return DataLoader(data, batch, sampler=DistributedSampler(data, num_replicas=ranks, rank=0))


def shuffled_rows(seed: int) -> Any:  # noqa: ANN401
    return DataLoader(pipelines.rows().shuffle(seed=seed), 3)


def of_nodes(ranks: int) -> Any:  # noqa: ANN401
    return split_dataset_by_node(pipelines.streamed(), rank=0, world_size=ranks)


def batched_nodes(batch: int) -> Any:  # noqa: ANN401
    return nodes.Batcher(nodes.IterableWrapper(range(22)), batch)


def grain_share(ranks: int, seed: int = 1) -> Any:  # noqa: ANN401
    return grain.MapDataset.source(list(range(22))).seed(seed).shuffle()[0::ranks].batch(2)


def grain_loader(ranks: int) -> Any:  # noqa: ANN401
    sampler = grain.samplers.IndexSampler(22, grain.sharding.ShardOptions(0, ranks), shuffle=True, seed=1, num_epochs=1)
    return grain.DataLoader(data_source=list(range(22)), sampler=sampler, operations=[])


ANOTHER = "the pipeline is another one"
CHANGED = [
    (loaded, {"batch": 3}, {"batch": 6}, "batch_size was 3 and is 6"),
    (loaded, {"samples": 22}, {"samples": 24}, "the dataset had 22 samples and has 24"),
    (loaded, {"ranks": 2}, {"ranks": 4}, "the loader split the data over 2 ranks and now splits it over 4"),
    (of_nodes, {"ranks": 2}, {"ranks": 4}, "the loader split the data over 2 ranks and now splits it over 4"),
    (grain_loader, {"ranks": 2}, {"ranks": 4}, "the loader split the data over 2 ranks and now splits it over 4"),
    (grain_share, {"ranks": 2}, {"ranks": 4}, ANOTHER),
    (grain_share, {"ranks": 2, "seed": 1}, {"ranks": 2, "seed": 2}, ANOTHER),
    (shuffled_rows, {"seed": 1}, {"seed": 2}, ANOTHER),
    (batched_nodes, {"batch": 3}, {"batch": 4}, ANOTHER),
    (lambda seed: pipelines.streamed().shuffle(seed=seed), {"seed": 1}, {"seed": 2}, ANOTHER),
    (lambda seed: pipelines.streamed().shuffle(seed=seed), {"seed": None}, {"seed": None}, ANOTHER),
]


@pytest.mark.promise("C13", "U10")
@pytest.mark.parametrize(("make", "before", "now", "expected"), CHANGED)
def test_what_a_position_depends_on_is_compared(
    make: Any,  # noqa: ANN401
    before: dict[str, Any],
    now: dict[str, Any],
    expected: str,
) -> None:
    first = Cursor(make(**before))
    next(first)
    state = stored(first.state_dict())
    (found,) = Cursor(make(**now)).changes(state)
    assert found.startswith(expected)
    if before != now:
        assert Cursor(make(**before)).changes(state) == []


def test_files_in_another_directory_are_the_same_files(tmp_path: Path) -> None:
    found = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        pipelines.ready(tmp_path / name)
        found.append(Cursor(pipelines.from_files().shuffle(seed=1)))
    assert found[1].changes(stored(found[0].state_dict())) == []


@pytest.mark.promise("U10")
def test_files_and_seeds_of_another_pipeline_are_refused(tmp_path: Path) -> None:
    settings = unbroken.Settings(save_steps=None, audit="off", catch_signals=False, console=False)
    for seed in (1, 2):
        data = pipelines.streamed().shuffle(seed=seed, buffer_size=4)
        run = unbroken.Run(tmp_path, settings=settings, model=nn.Linear(1, 1), data=data)
        if seed == 1:
            for _ in run.steps(2):
                next(run.data)
            continue
        with pytest.raises(NotExact, match="shuffle seed"):
            run.open()


@pytest.mark.promise("C13", "U10")
def test_a_run_refuses_another_number_of_ranks_until_it_is_accepted(tmp_path: Path) -> None:
    settings = unbroken.Settings(save_steps=None, audit="off", catch_signals=False, console=False)
    with unbroken.Run(tmp_path, settings=settings, model=nn.Linear(1, 1), data=loaded(batch=3, ranks=2)) as run:
        for _ in run.steps(2):
            next(run.data)
    resized: dict[str, Any] = {"model": nn.Linear(1, 1), "data": loaded(batch=6, ranks=1)}
    with pytest.raises(NotExact) as refused:
        unbroken.Run(tmp_path, settings=settings, **resized).open()
    assert [name for name, _ in refused.value.differences] == ["data", "data"]
    # The same samples are in each step: the same global batch, cut otherwise.
    accepting = dataclasses.replace(settings, accept=("data",))
    with unbroken.Run(tmp_path, settings=accepting, **resized) as run:
        batches = [next(run.data).tolist() for _ in run.steps(4)]
    order = iter(loaded(batch=6, ranks=1).sampler)
    assert [number for batch in batches for number in batch] == list(order)[12:]


# ---- what is said ----


def unordered() -> Any:  # noqa: ANN401
    return nodes.ParallelMapper(nodes.IterableWrapper(range(22)), str, num_workers=2, in_order=False)


def plain_map() -> Any:  # noqa: ANN401
    return grain.MapDataset.source([1, 2, 3]).map(str)


SAID = [
    (lambda: pipelines.streamed().shuffle(buffer_size=1), "not exact: shuffle() of the streaming dataset has no seed"),
    (lambda: pipelines.streamed().shuffle(seed=1), "the state of a streaming dataset does not include its shuffle"),
    (lambda: pipelines.streamed().map(str, batched=True), "a resume calls functions of map() and filter() again"),
    (
        lambda: datasets.interleave_datasets([pipelines.streamed().map(pipelines.mapped)] * 2),
        "a resume calls functions of map()",
    ),
    (
        lambda: pipelines.streamed().map(pipelines.mapped).shuffle(seed=1),
        "the streaming dataset calls functions of map() and filter() in threads",
    ),
    (unordered, "not exact: ParallelMapper has in_order=False"),
    (plain_map, "map functions of Grain run in threads"),
    (
        lambda: nodes.Prefetcher(nodes.Mapper(nodes.IterableWrapper([1]), str), 2),
        "map functions and iterables of torchdata.nodes run",
    ),
]


class Odd(nodes.BaseNode):  # type: ignore[misc]
    """A node of the script's own: it lets odd numbers pass, and calls what it reads from by a name of its own."""

    def __init__(self, below: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.below = below

    def reset(self, initial_state: Any = None) -> None:  # noqa: ANN401
        super().reset(initial_state)
        self.below.reset(None if initial_state is None else initial_state["below"])

    def next(self) -> int:
        while not (number := next(self.below)) % 2:
            pass
        return int(number)

    def get_state(self) -> dict[str, Any]:
        return {"below": self.below.state_dict()}


@pytest.mark.promise("C13", "U10")
@pytest.mark.parametrize("served", [2, 5, 13])
def test_a_node_of_the_scripts_own_resumes_with_the_order_of_its_epoch(served: int) -> None:
    def cursor() -> Cursor[Any]:
        sampler = RandomSampler(range(22), generator=torch.Generator().manual_seed(2))
        return Cursor(nodes.Loader(nodes.Batcher(Odd(nodes.SamplerWrapper(sampler)), 2, drop_last=False)))

    whole = cursor()
    expected = [draw(whole) for _ in range(20)]
    first, again = cursor(), cursor()
    assert [draw(first) for _ in range(served)] == expected[:served]
    again.load_state_dict(stored(first.state_dict()))
    assert [draw(again) for _ in range(20 - served)] == expected[served:]


@pytest.mark.promise("U10")
@pytest.mark.parametrize(("make", "expected"), SAID)
def test_inexact_settings_are_reported(make: Any, expected: str) -> None:  # noqa: ANN401
    assert any(line.startswith(expected) for line in Cursor(make()).notices)


@pytest.mark.promise("U10")
@pytest.mark.parametrize(
    "make",
    [
        lambda: pipelines.streamed().map(str).filter(str),
        lambda: nodes.Mapper(nodes.IterableWrapper([1]), str),
        lambda: grain.MapDataset.source([1, 2]).seed(1).random_map(lambda each, rng: each),
        lambda: DataLoader(pipelines.rows(), 3),
    ],
)
def test_exact_settings_get_no_warning(make: Any) -> None:  # noqa: ANN401
    assert Cursor(make()).notices == []


# ---- what the libraries do by themselves ----


def test_the_state_of_a_streaming_dataset_alone_loses_its_shuffle_buffer() -> None:
    first = pipelines.streamed().shuffle(seed=3, buffer_size=8)
    whole = [each["id"] for each in first]
    iterator = iter(first)
    seen = [next(iterator)["id"] for _ in range(10)]
    again = pipelines.streamed().shuffle(seed=3, buffer_size=8)
    again.load_state_dict(first.state_dict())
    rest = [each["id"] for each in again]
    assert seen == whole[:10] and set(seen + rest) != set(whole)


def test_the_state_of_nodes_alone_gives_another_order_in_the_second_epoch() -> None:
    def orders(state: Any = None) -> tuple[list[list[int]], Any]:  # noqa: ANN401
        source = nodes.SamplerWrapper(RandomSampler(range(22), generator=torch.Generator().manual_seed(2)))
        loader = nodes.Loader(nodes.Batcher(source, 3, drop_last=False))
        if state is not None:
            loader.load_state_dict(state)
            return [list(loader)], None
        first, iterator = list(loader), iter(loader)
        second = [next(iterator) for _ in range(4)]
        state = loader.state_dict()
        return [first, second, list(iterator)], state

    (_, _, rest), state = orders()
    assert orders(state)[0][0] != rest


def test_an_iterator_of_grain_resumes_too() -> None:
    def made() -> Any:  # noqa: ANN401
        return iter(grain.MapDataset.source(list(range(22))).seed(1).shuffle().to_iter_dataset())

    first = Cursor(made())
    whole = [next(first) for _ in range(5)]
    state = stored(first.state_dict())
    whole += [next(first) for _ in range(5)]
    again = Cursor(made())
    again.load_state_dict(state)
    assert [next(again) for _ in range(5)] == whole[5:]
