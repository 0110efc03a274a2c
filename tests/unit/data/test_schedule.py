"""The schedule draws exact quotas, knows where it ends, and says which bucket ends it."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from unbroken.data.order.mixture import apportion
from unbroken.data.order.schedule import DataGeneration, Exhausted, OnExhausted, Phase, Schedule
from unbroken.errors import BadMix


def phase(samples: int, **weights: float) -> Phase:
    return Phase(samples, tuple((name, Fraction(str(weight))) for name, weight in weights.items()))


def bounded(
    epochs: int | None = 1, on_exhausted: OnExhausted = "halt", at_sample: int = 0, **sequences: int
) -> DataGeneration:
    return DataGeneration(at_sample, sequences, epochs, on_exhausted)


def drawn(schedule: Schedule, first: int, last: int) -> list[tuple[str, int]]:
    bucket, ordinal = schedule.locate(np.arange(first, last))
    return [(schedule.buckets[b], o) for b, o in zip(bucket.tolist(), ordinal.tolist(), strict=True)]


def counts(schedule: Schedule, first: int, last: int) -> dict[str, int]:
    names = [name for name, _ in drawn(schedule, first, last)]
    return {name: names.count(name) for name in schedule.buckets}


@pytest.mark.promise("G17")
@pytest.mark.parametrize("samples", [1, 63, 1000, 4097])
def test_each_phase_draws_every_bucket_exactly_to_one_sample_whatever_the_world(samples: int) -> None:
    phases = [phase(samples, web=0.7, code=0.2, math=0.1), phase(2 * samples, web=0.1, math=0.9)]
    schedule = Schedule(phases, [bounded(None, web=50, code=50, math=50)], seed=3)
    shares = dict(zip(("web", "code", "math"), apportion([w for _, w in phases[0].mix], samples), strict=True))
    assert counts(schedule, 0, samples) == shares
    for name, weight in phases[0].mix:
        assert abs(shares[name] - weight * samples) < 1
    second = counts(schedule, samples, 3 * samples)
    assert abs(second["math"] - Fraction("0.9") * 2 * samples) < 1
    assert second["code"] == 0


@pytest.mark.promise("G17")
def test_ordinals_carry_over_phases_so_that_nothing_is_read_twice_or_left_out() -> None:
    schedule = Schedule(
        [phase(100, web=0.5, code=0.5), phase(300, web=0.25, code=0.75)], [bounded(None, web=9, code=9)], seed=1
    )
    for name in schedule.buckets:
        ordinals = [ordinal for bucket, ordinal in drawn(schedule, 0, 1000) if bucket == name]
        assert ordinals == list(range(len(ordinals)))


def test_the_last_phase_repeats_with_the_same_quotas_each_time() -> None:
    schedule = Schedule([phase(10, a=1), phase(40, a=0.25, b=0.75)], [bounded(None, a=5, b=5)], seed=1)
    for first in (10, 50, 90, 10 + 40 * 10**9):
        assert counts(schedule, first, first + 40) == {"a": 10, "b": 30}
    assert [schedule.phase_at(sample) for sample in (0, 9, 10, 10**12)] == [0, 0, 1, 1]
    assert schedule.end is None and not schedule.exhausted


@pytest.mark.promise("G18")
@pytest.mark.parametrize("global_batch", [1, 3, 8])
def test_a_bucket_that_is_exhausted_ends_the_samples_at_the_very_one_that_asks_for_more(global_batch: int) -> None:
    phases = [phase(1000, web=0.75, code=0.25)]
    schedule = Schedule(phases, [bounded(web=10_000, code=77)], seed=5)
    endless = Schedule(phases, [bounded(None, web=10_000, code=77)], seed=5)
    assert schedule.end is not None
    assert schedule.exhausted == (Exhausted(schedule.end, "code", 0),)
    assert drawn(endless, 0, schedule.end) == drawn(schedule, 0, schedule.end)
    assert drawn(endless, schedule.end, schedule.end + 1) == [("code", 77)]
    assert schedule.served(schedule.end)["code"] == 77
    # Every world reads the same steps: how many whole ones there are is a matter of the batch alone.
    assert schedule.end // global_batch == len(range(global_batch, schedule.end + 1, global_batch))


@pytest.mark.promise("G18")
def test_renormalising_continues_with_the_others_in_proportion_for_the_rest_of_the_phase() -> None:
    phases = [phase(1000, web=0.5, code=0.2, math=0.3), phase(500, web=0.5, math=0.25, code=0.25)]
    sequences = {"web": 10_000, "code": 50, "math": 10_000}
    halt = Schedule(phases, [DataGeneration(0, sequences, 1, "halt")], seed=5)
    on = Schedule(phases, [DataGeneration(0, sequences, 1, "renormalise")], seed=5)
    assert halt.end is not None
    assert drawn(on, 0, halt.end) == drawn(halt, 0, halt.end)
    rest = counts(on, halt.end, 1000)
    assert rest["code"] == 0
    assert abs(rest["web"] - Fraction(5, 8) * (1000 - halt.end)) < 1
    # Known to be dry: the next phase does not ask it again.
    assert abs(counts(on, 1000, 1500)["web"] - Fraction(2, 3) * 500) < 1
    assert on.exhausted[0] == halt.exhausted[0]


@pytest.mark.promise("G18")
def test_when_all_are_exhausted_the_samples_end_and_every_sequence_was_read() -> None:
    on = Schedule([phase(100, a=0.5, b=0.5)], [bounded(2, "renormalise", a=30, b=11)], seed=5)
    assert on.end == 2 * (30 + 11)
    assert on.served(on.end) == {"a": 60, "b": 22}
    assert [each.bucket for each in on.exhausted] == ["b", "a"]


@pytest.mark.promise("G18")
def test_a_halted_run_continues_past_the_halt_once_the_flag_is_set() -> None:
    phases = [phase(100, a=0.5, b=0.5)]
    halt = Schedule(phases, [bounded(1, "halt", a=300, b=11)], seed=5)
    assert halt.end is not None
    position = halt.end // 8 * 8
    generations = [bounded(1, "halt", a=300, b=11), bounded(1, "renormalise", position, a=300, b=11)]
    resumed = Schedule(phases, generations, seed=5)
    assert drawn(resumed, 0, halt.end) == drawn(halt, 0, halt.end)
    assert resumed.end == 311
    assert drawn(resumed, 0, 311) == drawn(Schedule(phases, [bounded(1, "renormalise", a=300, b=11)], seed=5), 0, 311)


def test_without_phases_every_epoch_reads_every_sequence_once() -> None:
    schedule = Schedule(None, [bounded(3, a=70, b=5, c=0)], seed=1)
    assert schedule.end == 3 * 75
    for first, last in pairwise(range(0, 226, 75)):
        assert counts(schedule, first, last) == {"a": 70, "b": 5, "c": 0}
    assert sorted(drawn(schedule, 0, 225)) == [("a", i) for i in range(210)] + [("b", i) for i in range(15)]
    assert {each.sample for each in schedule.exhausted} == {225}


def test_without_phases_and_without_a_bound_there_is_no_end() -> None:
    schedule = Schedule(None, [bounded(None, a=7, b=3)], seed=1)
    assert schedule.end is None
    assert counts(schedule, 10**15, 10**15 + 10) == {"a": 7, "b": 3}


@pytest.mark.parametrize("at_sample", [0, 1, 33, 74, 75])
def test_what_grows_in_an_epoch_is_read_before_the_epoch_ends(at_sample: int) -> None:
    before = Schedule(None, [bounded(a=70, b=5)], seed=1)
    grown = Schedule(None, [bounded(a=70, b=5), bounded(1, at_sample=at_sample, a=90, b=5, new=8)], seed=1)
    assert drawn(grown, 0, at_sample) == drawn(before, 0, at_sample)
    assert grown.end == 90 + 5 + 8
    assert counts(grown, 0, grown.end) == {"a": 90, "b": 5, "new": 8}


def test_after_growth_later_epochs_are_passes_over_everything() -> None:
    grown = Schedule(None, [bounded(3, a=70), bounded(3, at_sample=100, a=90, new=8)], seed=1)
    assert grown.end == 70 + 98 + 98
    assert counts(grown, 70, 168) == {"a": 90, "new": 8}
    assert counts(grown, 168, 266) == {"a": 90, "new": 8}


def test_a_bucket_that_was_exhausted_comes_back_when_it_has_grown() -> None:
    phases = [phase(1000, a=0.5, b=0.5)]
    generations = [
        bounded(1, "renormalise", a=5000, b=20),
        bounded(1, "renormalise", at_sample=200, a=5000, b=400),
    ]
    schedule = Schedule(phases, generations, seed=2)
    assert counts(schedule, 41, 200)["b"] <= 1
    assert abs(counts(schedule, 200, 900)["b"] - 350) <= 2


def test_more_epochs_as_a_generation_let_a_finished_run_resume() -> None:
    schedule = Schedule(None, [bounded(1, a=10), bounded(2, at_sample=10, a=10)], seed=1)
    assert schedule.end == 20
    assert drawn(schedule, 0, 20) == [("a", ordinal) for ordinal in range(20)]


def test_fewer_epochs_end_the_samples_where_the_next_one_would_be_requested() -> None:
    schedule = Schedule([phase(10, a=1)], [bounded(3, a=10), bounded(1, at_sample=15, a=10)], seed=1)
    assert schedule.end == 15
    assert Schedule(None, [bounded(3, a=10), bounded(1, at_sample=15, a=10)], seed=1).end == 15


def test_an_empty_bucket_of_the_mix_is_exhausted_when_it_is_first_drawn_from() -> None:
    schedule = Schedule([phase(10, a=0.5, b=0.5)], [bounded(a=10, b=0)], seed=1)
    assert schedule.end is not None and schedule.end <= 10
    assert schedule.exhausted[0].bucket == "b"


def test_a_weight_of_zero_never_asks() -> None:
    schedule = Schedule([phase(10, a=1, b=0)], [bounded(a=25, b=0)], seed=1)
    assert schedule.end == 25
    assert [each.bucket for each in schedule.exhausted] == ["a"]


def test_the_order_never_changes_silently() -> None:
    schedule = Schedule([phase(12, a=0.5, b=0.3, c=0.2)], [bounded(None, a=9, b=9, c=9)], seed=2026)
    assert "".join(name for name, _ in drawn(schedule, 0, 24)) == "aaabbbcaacabaaabbbcaacab"


def test_another_seed_is_another_order() -> None:
    first, second = (Schedule([phase(500, a=1, b=1)], [bounded(None, a=9, b=9)], seed=seed) for seed in (1, 2))
    assert drawn(first, 0, 500) != drawn(second, 0, 500)


def test_every_problem_of_a_curriculum_is_reported_at_once() -> None:
    with pytest.raises(BadMix) as caught:
        Schedule([phase(0, web=1), phase(5, wiki=1, web=-1), phase(5, web=0)], [bounded(web=9)], seed=1)
    assert [problem[: len("phase 1")] for problem in caught.value.problems] == [
        f"phase {number}" for number in (1, 2, 2, 3)
    ]
    assert "'wiki'" in caught.value.problems[1] and "'web'" in caught.value.problems[2]
    with pytest.raises(BadMix, check=lambda each: len(each.problems) == 1):
        Schedule([], [bounded(web=9)], seed=1)


@pytest.mark.parametrize(
    "generations",
    [
        [],
        [bounded(at_sample=1, a=5)],
        [bounded(a=5), bounded(at_sample=3, a=4)],
        [bounded(a=5), bounded(at_sample=6, a=9)],
        [bounded(a=50), bounded(at_sample=6, a=60), bounded(at_sample=5, a=70)],
    ],
)
def test_generations_that_take_away_or_begin_where_nothing_is_are_refused(generations: list[DataGeneration]) -> None:
    with pytest.raises(ValueError):
        Schedule(None, generations, seed=1)


def test_samples_beyond_the_end_are_refused() -> None:
    schedule = Schedule(None, [bounded(a=5)], seed=1)
    for ask in (lambda: schedule.locate(np.array([5])), lambda: schedule.served(6), lambda: schedule.served(-1)):
        with pytest.raises(IndexError):
            ask()
    assert schedule.locate(np.array([], np.int64))[0].size == 0
