"""Keeping as a pure function: what is never released, whatever the policies and the history."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.store.keep import BestBy, Candidate, EveryNSteps, EveryT, LastK, Policy, decide

# A mutated source only has to turn a test red; looking for the smallest example would cost a minute.
KEEP = settings(derandomize=True, max_examples=200, deadline=None, database=None)

metrics = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.floats(width=32))
policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(LastK, st.one_of(st.none(), st.integers(1, 4))),
    st.builds(EveryNSteps, st.integers(1, 20)),
    st.builds(EveryT, st.floats(0.001, 50)),
    st.builds(BestBy, st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]), st.integers(1, 2)),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Candidate]:
    steps = draw(st.lists(st.integers(0, 60), max_size=12))
    return [
        Candidate(
            f"checkpoint-{step}.{i}",
            step,
            saved_at_ns=i * 1_000_000_000,
            metrics=draw(metrics),
            is_usable=draw(st.booleans()),
            is_pinned=draw(st.integers(0, 4)) == 0,
            is_mirrored=draw(st.sampled_from([None, True, False])),
        )
        for i, step in enumerate(steps)
    ]


def _newest(candidates: Sequence[Candidate]) -> Candidate | None:
    return max((c for c in candidates if c.is_usable), key=lambda c: (c.step, c.saved_at_ns), default=None)


@KEEP
@given(histories(), st.lists(policies, max_size=3), st.integers(0, 11))
@pytest.mark.promise("C17", "G6")
def test_what_must_never_be_deleted_is_never_released(
    candidates: list[Candidate], chosen: list[Policy], target: int
) -> None:
    resume_target = candidates[target].name if target < len(candidates) else None
    decision = decide(candidates, chosen, resume_target=resume_target)
    kept, released = set(decision.kept), set(decision.released)
    assert kept | released == {c.name for c in candidates}
    assert not kept & released
    newest = _newest(candidates)
    assert newest is None or newest.name in kept
    assert resume_target is None or resume_target in kept
    for candidate in candidates:
        if not candidate.is_usable or candidate.is_pinned or candidate.is_mirrored is False:
            assert candidate.name in kept
    if not chosen:
        assert not released


@KEEP
@given(histories(), st.integers(1, 4))
@pytest.mark.promise("C17", "G6")
def test_the_last_k_usable_steps_are_kept_whatever_else_was_saved(candidates: list[Candidate], k: int) -> None:
    steps = sorted({c.step for c in candidates if c.is_usable}, reverse=True)[:k]
    kept = decide(candidates, [LastK(k)]).kept
    for step in steps:
        last = max((c for c in candidates if c.is_usable and c.step == step), key=lambda c: c.saved_at_ns)
        assert last.name in kept


@KEEP
@given(histories(), st.integers(1, 20))
@pytest.mark.promise("C17", "G6")
def test_a_usable_checkpoint_of_every_milestone_is_kept(candidates: list[Candidate], n: int) -> None:
    kept = decide(candidates, [EveryNSteps(n)]).kept
    for step in {c.step for c in candidates if c.is_usable and c.step and c.step % n == 0}:
        last = max((c for c in candidates if c.is_usable and c.step == step), key=lambda c: c.saved_at_ns)
        assert last.name in kept


@KEEP
@given(histories(), st.sampled_from(["min", "max"]))
@pytest.mark.promise("C17")
def test_the_best_measured_one_is_kept_and_nan_is_never_best(candidates: list[Candidate], mode: str) -> None:
    kept = decide(candidates, [BestBy("loss", mode)]).kept
    values = [c.metrics["loss"] for c in candidates if c.is_usable and math.isfinite(c.metrics.get("loss", math.nan))]
    if values:
        best = min(values) if mode == "min" else max(values)
        assert any(c.name in kept and "best loss" in kept[c.name] for c in candidates if c.metrics.get("loss") == best)
    for candidate in candidates:
        if not math.isfinite(candidate.metrics.get("loss", math.nan)):
            assert "best loss" not in kept.get(candidate.name, ())


@KEEP
@given(histories(), st.lists(policies, max_size=3))
def test_deciding_again_after_the_release_releases_nothing(candidates: list[Candidate], chosen: list[Policy]) -> None:
    decision = decide(candidates, chosen)
    rest = [c for c in candidates if c.name in decision.kept]
    assert decide(rest, chosen).released == ()


@KEEP
@given(histories(), st.lists(policies, max_size=3), st.randoms(use_true_random=False))
def test_the_order_in_which_candidates_come_changes_nothing(
    candidates: list[Candidate], chosen: list[Policy], rng: random.Random
) -> None:
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert decide(shuffled, chosen) == decide(candidates, chosen)


@KEEP
@given(histories(), st.lists(policies, min_size=1, max_size=3), policies)
def test_one_more_policy_never_releases_more(
    candidates: list[Candidate], chosen: list[Policy], another: Policy
) -> None:
    assert set(decide(candidates, [*chosen, another]).released) <= set(decide(candidates, chosen).released)
