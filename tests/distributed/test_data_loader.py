"""Real ranks read one stream: together every sample once, alike in what they say of it, in worlds that change."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.data_world import read_steps, refused
from tests.unit.data.streams import TWO_BUCKETS, make_corpus, open_stream
from unbroken.testing.worlds import logs, spawn


@pytest.mark.promise("G20", "C13")
def test_worlds_that_change_read_every_sample_once_and_agree_on_what_was_served(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    state: dict[str, Any] | None = None
    found: dict[int, list[int]] = {}
    # Three ranks share four lanes; then the batch is another, too.
    for world, global_batch, lane, steps in ((3, 8, 2, 4), (2, 6, 3, 5), (1, 8, 2, 2), (3, 8, 2, 3)):
        ended = spawn(world, read_steps, str(tmp_path), state, global_batch, lane, steps)
        assert all(each.is_good for each in ended), logs(ended)
        results = [each.value for each in ended]
        assert all(each["state"] == results[0]["state"] and each["agrees"] for each in results)
        for rank, each in enumerate(results):
            assert all(lane_number % world == rank for _, lane_number, _, _ in each["read"])
            for _, _, samples, tokens in each["read"]:
                assert not found.keys() & set(samples)
                found |= dict(zip(samples, tokens, strict=True))
        state = results[0]["state"]
        assert state is not None and state["position"] == len(found) == state["served"]["samples"]
    assert found == dict(enumerate(open_stream(tmp_path, epochs=3).read(range(len(found))).tokens.tolist()))


def test_more_ranks_than_lanes_are_refused_on_every_rank(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    ended = spawn(3, refused, str(tmp_path))
    assert [each.value for each in ended] == [
        f"{rank}: 2 lanes a step leave 1 of 3 ranks without any" for rank in range(3)
    ], logs(ended)
