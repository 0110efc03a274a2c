"""What is kept and what is released: pure decisions over candidates."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.store.keep import (
    BestBy,
    Candidate,
    Decision,
    EveryNSteps,
    EveryT,
    LastK,
    NotYetMirrored,
    Pinned,
    Policy,
    best_by,
    decide,
)

S = 1_000_000_000


def steps(*values: int) -> list[Candidate]:
    return [Candidate(f"c{step}", step, step * S) for step in values]


def kept(decision: Decision) -> list[str]:
    return sorted(decision.kept)


@pytest.mark.promise("G6")
def test_the_last_k_and_the_milestones_are_kept_together() -> None:
    found = decide(steps(*range(100, 1100, 100)), (LastK(2), EveryNSteps(500)))
    assert kept(found) == ["c1000", "c500", "c900"]
    assert found.kept["c1000"] == ("newest usable", "last 2", "every 500 steps")
    assert found.released == ("c100", "c200", "c300", "c400", "c600", "c700", "c800")


@pytest.mark.promise("G6")
@pytest.mark.parametrize("policies", [(), (LastK(None),)])
def test_without_a_limit_all_are_kept(policies: tuple[Policy, ...]) -> None:
    assert decide(steps(1, 2, 3), policies).released == ()


def test_a_step_saved_twice_is_one_place_and_its_later_save_is_kept() -> None:
    twice = [Candidate("old", 5, 1), Candidate("new", 5, 2), Candidate("before", 4, 0)]
    assert kept(decide(twice, (LastK(2),))) == ["before", "new"]
    assert kept(decide(twice, (EveryNSteps(5),))) == ["new"]


def test_step_zero_is_no_milestone() -> None:
    assert kept(decide(steps(0, 1), (EveryNSteps(5),))) == ["c1"]


def test_of_each_stretch_of_time_the_first_is_kept() -> None:
    assert kept(decide(steps(1, 5, 9, 11, 19, 25), (EveryT(10),))) == ["c1", "c11", "c25"]


def test_removing_one_checkpoint_moves_no_border_of_time() -> None:
    once = decide(steps(1, 5, 9, 11, 19, 25), (EveryT(10),))
    again = decide([c for c in steps(1, 5, 9, 11, 19, 25) if c.name in once.kept], (EveryT(10),))
    assert again.released == ()


@pytest.mark.parametrize(("mode", "best"), [("min", "b"), ("max", "c")])
def test_the_best_by_a_metric_is_kept_and_what_is_nan_is_never_best(mode: str, best: str) -> None:
    losses = {"a": 3.0, "b": 1.0, "c": 4.0, "d": math.nan, "e": math.inf, "f": -math.inf}
    found = [Candidate(name, i, i, {"loss": loss}) for i, (name, loss) in enumerate(losses.items())]
    found.append(Candidate("z", 99, 99))
    assert kept(decide(found, (BestBy("loss", mode),))) == sorted([best, "z"])


@pytest.mark.parametrize("text", ["", ":min", "loss:best", "a\nb", "\x1b[2J:max"])
def test_what_names_no_metric_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not METRIC, METRIC:min or METRIC:max"):
        best_by(text)


def test_of_equally_good_ones_the_newest_is_best() -> None:
    found = [Candidate(f"c{step}", step, step, {"loss": 1.0}) for step in (1, 2)] + steps(9)
    assert kept(decide(found, (BestBy("loss"),))) == ["c2", "c9"]
    assert kept(decide(found, (BestBy("loss", k=2),))) == ["c1", "c2", "c9"]


def test_pins_and_missing_copies_are_honoured_without_being_requested() -> None:
    found = [
        Candidate("pinned", 1, 1, is_pinned=True),
        Candidate("here-only", 2, 2, is_mirrored=False),
        Candidate("copied", 3, 3, is_mirrored=True),
        Candidate("new", 4, 4),
    ]
    decision = decide(found, (LastK(1),))
    assert decision.released == ("copied",)
    assert decision.kept["pinned"] == ("pinned",) and decision.kept["here-only"] == ("not yet mirrored",)
    assert Pinned().keeps(found).keys() == {"pinned"} and NotYetMirrored().keeps(found).keys() == {"here-only"}


def test_a_damaged_newcomer_pushes_nothing_out_and_is_not_released() -> None:
    found = [*steps(1, 2), Candidate("bad", 3, 3, is_usable=False)]
    decision = decide(found, (LastK(1),))
    assert decision.kept == {"bad": ("not usable: for the quarantine",), "c2": ("newest usable", "last 1")}


def test_what_the_job_resumed_from_is_kept() -> None:
    assert kept(decide(steps(1, 2, 3), (LastK(1),), resume_target="c1")) == ["c1", "c3"]


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        name=st.uuids().map(str),
        step=st.integers(0, 20),
        saved_at_ns=st.integers(0, 50).map(lambda s: s * S),
        metrics=st.dictionaries(st.just("loss"), st.floats()),
        is_usable=st.booleans(),
        is_pinned=st.booleans(),
        is_mirrored=st.sampled_from([None, True, False]),
    ),
    unique_by=lambda candidate: candidate.name,
    max_size=12,
)
POLICIES = st.lists(
    st.builds(LastK, st.none() | st.integers(1, 4))
    | st.builds(EveryNSteps, st.integers(1, 5))
    | st.builds(EveryT, st.floats(1, 20))
    | st.builds(BestBy, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    max_size=3,
)


@pytest.mark.promise("C17")
@given(CANDIDATES, POLICIES)
def test_no_policy_ever_releases_what_must_stay(found: list[Candidate], policies: list[Policy]) -> None:
    target = found[0].name if found else None
    decision = decide(found, policies, resume_target=target)
    released = [candidate for candidate in found if candidate.name in decision.released]
    assert sorted([*decision.kept, *decision.released]) == sorted(candidate.name for candidate in found)
    assert all(c.is_usable and not c.is_pinned and c.is_mirrored is not False and c.name != target for c in released)
    usable = [candidate for candidate in found if candidate.is_usable]
    if usable:
        assert max(usable, key=lambda c: (c.step, c.saved_at_ns, c.name)).name in decision.kept
    if not policies:
        assert decision.released == ()


@given(CANDIDATES, POLICIES)
def test_deciding_again_after_the_sweep_releases_nothing_more(found: list[Candidate], policies: list[Policy]) -> None:
    decision = decide(found, policies)
    left = [candidate for candidate in found if candidate.name in decision.kept]
    assert decide(left, policies).released == ()
