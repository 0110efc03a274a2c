"""Schedules of any shape agree with one that is drawn sample by sample, and nothing later changes a sample."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.by_hand import ByHand, Drawn
from unbroken.data.order.schedule import DataGeneration, OnExhausted, Phase, Schedule

NAMES = ("a", "b", "c")
HORIZON = 900
SEED = 7

weights = st.fractions(0, 1, max_denominator=20)
mixes = st.dictionaries(st.sampled_from(NAMES), weights, min_size=1).filter(lambda mix: any(mix.values()))
phases_lists = st.lists(
    st.builds(lambda samples, mix: Phase(samples, tuple(mix.items())), st.integers(1, 150), mixes),
    min_size=1,
    max_size=4,
)
sizes = st.fixed_dictionaries({name: st.integers(0, 120) for name in NAMES})
dry_words = st.sampled_from(["halt", "renormalise"])


def drawn(schedule: Schedule, limit: int = HORIZON) -> Drawn:
    last = limit if schedule.end is None else min(schedule.end, limit)
    bucket, ordinal = schedule.locate(np.arange(last))
    return [(schedule.buckets[b], o) for b, o in zip(bucket.tolist(), ordinal.tolist(), strict=True)]


@pytest.mark.promise("G18")
@given(phases_lists, sizes, st.integers(1, 4) | st.none(), dry_words)
@settings(deadline=None, max_examples=150)
def test_a_schedule_is_what_drawing_by_hand_gives(
    phases: list[Phase], sequences: dict[str, int], epochs: int | None, on_exhausted: OnExhausted
) -> None:
    generation = DataGeneration(0, sequences, epochs, on_exhausted)
    hand = ByHand(phases, SEED)
    hand.run(generation, HORIZON)
    schedule = Schedule(phases, [generation], seed=SEED)
    assert drawn(schedule) == hand.out
    if hand.is_over:
        assert (schedule.end, list(schedule.exhausted)) == (len(hand.out), hand.exhausted)


@given(phases_lists, sizes, sizes, st.integers(1, 3), dry_words, st.integers(0, 200))
@settings(deadline=None, max_examples=150)
def test_growth_in_the_middle_is_what_drawing_by_hand_gives(
    phases: list[Phase],
    sequences: dict[str, int],
    more: dict[str, int],
    epochs: int,
    on_exhausted: OnExhausted,
    at: int,
) -> None:
    first = DataGeneration(0, sequences, epochs, on_exhausted)
    before = Schedule(phases, [first], seed=SEED)
    at = at if before.end is None else min(at, before.end)
    second = DataGeneration(at, {name: sequences[name] + more[name] for name in NAMES}, epochs, on_exhausted)
    hand = ByHand(phases, SEED)
    hand.run(first, at)
    hand.run(second, HORIZON)
    grown = Schedule(phases, [first, second], seed=SEED)
    assert drawn(grown, at) == drawn(before, at)
    assert drawn(grown) == hand.out


@pytest.mark.promise("G18")
@given(phases_lists, sizes, st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_the_samples_of_a_halt_are_a_prefix_of_those_that_continue(
    phases: list[Phase], sequences: dict[str, int], epochs: int
) -> None:
    halt, on = (Schedule(phases, [DataGeneration(0, sequences, epochs, word)], seed=SEED) for word in _WORDS)
    assert halt.end is not None and on.end is not None and halt.end <= on.end
    short = drawn(halt)
    assert drawn(on)[: len(short)] == short
    assert halt.exhausted[0] == on.exhausted[0]


_WORDS: tuple[OnExhausted, OnExhausted] = ("halt", "renormalise")


@given(phases_lists | st.none(), sizes.filter(lambda each: any(each.values())), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_more_epochs_change_no_sample_there_was(
    phases: list[Phase] | None, sequences: dict[str, int], epochs: int, further: int
) -> None:
    few = Schedule(phases, [DataGeneration(0, sequences, epochs)], seed=SEED)
    many = Schedule(phases, [DataGeneration(0, sequences, epochs + further)], seed=SEED)
    short = drawn(few)
    assert drawn(many)[: len(short)] == short


@given(phases_lists, phases_lists, sizes, st.integers(1, 3), dry_words)
@settings(deadline=None, max_examples=100)
def test_phases_that_are_added_change_no_sample_of_those_before(
    phases: list[Phase], later: list[Phase], sequences: dict[str, int], epochs: int, on_exhausted: OnExhausted
) -> None:
    generations = [DataGeneration(0, sequences, epochs, on_exhausted)]
    limit = sum(phase.samples for phase in phases)
    short = drawn(Schedule(phases, generations, seed=SEED), limit)
    assert drawn(Schedule([*phases, *later], generations, seed=SEED), limit)[: len(short)] == short


@given(
    phases_lists | st.none(),
    sizes.filter(lambda each: any(each.values())),
    st.lists(st.tuples(st.integers(0, 150), sizes, st.integers(1, 3), dry_words), max_size=3),
)
@settings(deadline=None, max_examples=150)
def test_a_generation_changes_no_sample_before_it(
    phases: list[Phase] | None, sequences: dict[str, int], events: list[tuple[int, dict[str, int], int, OnExhausted]]
) -> None:
    generations = [DataGeneration(0, sequences)]
    for delay, more, epochs, on_exhausted in events:
        before = Schedule(phases, generations, seed=SEED)
        at = min(generations[-1].at_sample + delay, generations[-1].at_sample if before.end is None else before.end)
        grown = {name: generations[-1].sequences[name] + more[name] for name in NAMES}
        generations.append(DataGeneration(at, grown, epochs, on_exhausted))
        after = Schedule(phases, generations, seed=SEED)
        assert drawn(after, at) == drawn(before, at)
    whole = drawn(Schedule(phases, generations, seed=SEED))
    for name in NAMES:
        ordinals = [ordinal for bucket, ordinal in whole if bucket == name]
        assert ordinals == list(range(len(ordinals)))


@given(sizes.filter(lambda each: any(each.values())), st.lists(st.tuples(st.integers(0, 90), sizes), max_size=4))
@settings(deadline=None, max_examples=100)
def test_one_epoch_with_any_growth_reads_every_sequence_exactly_once(
    sequences: dict[str, int], events: list[tuple[int, dict[str, int]]]
) -> None:
    generations = [DataGeneration(0, sequences)]
    for delay, more in events:
        last = generations[-1]
        at = min(last.at_sample + delay, sum(last.sequences.values()))
        generations.append(replace(last, at_sample=at, sequences={n: last.sequences[n] + more[n] for n in NAMES}))
    final = generations[-1].sequences
    schedule = Schedule(None, generations, seed=SEED)
    assert schedule.end == sum(final.values())
    assert schedule.served(schedule.end) == final


@given(phases_lists | st.none(), sizes.filter(lambda each: any(each.values())), st.data())
@settings(deadline=None, max_examples=100)
def test_what_was_served_before_a_sample_is_what_its_samples_drew(
    phases: list[Phase] | None, sequences: dict[str, int], data: st.DataObject
) -> None:
    schedule = Schedule(phases, [DataGeneration(0, sequences, 2, "renormalise")], seed=SEED)
    sample = data.draw(st.integers(0, schedule.end or 0))
    names = [name for name, _ in drawn(schedule, sample)]
    assert schedule.served(sample) == {name: names.count(name) for name in NAMES}


def test_weights_mean_what_they_say() -> None:
    tenth = Phase(10, (("a", Fraction(str(0.1))), ("b", Fraction(str(0.9)))))
    names = [name for name, _ in drawn(Schedule([tenth], [DataGeneration(0, dict.fromkeys(NAMES, 99))], seed=SEED), 10)]
    assert names.count("a") == 1
