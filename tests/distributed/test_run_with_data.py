"""A run over the data stream: any world, any batch size, any ending, and each sample exactly once."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.run_data_world import MIX, Leg, serve
from tests.unit.data.streams import TWO_BUCKETS, make_corpus, open_stream
from unbroken.errors import DataChanged, Halted, RankFailed
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.summary import RunSummary, summarize
from unbroken.store.directory import Store
from unbroken.testing.worlds import Ended, logs, spawn

Seen = list[tuple[int, int, list[int]]]


def summary(run: Path) -> RunSummary:
    return summarize(Store(run / "checkpoints"), now_s=0.0)


def good(ended: list[Ended]) -> Seen:
    """What all ranks saw, in the order of the samples."""
    assert all(each.is_good for each in ended), logs(ended)
    return sorted((batch for each in ended for batch in each.value), key=lambda batch: batch[1])


def samples(seen: Seen, lane: int) -> list[int]:
    return [first + offset for _, first, _ in seen for offset in range(lane)]


@pytest.mark.promise("C13", "G20")
def test_a_run_that_changes_its_world_and_its_batch_reads_each_sample_exactly_once(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    make_corpus(data, TWO_BUCKETS)
    more: dict[str, Any] = {"stream": {"epochs": None}}
    seen = good(spawn(3, serve, Leg(str(run), str(data), global_batch=8, lane=2, stop_at=3, **more)))
    # Three ranks share four lanes unevenly; among several ranks a stop comes one step late.
    served = 4 * 8
    assert samples(seen, 2) == list(range(served))
    killed = spawn(1, serve, Leg(str(run), str(data), global_batch=4, lane=4, kill_at=7, **more))
    assert killed[0].exit_code < 0
    served += 2 * 4
    seen += good(spawn(2, serve, Leg(str(run), str(data), global_batch=6, lane=3, total=12, **more)))
    assert samples(seen[16:], 3) == list(range(served, served + 6 * 6))
    stream = open_stream(data, epochs=None)
    for _, first, sums in seen:
        assert stream.read(range(first, first + len(sums))).tokens.sum(axis=1).tolist() == sums
    account = summary(run).account
    assert account is not None and account.agrees and account.samples == served + 36
    commits = read_history(Layout(run)).of_kind("commit")
    assert commits and all(commit.values["data"]["agrees"] for commit in commits)


@pytest.mark.promise("G18")
@pytest.mark.parametrize("world", [1, 3])
def test_a_run_halts_at_the_last_whole_step_and_resumes_when_it_may_skip_the_exhausted_bucket(
    world: int, tmp_path: Path
) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    make_corpus(data, TWO_BUCKETS)
    last = len(open_stream(data, phases=[MIX])) // 6
    leg = Leg(str(run), str(data), stream={"phases": [MIX]})
    for _ in range(2):
        # The second time nothing is left to serve, and nothing is saved anew.
        ended = spawn(world, serve, leg)
        assert all(isinstance(each.error, Halted) for each in ended), logs(ended)
        assert {each.error.step for each in ended if isinstance(each.error, Halted)} == {last}
        results = summary(run)
        assert results.status == "halted" and results.newest_usable is not None and results.newest_usable.step == last
        assert results.outcome is not None and (results.outcome.exit_code, results.outcome.verdict) == (4, "look")
        assert "bucket web exhausted" in str(ended[0].error)
        assert results.newest_usable_name == f"checkpoint-{last}-shutdown"
    onwards = Leg(str(run), str(data), total=last + 5, stream={"phases": [MIX], "on_exhausted": "renormalise"})
    seen = good(spawn(world, serve, onwards))
    assert samples(seen, 2) == list(range(last * 6, (last + 5) * 6))
    assert summary(run).status == "completed"
    facts = read_history(Layout(run)).of_kind("data")
    assert [fact.values["notices"] for fact in facts] == [
        [f"an exhausted bucket leaves its share to the other buckets from sample {last * 6:,} on"]
    ]


@pytest.mark.promise("C13")
def test_data_that_grew_is_refused_until_it_is_accepted_and_then_nothing_served_changes(tmp_path: Path) -> None:
    run, data = tmp_path / "run", tmp_path / "data"
    make_corpus(data, TWO_BUCKETS)
    first = good(spawn(2, serve, Leg(str(run), str(data), total=10, stop_at=4)))
    before = open_stream(data)
    prefix = before.read(range(5 * 6)).tokens.tolist()
    make_corpus(data, {"web": {**TWO_BUCKETS["web"], "b/9": [40, 20, 31, 7, 64]}})
    refused = spawn(2, serve, Leg(str(run), str(data), total=10))
    assert isinstance(refused[0].error, DataChanged) and isinstance(refused[1].error, DataChanged | RankFailed)
    assert "b/9" in "".join(refused[0].error.details()) + str(refused[0].error)
    second = good(spawn(2, serve, Leg(str(run), str(data), total=10, accept=("data.grow",))))
    assert samples(first, 2) + samples(second, 2) == list(range(60))
    assert [sum(row) for row in prefix] == [each for _, _, sums in first for each in sums]
    account = summary(run).account
    assert account is not None and account.agrees and account.samples == 60
    grown = read_history(Layout(run)).of_kind("data")
    assert [fact.values["notices"] for fact in grown] == [["1 shard joined web at sample 30"]]
