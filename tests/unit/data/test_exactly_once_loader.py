"""The account of what was served: each sample once, added up over ranks and jobs, and proven."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.reading import read_steps, taken, world_of
from tests.unit.data.streams import make_stream
from unbroken.data.exactly_once import Served, expected
from unbroken.data.loader import Loader


@pytest.mark.promise("C13")
def test_the_ranks_accounts_add_up_to_what_the_stream_says(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=2)
    state: dict[str, Any] | None = None
    for world, steps in ((3, 4), (1, 3), (2, 5)):
        loaders = world_of(stream, world, state)
        read_steps(loaders, steps)
        total = sum((loader.served_share() for loader in loaders), Served())
        for loader in loaders:
            results = loader.settle_served(total)()
            assert results == {"samples": loader.position, "digest": loader.served.digest, "agrees": True}
            assert loader.served == expected(stream.identities, 0, loader.position)
            assert loader.served_share() == Served()
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert state is not None and state["served"]["samples"] == state["position"] == 96


def test_a_step_that_was_only_begun_is_not_in_the_account(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=8, per_device_batch_size=2)
    taken(iter(loader), 7)
    assert loader.served_share() == expected(loader.stream.identities, 0, 8)
    assert loader.state_dict()["served"] == loader.served_share().as_json()


def test_an_account_that_is_wrong_once_never_agrees_again(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=8)
    batches = iter(loader)
    taken(batches, 2)
    # One sample counted that nobody served.
    assert loader.settle_served(loader.served_share() + Served(1, 5, 7))()["agrees"] is False
    taken(batches, 1)
    proof = loader.settle_served(loader.served_share())
    assert proof()["agrees"] is False
    assert "agrees" not in loader.state_dict()["served"]


def test_a_check_is_of_the_instant_it_was_requested(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=8)
    batches = iter(loader)
    taken(batches, 2)
    proof = loader.settle_served(loader.served_share())
    taken(batches, 3)
    assert proof() == {"samples": 16, "digest": loader.served.digest, "agrees": True}
