"""Ranks that could not connect try again together, and end with one error."""

from pathlib import Path

import pytest

from tests.distributed.connection_world import Fault, connect, exchange_late
from tests.torch_versions import torch_is_older
from unbroken.errors import NoConnection, PeerLost
from unbroken.testing.worlds import logs, spawn

gloo_tries_again = pytest.mark.skipif(
    torch_is_older(2, 7), reason="gloo of this torch aborts, or refuses again, after a connection that failed"
)


@gloo_tries_again
@pytest.mark.parametrize(
    ("is_default", "keeps_timeout"),
    [(False, False), (True, False), (True, True)],
    ids=["group of a run", "default group", "default group of torch before 2.13"],
)
def test_ranks_that_reached_a_stranger_connect_again(tmp_path: Path, is_default: bool, keeps_timeout: bool) -> None:
    """Gloo takes both connections for good: only an exchange shows that somebody else is at the other end."""
    ended = spawn(2, connect, str(tmp_path), "stranger", (0, 1), 1, 60.0, is_default, keeps_timeout)
    assert [each.value for each in ended] == [([0, 1], 0)] * 2, logs(ended)


@pytest.mark.parametrize("keeps_timeout", [False, True], ids=["this torch", "torch before 2.13"])
def test_the_short_timeout_of_connecting_does_not_end_a_later_exchange(tmp_path: Path, keeps_timeout: bool) -> None:
    if not keeps_timeout and torch_is_older(2, 13):
        pytest.skip("this torch keeps the timeout that a group was made with")
    ended = spawn(2, exchange_late, str(tmp_path), keeps_timeout)
    assert [each.value for each in ended] == ["exchanged"] * 2, logs(ended)


@gloo_tries_again
def test_one_rank_that_could_not_connect_lets_all_try_again_at_once(tmp_path: Path) -> None:
    """The others are told by the store: gloo alone would let them wait for that rank until the timeout."""
    ended = spawn(3, connect, str(tmp_path), "closed port", (1,), 2, 3000.0, False)
    assert [each.value for each in ended] == [([0, 1, 2], 0)] * 3, logs(ended)


@pytest.mark.parametrize("fault", ["closed port", "token"])
def test_ranks_that_never_connect_end_with_one_error(tmp_path: Path, fault: Fault) -> None:
    ended = spawn(2, connect, str(tmp_path), fault, (1,), 3, 60.0, False)
    for each in ended:
        assert isinstance(each.value, NoConnection) and each.value.attempts == 3, logs(ended)
    assert len({each.value.symptom for each in ended}) == 1, logs(ended)


@pytest.mark.promise("U5")
def test_a_rank_that_dies_while_it_connects_is_a_lost_peer(tmp_path: Path) -> None:
    ended = spawn(3, connect, str(tmp_path), "killed", (1,), 1, 10.0, False)
    assert ended[1].exit_code < 0
    for each in (ended[0], ended[2]):
        assert isinstance(each.value, PeerLost) and "rank 1" in each.value.symptom, logs(ended)
