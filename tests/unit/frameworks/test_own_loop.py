"""A meeting of all ranks that does not wait for ever."""

import threading
from pathlib import Path

import pytest

from unbroken.errors import NotAllRanks
from unbroken.frameworks.own_loop import meet
from unbroken.torch_private import FileStore
from unbroken.world import Link, World


def worlds(size: int, place: Path) -> list[World]:
    store = FileStore(str(place / "store"), size)
    return [World(rank, size, Link(None, store), tuple(range(size))) for rank in range(size)]


@pytest.mark.promise("C8")
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    first, second, _ = worlds(3, tmp_path)
    meet(World(0, 1), "save", number=1, longest_s=0.0)
    second.link.post("save/1/1", "here")  # type: ignore[union-attr]
    with pytest.raises(NotAllRanks) as refused:
        meet(first, "save", number=1, longest_s=0.2)
    assert (refused.value.call, refused.value.rank, refused.value.missing) == ("save", 0, (2,))


@pytest.mark.promise("C8")
def test_every_rank_that_arrives_continues_and_an_earlier_meeting_does_not_count(tmp_path: Path) -> None:
    first, second = worlds(2, tmp_path)
    for number in (1, 2):
        other = threading.Thread(target=meet, args=(second, "save"), kwargs={"number": number, "longest_s": 60.0})
        other.start()
        meet(first, "save", number=number, longest_s=60.0)
        other.join()
    with pytest.raises(NotAllRanks):
        meet(first, "save", number=3, longest_s=0.1)
