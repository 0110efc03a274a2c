"""torchdata's loader, which says where it stands: the real one, asked and loaded at every position."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
from torchdata.stateful_dataloader.sampler import RandomSampler  # type: ignore[import-untyped]

from tests.exact.loading import Case
from unbroken.state.cursor import Cursor
from unbroken.state.rng import capture_rng, restore_rng

# torch deprecates what this loader calls when it is made; nothing of ours does.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

DATA = TensorDataset(torch.arange(20))
PER_EPOCH = 7
Make = Callable[..., Any]


def shuffled(**more: Any) -> Any:  # noqa: ANN401 - the loader is not typed
    torch.manual_seed(4)
    return StatefulDataLoader(DATA, batch_size=3, shuffle=True, **more)


def own_generator(**more: Any) -> Any:  # noqa: ANN401
    return StatefulDataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), **more)


def drawing_as_it_goes(**more: Any) -> Any:  # noqa: ANN401
    """A sampler that draws 32 at a time, and is ahead of what is served where workers fetch ahead."""
    sampler = RandomSampler(DATA, replacement=True, num_samples=100, generator=torch.Generator().manual_seed(2))
    return StatefulDataLoader(DATA, batch_size=15, sampler=sampler, **more)


def batches(cursor: Cursor[Any], count: int) -> list[list[int]]:
    found = []
    for _ in range(count):
        found.append(next(cursor)[0].tolist())
        torch.rand(3)  # the model draws in between
    return found


def resumed_at(make: Make, served: int, count: int, **more: Any) -> list[list[int]]:  # noqa: ANN401
    """What a second loader serves, given nothing but what the first one's cursor said."""
    first = Cursor(make(**more))
    batches(first, served)
    state, generators = first.state_dict(), capture_rng()
    torch.manual_seed(99)
    second = Cursor(make(**more))
    second.load_state_dict(state)
    restore_rng(generators)
    return batches(second, count)


@pytest.mark.promise("C13")
@pytest.mark.parametrize("make", [shuffled, own_generator, drawing_as_it_goes])
@pytest.mark.parametrize("served", [0, 1, 3, 6, 7, 8, 12, 14, 15])
def test_it_resumes_with_the_next_batch_from_every_position(make: Make, served: int) -> None:
    whole = batches(Cursor(make()), served + 10)
    assert resumed_at(make, served, 10) == whole[served:]


@pytest.mark.promise("C13")
@pytest.mark.parametrize("make", [own_generator, drawing_as_it_goes])
@pytest.mark.parametrize("served", [3, PER_EPOCH])
def test_batches_that_workers_have_fetched_ahead_are_served_and_not_skipped(make: Make, served: int) -> None:
    workers = {"num_workers": 2, "prefetch_factor": 2}
    whole = batches(Cursor(make(**workers)), served + 6)
    assert resumed_at(make, served, 6, **workers) == whole[served:]


def test_a_position_is_saved_twice_in_a_row_as_well_as_once() -> None:
    whole = batches(Cursor(own_generator()), 16)
    state, found = None, []
    for count in (3, 4, 2, 7):
        cursor = Cursor(own_generator())
        if state is not None:
            cursor.load_state_dict(state)
        found += batches(cursor, count)
        state = cursor.state_dict()
    assert found == whole


class Returning(IterableDataset[int]):
    """A dataset that goes back to its start when it has given all, as people write it."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        share = range(10)[3:] if worker.id else range(3)
        while self.at < len(share):
            self.at += 1
            yield share[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.promise("C13")
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_worker_that_has_given_all_gives_nothing_again(batch_size: int | None) -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "batch_size": batch_size}

    def numbers(cursor: Cursor[Any], count: int) -> list[object]:
        return [next(cursor).tolist() if batch_size else next(cursor) for _ in range(count)]

    # One worker has ended long before the other has given its last.
    per_epoch = 4 if batch_size else 10
    whole = numbers(Cursor(StatefulDataLoader(Returning(), **options)), 2 * per_epoch)
    for served in (per_epoch - 1, per_epoch):
        first = Cursor(StatefulDataLoader(Returning(), **options))
        numbers(first, served)
        second = Cursor(StatefulDataLoader(Returning(), **options))
        second.load_state_dict(first.state_dict())
        assert numbers(second, 2 * per_epoch - served) == whole[served:]
        assert second.epoch == 1


@pytest.mark.promise("U10")
@pytest.mark.parametrize(
    "case",
    [Case("StatefulDataLoader", "map-style", 2), Case("DataLoader", "map-style", 2, persistent=True)],
    ids=["from its own state", "replayed"],
)
def test_workers_draw_on_after_a_resume_as_if_nothing_had_happened(case: Case) -> None:
    cursor = Cursor(case.make())
    for _ in range(6):
        next(cursor)
    state, generators = cursor.state_dict(), capture_rng()
    expected = [next(cursor).tolist() for _ in range(4)]
    torch.manual_seed(99)
    again = Cursor(case.make())
    again.load_state_dict(state)
    restore_rng(generators)
    assert [next(again).tolist() for _ in range(4)] == expected
