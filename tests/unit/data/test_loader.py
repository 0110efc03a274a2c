"""A rank's batches: the same samples in the same global order, whatever the world, the workers and the batch size."""

import json
import random
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data.reading import Read, read_steps, taken, world_of
from tests.unit.data.streams import TWO_BUCKETS, lengths, make_corpus, make_stream, open_stream
from tests.unit.data.test_stream import TWO_PHASES, Counting
from unbroken.data import loader
from unbroken.data import stream as stream_module
from unbroken.data.corpus.catalogue import open_corpus
from unbroken.data.lanes import cut_lanes
from unbroken.data.loader import Loader
from unbroken.data.order.schedule import Phase
from unbroken.data.packing import groups
from unbroken.data.packing.rows import Rows
from unbroken.data.stream import Lookup, Stream
from unbroken.errors import DataChanged, LanesUnfit, NoProcessGroup, SequenceDamaged, StreamDiffers

# ---- lanes ----


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_lanes_of_all_ranks_are_the_samples_of_the_step_each_once(world: int) -> None:
    numbers = []
    for rank in range(world):
        lanes = cut_lanes(8, 2, rank, world)
        turns = np.arange(3 * lanes.per_step)
        assert [lanes.place(turn) for turn in turns.tolist()] == [
            (step, lane) for step in range(3) for lane in range(rank, 4, world)
        ]
        numbers += lanes.samples(turns, 100).tolist()
    assert sorted(numbers) == list(range(100, 124))


@pytest.mark.parametrize(
    ("global_batch", "lane", "world", "says"),
    [
        (8, 2, 5, "4 lanes a step leave 1 of 5 ranks without any"),
        (8, 3, 1, "cannot be cut into lanes of 3"),
        (8, None, 3, "one equal lane for each of 3 ranks"),
        (0, None, 1, "at least one sample"),
        (8, 0, 1, "at least one sample"),
    ],
)
def test_lanes_that_do_not_fit_are_refused(global_batch: int, lane: int | None, world: int, says: str) -> None:
    with pytest.raises(LanesUnfit, match=says):
        cut_lanes(global_batch, lane, 0, world)


# ---- one global order ----


@pytest.mark.promise("G17", "G20")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("more", [{}, {"phases": TWO_PHASES}, {"epochs": 3}], ids=["natural", "phases", "epochs"])
def test_every_world_reads_the_stream_in_its_order(world: int, more: dict[str, Any], tmp_path: Path) -> None:
    stream = make_stream(tmp_path, **more)
    steps = min(len(stream) // 8, 40)
    found = read_steps(world_of(stream, world), steps)
    assert found == dict(enumerate(stream.read(range(8 * steps)).tokens.tolist()))


@pytest.mark.promise("G20", "C13")
def test_worlds_workers_and_batch_sizes_change_on_the_way_and_each_sample_comes_once(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=4)
    found: Read = {}
    state: dict[str, Any] | None = None
    ways = [(1, 8, 2, 0, 3), (3, 8, 2, 0, 5), (2, 12, 3, 2, 3), (4, 4, 1, 0, 7), (1, 6, 6, 1, 3)]
    for world, global_batch, lane, workers, steps in ways:
        loaders = world_of(
            stream,
            world,
            state,
            global_batch_size=global_batch,
            per_device_batch_size=lane,
            num_workers=workers,
            multiprocessing_context=_fork(workers),
        )
        read = read_steps(loaders, steps)
        assert not found.keys() & read.keys()
        found |= read
        states = [loader.state_dict() for loader in loaders]
        assert all(each["position"] == len(found) for each in states)
        state = states[0]
    assert found == dict(enumerate(stream.read(range(len(found))).tokens.tolist()))


def _fork(workers: int) -> str | None:
    return "fork" if workers else None


@pytest.mark.promise("G20", "C13")
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_batches_that_workers_prefetched_are_made_again(steps: int, tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=3)
    loader = Loader(stream, global_batch_size=2, num_workers=2, prefetch_factor=4, multiprocessing_context="fork")
    batches = iter(loader)
    before = taken(batches, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    del batches
    again = Loader(open_stream(tmp_path, epochs=3), global_batch_size=2, num_workers=2, multiprocessing_context="fork")
    again.load_state_dict(state)
    after = taken(iter(again), 5)
    assert before | after == dict(enumerate(stream.read(range(2 * (steps + 5))).tokens.tolist()))


def test_a_state_taken_between_the_lanes_of_a_step_stands_at_its_start(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=8, per_device_batch_size=2)
    stands = []
    for number, batch in enumerate(loader):
        assert (batch.step, batch.lane, batch.samples) == (number // 4, number % 4, range(2 * number, 2 * number + 2))
        stands.append((loader.position, loader.steps))
        if number == 8:
            break
    assert stands == [(0, 0)] * 3 + [(8, 1)] * 4 + [(16, 2)] * 2
    # Iterated anew, it continues from there.
    assert next(iter(loader)).samples == range(16, 18)


def test_an_iterator_that_was_left_behind_reports_it(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=4)
    old = iter(loader)
    next(old)
    state = loader.state_dict()
    iter(loader)
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(old)
    newer = iter(loader)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(newer)


def test_a_batch_has_all_that_a_model_takes(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    batch = next(iter(Loader(stream, global_batch_size=4)))
    rows = stream.read(range(4))
    for name, array in (("tokens", rows.tokens), ("labels", rows.labels), ("doc_ids", rows.doc_ids)):
        assert batch[name].dtype == (torch.int32 if name == "doc_ids" else torch.int64)
        assert batch[name].tolist() == array.tolist()
    assert batch.positions.tolist() == [list(range(32))] * 4
    assert dict(**batch).keys() == {"tokens", "labels", "doc_ids", "positions"}
    assert batch.to("cpu").samples == batch.samples
    with pytest.raises(KeyError):
        batch["step"]


@pytest.mark.promise("C13")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_loop_writes_into_a_batch_reaches_no_other_batch(workers: int, tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    served = Loader(
        open_stream(tmp_path),
        global_batch_size=4,
        per_device_batch_size=2,
        num_workers=workers,
        multiprocessing_context=_fork(workers),
    )
    batches = iter(served)
    # As it comes, the first alone and the next four together: each is overwritten before the next one is taken.
    kept = []
    for number in range(8):
        batch = next(batches)
        rows = served.stream.read(batch.samples)
        expected = [each.tolist() for each in (rows.tokens, rows.labels, rows.doc_ids)] + [[list(range(32))] * 2]
        assert [batch[name].tolist() for name in batch.keys()] == expected  # noqa: SIM118
        for name in batch.keys():  # noqa: SIM118
            batch[name].fill_(-1000 - number)
        kept.append(batch)
    for number, batch in enumerate(kept):
        assert all(bool((batch[name] == -1000 - number).all()) for name in batch.keys())  # noqa: SIM118


def test_an_iterator_that_has_ended_stays_ended(tmp_path: Path) -> None:
    batches = iter(Loader(make_stream(tmp_path), global_batch_size=4))
    assert list(batches) and list(batches) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_batch_size", "4"),
        ("global_batch_size", 4.0),
        ("per_device_batch_size", "2"),
        ("num_workers", 1.5),
        ("prefetch_factor", None),
        ("world_size", "1"),
    ],
)
def test_a_number_that_is_not_whole_is_refused_by_the_name_of_its_parameter(
    name: str, value: object, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"global_batch_size": 4, "rank": 0, "world_size": 1, name: value}
    with pytest.raises(TypeError, match=f"^{name} must be a whole number, is {value!r}$"):
        Loader(make_stream(tmp_path), **given)


# ---- batches that are made together ----


def test_batches_made_together_are_those_made_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, made = make_stream(tmp_path, epochs=3), {}
    for most in (1, 4):
        monkeypatch.setattr(loader, "_MOST_AHEAD", most)
        served = Loader(stream, global_batch_size=6, per_device_batch_size=2, rank=1, world_size=2)
        made[most] = [
            [each.tolist() for each in (batch.tokens, batch.labels, batch.doc_ids)]
            + [batch.step, batch.lane, batch.samples, served.position, served.served_share()]
            for batch in served
        ]
    assert len(made[4]) > 40 and made[4] == made[1]


@pytest.mark.promise("C13")
@pytest.mark.parametrize("steps", range(6))
def test_a_run_resumes_between_batches_that_were_made_together(steps: int, tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    first = Loader(stream, global_batch_size=2)
    before = taken(iter(first), steps) if steps else {}
    again = Loader(open_stream(tmp_path), global_batch_size=2)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    after = taken(iter(again), 7)
    assert [*before, *after] == list(range(2 * (steps + 7)))
    assert before | after == dict(enumerate(stream.read(range(2 * (steps + 7))).tokens.tolist()))


@pytest.mark.promise("U11")
@pytest.mark.parametrize("damaged", range(1, 6))
def test_a_damaged_sample_is_reported_at_its_own_batch_and_those_before_it_are_served(
    damaged: int, tmp_path: Path
) -> None:
    stream = make_stream(tmp_path, check_reads=True)
    pieces = stream.look_up(np.array([damaged])).pieces
    longest = int(pieces.lengths.argmax())
    with stream.shards[pieces.shards[longest]].bin_path.open("r+b") as file:
        # In the middle: windows share tokens at their ends.
        at = pieces.begins[longest] + 2 * (int(pieces.lengths[longest]) // 2)
        file.seek(at)
        found = file.read(1)
        file.seek(at)
        file.write(bytes([found[0] ^ 1]))
    # The first batch is made alone, the next four together: the third of those is sample 3.
    served = Loader(stream, global_batch_size=1)
    batches = iter(served)
    assert [next(batches).samples.start for _ in range(damaged)] == list(range(damaged))
    with pytest.raises(SequenceDamaged) as damage:
        next(batches)
    assert damage.value.sample == damaged
    assert served.position == damaged
    # Again, and not the end: a loop that catches the error would take that for the end of the data.
    for _ in range(2):
        with pytest.raises(SequenceDamaged) as again:
            next(batches)
        assert str(again.value) == str(damage.value) and again.value.sample == damaged


def test_a_batch_keeps_no_more_memory_than_that_of_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_TOKENS_AHEAD", 32 * 5)
    read: list[int] = []

    class Counted(Stream):
        def rows(self, lookup: Lookup, first: int, last: int) -> Rows:
            read.append(last - first)
            return super().rows(lookup, first, last)

    make_corpus(tmp_path, TWO_BUCKETS)
    stream = Counted(open_corpus(tmp_path), max_length=32)
    for size, read_first in ((1, [1, 4, 4]), (2, [2, 4, 4]), (3, [3, 3, 3]), (6, [6, 6, 6])):
        read.clear()
        taken(iter(Loader(stream, global_batch_size=size)), 9)
        assert read[:3] == read_first
        # Its own storage, not that of all: a batch that is saved is saved alone.
        assert next(iter(Loader(stream, global_batch_size=size))).tokens.untyped_storage().nbytes() == 8 * 32 * size


# ---- what it leaves alone ----


@pytest.mark.parametrize("workers", [0, 1])
def test_making_and_iterating_a_loader_draws_from_no_generator_of_the_process(workers: int, tmp_path: Path) -> None:
    stream = make_stream(tmp_path)

    def drawn() -> tuple[Any, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = drawn()
    loader = Loader(stream, global_batch_size=4, num_workers=workers, multiprocessing_context=_fork(workers))
    taken(iter(loader), 3)
    loader.load_state_dict(loader.state_dict())
    taken(iter(loader), 3)
    assert drawn() == before


@pytest.mark.promise("G20")
def test_the_first_batch_costs_the_same_wherever_a_run_stands(tmp_path: Path) -> None:
    make_corpus(tmp_path, TWO_BUCKETS)
    looked = []
    for position in (0, 10**3, 10**6, 10**10):
        stream = Counting(open_corpus(tmp_path), max_length=32, epochs=None)
        loader = Loader(stream, global_batch_size=8, per_device_batch_size=4)
        loader.load_state_dict({**loader.state_dict(), "position": position})
        next(iter(loader))
        looked.append(stream.looked)
    assert looked == [4] * 4


def test_look_ups_grow_to_a_bounded_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "BLOCK_TOKENS", 32 * 20)
    make_corpus(tmp_path, TWO_BUCKETS)
    stream = Counting(open_corpus(tmp_path), max_length=32, epochs=None)
    looked = [0]
    for _, _ in zip(range(60), Loader(stream, global_batch_size=2), strict=False):
        if stream.looked != looked[-1]:
            looked.append(stream.looked)
    assert np.diff(looked).tolist() == [2, 16, *[20] * 6]


# ---- the end ----


@pytest.mark.promise("G18")
def test_only_whole_steps_are_served_and_the_end_says_which_bucket_is_exhausted(tmp_path: Path) -> None:
    phase = Phase(10_000, (("code", Fraction(1)), ("web", Fraction(3))))
    stream = make_stream(tmp_path, phases=[phase])
    for world in (1, 3):
        loaders = world_of(stream, world)
        steps = len(stream) // 8
        assert all(loader.ended() is None for loader in loaders)
        assert len(read_steps(loaders, steps + 10)) == steps * 8
        assert [loader.steps for loader in loaders] == [steps] * world
        said = {loader.ended() for loader in loaders}
        assert said == {f"bucket web exhausted after step {steps}, {len(stream) % 8} samples short of a whole step"}


# ---- changed data, other settings ----


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 6},
        {"max_length": 16},
        {"overlap_size": 3},
        {"packing": False},
        {"shuffle": False},
        {"phases": TWO_PHASES},
    ],
    ids=lambda more: next(iter(more)),
)
def test_another_stream_is_refused_with_both_values(more: dict[str, Any], tmp_path: Path) -> None:
    state = Loader(make_stream(tmp_path), global_batch_size=8).state_dict()
    loader = Loader(open_stream(tmp_path, **more), global_batch_size=8)
    with pytest.raises(StreamDiffers) as refusal:
        loader.load_state_dict(state)
    assert [name for name, _, _ in refusal.value.differences] == list(more)


def test_all_differences_are_named_at_once(tmp_path: Path) -> None:
    state = Loader(make_stream(tmp_path), global_batch_size=8).state_dict()
    with pytest.raises(StreamDiffers) as refusal:
        Loader(open_stream(tmp_path, seed=9, overlap_size=0, packing=False), global_batch_size=8).load_state_dict(state)
    assert refusal.value.differences == (("overlap_size", "4", "1"), ("seed", "5", "9"), ("packing", "True", "False"))


@pytest.mark.parametrize("state", [{}, {"position": 3}, {"_index": 3, "_sampler_iter": []}])
def test_a_state_of_something_else_is_refused(state: dict[str, Any], tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path), global_batch_size=8)
    with pytest.raises(StreamDiffers, match="state"):
        loader.load_state_dict(state)
    assert loader.position == 0


MORE = {**TWO_BUCKETS, "web": {**TWO_BUCKETS["web"], "b/0": lengths(30, 70, 9)}}


def test_new_shards_are_refused_by_name_until_they_are_accepted(tmp_path: Path) -> None:
    first = Loader(make_stream(tmp_path, epochs=2), global_batch_size=8)
    served = taken(iter(first), 5)
    state = first.state_dict()
    make_corpus(tmp_path, MORE)
    loader = Loader(open_stream(tmp_path, epochs=2), global_batch_size=8)
    with pytest.raises(DataChanged) as refusal:
        loader.load_state_dict(state)
    assert refusal.value.is_growth and [change.name for change in refusal.value.added] == ["b/0"]
    assert loader.position == 0 and loader.stream.eras[0].shards > first.stream.eras[0].shards
    loader.accept(["data.grow"])
    loader.load_state_dict(state)
    assert loader.notices == ["1 shard joined web at sample 40"]
    served |= taken(loader)
    assert served == dict(enumerate(loader.stream.read(range(len(served))).tokens.tolist()))
    # The history is in the state: a job after that needs no consent, and reads the same.
    third = Loader(open_stream(tmp_path, epochs=2), global_batch_size=8)
    third.load_state_dict(loader.state_dict())
    assert third.notices == [] and third.stream.eras == loader.stream.eras


@pytest.mark.parametrize(
    ("steps", "share"), [(0, "none"), (1, "some"), (200, "all")], ids=["before", "in the middle", "after an epoch"]
)
def test_a_changed_shard_is_refused_saying_whether_it_was_served(steps: int, share: str, tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path, epochs=None), global_batch_size=8)
    if steps:
        taken(iter(loader), steps)
    state = loader.state_dict()
    make_corpus(tmp_path, {"code": {**TWO_BUCKETS["code"], "1": lengths(26, 90, 8)}})
    other = Loader(open_stream(tmp_path, epochs=None), global_batch_size=8)
    other.accept(["data.grow"])
    with pytest.raises(DataChanged) as refusal:
        other.load_state_dict(state)
    (change,) = refusal.value.changed
    assert (change.bucket, change.name, change.served) == ("code", "1", share)
    # What is verified is a folder with its splits.
    assert refusal.value.help()[0].command == f"unbroken data verify {tmp_path}"


def test_reading_the_data_once_more_is_a_change_from_here_on_and_is_reported(tmp_path: Path) -> None:
    first = Loader(make_stream(tmp_path), global_batch_size=8)
    served = taken(first)
    assert first.ended()
    loader = Loader(open_stream(tmp_path, epochs=2, on_exhausted="renormalise"), global_batch_size=8)
    loader.load_state_dict(first.state_dict())
    assert loader.notices == [
        f"epochs 2 from sample {first.position} on, 1 before",
        f"an exhausted bucket leaves its share to the other buckets from sample {first.position} on",
    ]
    assert loader.ended() is None
    served |= taken(loader)
    assert served == dict(enumerate(loader.stream.read(range(len(served))).tokens.tolist()))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_the_data_is_recognized_by_name_whoever_reads_it(workers: int, tmp_path: Path) -> None:
    loader = Loader(
        make_stream(tmp_path, check_reads=True),
        global_batch_size=4,
        num_workers=workers,
        multiprocessing_context=_fork(workers),
    )
    path = tmp_path / "train" / "code" / "0.bin"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(SequenceDamaged) as damage:
        taken(iter(loader))
    assert "code/0" in damage.value.shards


# ---- the world around ----


def test_several_ranks_without_a_process_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(NoProcessGroup):
        Loader(stream, global_batch_size=8)
    assert Loader(stream, global_batch_size=8, rank=3, world_size=4).lanes.size == 2


@pytest.mark.parametrize("more", [{"world_size": 2}, {"rank": 1}])
def test_a_rank_without_a_world_is_refused(more: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both rank and world"):
        Loader(make_stream(tmp_path), global_batch_size=2, **more)  # type: ignore[arg-type]


def test_the_order_in_which_a_mix_is_written_decides_nothing(tmp_path: Path) -> None:
    mix = (("web", Fraction(2, 3)), ("code", Fraction(1, 3)))
    loader = Loader(make_stream(tmp_path, phases=[Phase(9, mix)]), global_batch_size=2)
    again = Loader(open_stream(tmp_path, phases=[Phase(9, mix[::-1])]), global_batch_size=2)
    again.load_state_dict(loader.state_dict())
    assert [batch.tokens.tolist() for batch in again] == [batch.tokens.tolist() for batch in loader]


def test_the_proof_of_an_account_opens_nothing_and_shares_nothing(tmp_path: Path) -> None:
    loader = Loader(make_stream(tmp_path, check_reads=True), global_batch_size=2)
    shutil.rmtree(tmp_path / ".unbroken")
    served = iter(loader)
    next(served)
    results = loader.settle_served(loader.served_share())
    apart = loader.stream.identities_apart()
    next(served)
    assert results()["agrees"] is True
    samples = np.arange(len(loader.stream), dtype=np.int64)
    assert apart(samples).tolist() == loader.stream.identities(samples).tolist()


def test_the_maps_of_many_buckets_stay_within_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_ENTRIES", 4)
    monkeypatch.setattr(stream_module, "_MOST_MAPPED_GROUPS", 6)
    stream = make_stream(tmp_path, {name: {"0": lengths(40, 60)} for name in ("a", "b", "c")}, shuffle=False)
    stream.read(range(len(stream)))
    maps = [len(planned.plan._mapped) for bucket in stream.buckets for planned in bucket.planned]
    assert maps == [2, 2, 2]


@pytest.mark.parametrize("wrong", [{"num_workers": -1}, {"prefetch_factor": 0}])
def test_workers_that_cannot_be_are_refused_at_once(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_workers must be at least 0 and prefetch_factor at least 1"):
        Loader(make_stream(tmp_path), global_batch_size=4, **wrong)  # type: ignore[arg-type]
