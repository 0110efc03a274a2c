"""Killed at any batch and resumed, a run is served the samples of the run that nobody killed, in their order."""

from pathlib import Path

import pytest

from tests.exact.forks import forked, forked_each
from tests.exact.orders import LOADERS, PER_EPOCH, SAMPLES, TOTAL, Order, serve, served_in

# In mid-epoch, at an epoch's last batch, at the first batch of the next, and right behind it, job after job.
DEATHS = (4, PER_EPOCH, PER_EPOCH + 1, PER_EPOCH + 2)


@pytest.mark.promise("C13")
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_each_boundary_and_resumed_the_samples_come_in_the_order_of_one_run(
    workers: int, tmp_path: Path
) -> None:
    names = list(LOADERS)
    plain = [Order(str(tmp_path / f"{number}-plain"), name, workers) for number, name in enumerate(names)]
    killed = [str(tmp_path / f"{number}-killed") for number in range(len(names))]
    assert [each.required() for each in forked_each(serve, [(order,) for order in plain])] == [0] * len(names)
    for death in DEATHS:
        ended = forked_each(
            serve, [(Order(path, name, workers, death),) for path, name in zip(killed, names, strict=True)]
        )
        assert all(each.is_killed for each in ended), [each.error for each in ended]
    last = forked_each(serve, [(Order(path, name, workers),) for path, name in zip(killed, names, strict=True)])
    assert [each.required() for each in last] == [DEATHS[-1] - 1] * len(names)
    for order, path in zip(plain, killed, strict=True):
        whole = served_in(order.directory)
        require_sound(order.loader, [ids for _, ids in whole])
        # Each job begins with the batch in which the one before died: nothing is left out, nothing else comes twice.
        expected, at = [], 0
        for death in (*DEATHS, TOTAL):
            expected += whole[at:death]
            at = death - 1
        assert served_in(path) == expected, order.loader


def require_sound(loader: str, batches: list[tuple[int, ...]]) -> None:
    """Every epoch has each of its samples once, and no two have the same order."""
    assert len(batches) == TOTAL
    epochs = [sum(batches[at : at + PER_EPOCH], ()) for at in range(0, TOTAL, PER_EPOCH)]
    for epoch in epochs[:2]:
        assert len(set(epoch)) == len(epoch) == SAMPLES, loader
    assert epochs[0] != epochs[1] and epochs[2] not in (epochs[0][: len(epochs[2])], epochs[1][: len(epochs[2])])
    assert list(epochs[0]) != sorted(epochs[0])


@pytest.mark.promise("C13")
def test_a_run_killed_before_its_first_save_is_served_everything_from_the_start(tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    assert forked(serve, Order(directory, "shuffled", die_at=1)).is_killed
    assert forked(serve, Order(directory, "shuffled")).required() == 0
    served = served_in(directory)
    assert served[0] == served[1] and [step for step, _ in served[1:]] == list(range(1, TOTAL + 1))
