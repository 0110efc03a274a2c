"""Where the data stands: replayed or asked, it continues with the very batch that comes next."""

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tests.unit.data.streams import make_stream
from tests.unit.state.tiny import bits, job, tiny
from unbroken.data.loader import Loader as Positioned
from unbroken.errors import DataEnded, NotAnItem, StateDiffers
from unbroken.state.cursor import Cursor, require_loader
from unbroken.state.loaders import rngs_of
from unbroken.state.rng import capture_rng, restore_rng

DATA = TensorDataset(torch.arange(20))
Loader = DataLoader[Any]


def own_generator() -> Loader:
    return DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))


def global_generator() -> Loader:
    torch.manual_seed(4)
    return DataLoader(DATA, batch_size=3, shuffle=True)


def samplers_generator() -> Loader:
    sampler = RandomSampler(DATA, replacement=True, generator=torch.Generator().manual_seed(2))
    return DataLoader(DATA, batch_size=3, sampler=sampler)


def with_workers() -> Loader:
    torch.manual_seed(4)
    return DataLoader(DATA, batch_size=3, shuffle=True, num_workers=2, collate_fn=drawn)


class Counting:
    """A sampler that counts its epochs by itself, when its first number is asked for."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch)
        self.epoch += 1
        yield from order.sample(range(20), 20)


class InPlace(Counting):
    """A sampler that shuffles the orders of the epoch before: a list, an array, a tensor, and one made on the way."""

    def __init__(self) -> None:
        self.rng, self.size = numpy.random.default_rng(3), 20
        self.names = [f"{number}" for number in range(5)]
        self.order = numpy.arange(4)
        self.held = {"turn": torch.arange(4)}

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.names)
        self.rng.shuffle(self.order)
        self.held["turn"] = self.held["turn"].roll(1)
        self.added = [*getattr(self, "added", [300]), 300 + len(self.names)]
        yield from [
            (4 * int(name) + int(self.order[turn]) + len(self.added)) % 20
            for name in self.names
            for turn in self.held["turn"].tolist()
        ]


def counting() -> Loader:
    return DataLoader(DATA, batch_size=3, sampler=Counting())


def in_place() -> Loader:
    return DataLoader(DATA, batch_sampler=BatchSampler(InPlace(), 3, drop_last=False))


class Own:
    """A loader of the script's, with a generator of its own and another loader inside."""

    def __init__(self) -> None:
        self.rng = numpy.random.RandomState(1)
        self.inner = counting()
        self.told = 0

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        noise = torch.from_numpy(self.rng.randn(7))
        for number, batch in enumerate(self.inner):
            yield [*batch, noise[number], torch.tensor(self.told)]


def drawn(rows: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch with numbers that its worker drew."""
    return torch.stack([row[0] for row in rows]), torch.rand(2)


def batches(cursor: Cursor[Any], count: int) -> list[list[Any]]:
    found = []
    for _ in range(count):
        found.append([each.tolist() for each in next(cursor)])
        torch.rand(3)  # the model draws in between
    return found


@pytest.mark.parametrize(
    "make", [own_generator, global_generator, samplers_generator, counting, in_place, Own, with_workers]
)
@pytest.mark.parametrize("served", [3, 7, 9, 15])
def test_a_loader_without_state_resumes_with_the_next_batch_in_any_epoch(
    make: Callable[[], Loader], served: int
) -> None:
    if make is with_workers and served != 9:
        pytest.skip("one position is enough where processes are started")
    whole = batches(Cursor(make()), served + 8)
    assert whole[:7] != whole[7:14]
    cursor = Cursor(make())
    batches(cursor, served)
    state, generators = cursor.state_dict(), capture_rng()
    torch.manual_seed(99)
    random.seed(99)
    resumed = Cursor(make())
    resumed.load_state_dict(state)
    restore_rng(generators)
    assert batches(resumed, 8) == whole[served:]
    assert (resumed.epoch, resumed.served) == divmod(served + 8, 7) or resumed.served == 7


class Stateful:
    """A loader with a state_dict."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_is_saved_and_not_replayed() -> None:
    cursor = Cursor(Stateful())
    assert [next(cursor) for _ in range(7)] == [1, 2, 3, 4, 5, 1, 2]
    state = cursor.state_dict()
    assert state == {"epoch": 1, "served": 2, "loader": {"at": 2}}
    other = Cursor(Stateful())
    other.load_state_dict(state)
    assert [next(other) for _ in range(4)] == [3, 4, 5, 1]


def test_a_sampler_gets_the_epoch() -> None:
    results: list[int] = []

    class Sampler:
        set_epoch = staticmethod(results.append)

    class Listed(list[int]):
        sampler = Sampler()

    cursor = Cursor(Listed([1, 2]))
    for _ in range(5):
        next(cursor)
    assert results == [0, 1, 2]
    other = Cursor(Listed([1, 2]))
    other.load_state_dict(cursor.state_dict())
    assert results[-1] == 2


def test_what_the_epochs_before_changed_is_kept_and_nothing_else() -> None:
    cursor = Cursor(in_place())
    batches(cursor, 9)
    kept = {tuple(path) for path, _ in cursor.state_dict()["began"]["remembered"]}
    here = ("batch_sampler", "sampler")
    assert kept == {(*here, "names"), (*here, "order"), (*here, "held", "turn"), (*here, "added")}
    # What the script gives the sampler is the script's, also where it differs from the checkpoint's.
    other = in_place()
    sampler: Any = other.batch_sampler.sampler  # type: ignore[union-attr]
    sampler.size, sampler.names = 5, ["0", "1"]
    resumed = Cursor(other)
    resumed.load_state_dict(cursor.state_dict())
    assert (sampler.size, sorted(sampler.names)) == (5, ["0", "1"])
    assert [each for each in resumed.notices if "not exact" in each and "batch_sampler.sampler.names" in each]


def test_what_a_dataset_has_opened_is_not_taken_for_something_that_an_epoch_changed(tmp_path: Path) -> None:
    found: list[tuple[object, ...]] = []

    class Lazy(torch.utils.data.Dataset[int]):
        def __init__(self) -> None:
            self.folder: str | None = None
            self.is_open, self.served = False, 0
            self.order = numpy.arange(4)

        def __getitem__(self, index: int) -> int:
            found.append((self.folder, self.is_open, self.served, int(self.order[0])))
            self.folder, self.is_open = str(tmp_path), True
            self.served += 1
            self.order[0] = self.served
            return index

        def __len__(self) -> int:
            return 4

    cursor = Cursor(torch.utils.data.DataLoader(Lazy(), batch_size=2))
    batches(cursor, 3)
    found.clear()
    resumed = Cursor(torch.utils.data.DataLoader(Lazy(), batch_size=2))
    resumed.load_state_dict(cursor.state_dict())
    batches(resumed, 1)
    # The second epoch is drawn anew from its start, by a dataset that has opened nothing yet.
    assert found[0] == (None, False, 4, 4) and len(found) == 4


def test_set_epoch_reaches_every_part_of_a_loader() -> None:
    told: list[tuple[str, int]] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.set_epoch = lambda epoch: told.append((name, epoch))

    class Parts(list[int]):
        batch_sampler, dataset = Part("batch_sampler"), Part("dataset")

    Parts.batch_sampler.sampler = Part("sampler")  # type: ignore[attr-defined]
    cursor = Cursor(Parts([1]))
    next(cursor), next(cursor)
    assert sorted(told) == [(name, epoch) for name in ("batch_sampler", "dataset", "sampler") for epoch in (0, 1)]


def test_data_that_shrank_and_data_that_is_empty_are_named() -> None:
    cursor = Cursor([1, 2, 3])
    for _ in range(3):
        next(cursor)
    with pytest.raises(DataEnded) as ended:
        Cursor([1, 2]).load_state_dict(cursor.state_dict())
    assert (ended.value.found, ended.value.served) == (2, 3)
    with pytest.raises(DataEnded):
        next(Cursor[int]([]))
    one_way = Cursor(iter([1]))
    next(one_way)
    with pytest.raises(DataEnded):
        next(one_way)


def test_what_cannot_be_iterated_is_refused_when_it_is_passed_in() -> None:
    with pytest.raises(NotAnItem, match="way to be iterated"):
        require_loader(3)
    assert require_loader([1]) == [1]


def test_the_rngs_of_a_loader_are_found_once_each() -> None:
    assert len(rngs_of(own_generator())) == 1
    assert len(rngs_of(samplers_generator())) == 1
    assert rngs_of(global_generator()) == []


class Telling:
    """A loader with a state_dict of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        while self.at < 9:
            self.at += 1
            yield [torch.tensor([self.at])]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (Telling, own_generator, "saved its own state, .*; the DataLoader here has none"),
        (own_generator, Telling, "had no state and is replayed .*; the Telling here saves its own state"),
    ],
)
def test_a_loader_of_the_other_kind_is_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, first: Callable[[], Any], second: Callable[[], Any], words: str
) -> None:
    job(tmp_path / "run", 2, body=lambda run, step: next(run.data), data=first(), **tiny())
    fresh = tiny(1)
    before = bits(fresh["model"])
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, body=lambda run, step: next(run.data), data=second(), **fresh)
    [complaint] = refused.value.changed
    assert re.search(words, complaint)
    assert bits(fresh["model"]) == before


def test_a_loader_that_stands_elsewhere_on_each_rank_does_not_follow_one_of_one_position(tmp_path: Path) -> None:
    stream = make_stream(tmp_path / "data")
    job(
        tmp_path / "run",
        2,
        body=lambda run, step: next(run.data),
        data=Positioned(stream, global_batch_size=2),
        **tiny(),
    )
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, body=lambda run, step: next(run.data), data=Telling(), **tiny(1))
    [complaint] = refused.value.changed
    assert "has one position for all ranks; the Telling here does not" in complaint
    job(tmp_path / "fresh", 1, data=own_generator(), **tiny())
    job(
        tmp_path / "fresh",
        2,
        body=lambda run, step: next(run.data),
        data=Positioned(stream, global_batch_size=2),
        **tiny(),
    )


def test_a_loader_of_the_other_kind_may_begin_where_nothing_was_served_yet(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, data=own_generator(), **tiny())
    job(tmp_path / "run", 4, body=lambda run, step: next(run.data), data=Telling(), **tiny(1))
