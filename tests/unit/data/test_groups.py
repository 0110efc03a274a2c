"""Groups hold every entry once, stay bounded, and never change when shards are added."""

from pathlib import Path

import numpy as np
import pytest

from tests.unit.data.counted import CountedShard, index_of
from unbroken.data.packing import groups
from unbroken.data.packing.groups import Group, form_groups


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_ENTRIES", 10)
    monkeypatch.setattr(groups, "GROUP_TOKENS", 100)


def _shard(name: str, *lengths: int) -> CountedShard:
    return CountedShard(name, np.array(lengths, np.int64))


def _formed(shards: list[CountedShard], stride: int = 64) -> list[Group]:
    return form_groups(shards, stride=stride, index_of=index_of(shards))


def _ranges(found: list[Group]) -> list[list[tuple[int, int, int]]]:
    return [[(span.shard, span.first, span.last) for span in group] for group in found]


def test_small_shards_share_a_group_until_it_is_full() -> None:
    shards = [_shard(str(number), 10, 10, 10) for number in range(7)]
    assert _ranges(_formed(shards)) == [
        [(0, 0, 3), (1, 0, 3), (2, 0, 3)],
        [(3, 0, 3), (4, 0, 3), (5, 0, 3)],
        [(6, 0, 3)],
    ]


def test_a_shard_with_many_entries_is_split_by_entries() -> None:
    shards = [_shard("a", *[2] * 25)]
    assert _ranges(_formed(shards)) == [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 25)]]


def test_a_shard_with_many_tokens_is_split_where_they_are() -> None:
    shards = [_shard("a", 60, 30, 30, 60, 50, 90, 1)]
    found = _formed(shards)
    assert _ranges(found) == [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 5)], [(0, 5, 7)]]
    assert [(span.start_token, span.tokens) for (span,) in found] == [(0, 90), (90, 90), (180, 50), (230, 91)]


def test_an_entry_larger_than_a_group_is_one() -> None:
    shards = [_shard("a", 5, 1000, 5)]
    assert _ranges(_formed(shards)) == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]


def test_the_rest_of_a_large_shard_shares_a_group_with_the_next() -> None:
    shards = [_shard("a", *[10] * 12), _shard("b", 10), _shard("c", *[1] * 30)]
    assert _ranges(_formed(shards))[:3] == [[(0, 0, 10)], [(0, 10, 12), (1, 0, 1)], [(2, 0, 10)]]


def test_an_empty_shard_is_in_no_group() -> None:
    assert _ranges(_formed([_shard("a"), _shard("b", 3), _shard("c")])) == [[(1, 0, 1)]]
    assert _formed([]) == []


def test_short_windows_make_smaller_groups() -> None:
    shards = [_shard("a", *[10] * 8)]
    assert _ranges(_formed(shards, stride=2)) == [[(0, 0, 2)], [(0, 2, 4)], [(0, 4, 6)], [(0, 6, 8)]]


def test_every_entry_is_in_one_group_and_no_group_is_too_large() -> None:
    drawn = np.random.default_rng(3)
    shards = [_shard(str(n), *drawn.integers(0, 40, drawn.integers(0, 40)).tolist()) for n in range(60)]
    found = _formed(shards)
    spans = [span for group in found for span in group]
    entries = [(span.shard, entry) for span in spans for entry in range(span.first, span.last)]
    assert entries == [(number, entry) for number, shard in enumerate(shards) for entry in range(shard.entries)]
    for span in spans:
        offsets = shards[span.shard].offsets(span.first, span.last)
        assert (span.start_token, span.tokens) == (offsets[0], offsets[-1] - offsets[0])
    for group in found:
        assert sum(span.entries for span in group) <= 10
        assert sum(span.tokens for span in group) <= 100


def test_an_index_is_read_only_where_a_shard_must_be_split() -> None:
    asked: list[str] = []
    shards = [_shard("small", 10, 10), _shard("large", *[10] * 11), _shard("tiny", 1)]
    opening = index_of(shards)

    def noting(path: Path) -> groups.Offsets:
        asked.append(str(path))
        return opening(path)

    form_groups(shards, stride=64, index_of=noting)
    assert asked == ["large"]
