"""The schedule of faults: a pure function of the seed, in which everything comes up."""

import hashlib
from collections import Counter

import pytest

from unbroken.prove.fault_schedule import DAMAGE, ENDINGS, FAULTS, KILLED_AT, LEGS, REFUSED_AT, TROUBLE, plan_chain

ALL = tuple(FAULTS)


def legs(seed: int, chains: int, faults: tuple[str, ...] = ALL, ranks: tuple[int, ...] = (1, 2, 3)) -> list[str]:
    return [repr(leg) for chain in range(1, chains + 1) for leg in plan_chain(seed, chain, faults, ranks)]


def test_a_seed_gives_the_same_legs_on_every_machine() -> None:
    # A digest that is written down: what failed elsewhere under this seed must fail here too.
    digest = hashlib.sha256("\n".join(legs(7, 3)).encode()).hexdigest()
    assert digest.startswith("97cf7b9c769c0258")


def test_a_chain_does_not_depend_on_those_before_it() -> None:
    assert plan_chain(5, 9, ALL, (1, 2)) == plan_chain(5, 9, ALL, (1, 2))
    assert plan_chain(5, 9, ALL, (1, 2)) != plan_chain(5, 8, ALL, (1, 2))
    assert plan_chain(6, 9, ALL, (1, 2)) != plan_chain(5, 9, ALL, (1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_comes_up_within_a_few_chains(seed: int) -> None:
    found = [leg for chain in range(1, 8) for leg in plan_chain(seed, chain, ALL, (1, 2, 3))]
    assert {leg.ending for leg in found} == set(ENDINGS)
    assert {leg.damage for leg in found} == {*DAMAGE, None}
    assert {leg.trouble for leg in found} == {*TROUBLE, None}
    assert {leg.phase for leg in found} == set(KILLED_AT)
    assert {leg.refused_at for leg in found} == set(REFUSED_AT)
    assert {leg.ranks for leg in found} == {1, 2, 3}


def test_endings_come_up_equally_often() -> None:
    found = Counter(leg.ending for chain in range(1, 26) for leg in plan_chain(3, chain, ALL, ()))
    assert set(found.values()) == {25 * LEGS // len(ENDINGS)}


@pytest.mark.parametrize("seed", range(20))
def test_jobs_end_one_behind_the_other_and_the_first_loses_no_checkpoint(seed: int) -> None:
    chain = plan_chain(seed, 1, ALL, ())
    assert len(chain) == LEGS
    assert [leg.at for leg in chain] == sorted(leg.at for leg in chain)
    assert all(0 <= leg.at < LEGS / (LEGS + 1) for leg in chain)
    assert chain[0].damage is None


def test_only_what_was_chosen_is_done() -> None:
    found = [leg for chain in range(1, 10) for leg in plan_chain(1, chain, ("stop", "flip"), (2, 1))]
    assert {name for leg in found for name in leg.faults} == {"stop", "flip"}
    assert {leg.ranks for leg in found} == {2}


def test_without_an_ending_jobs_are_killed_so_that_there_is_something_to_recover() -> None:
    assert {leg.ending for leg in plan_chain(1, 1, ("flip",), ())} == {"kill"}


def test_the_first_job_has_the_ranks_of_the_uninterrupted_run() -> None:
    assert {plan_chain(seed, 1, ALL, (3, 1, 2))[0].ranks for seed in range(20)} == {3}
    assert {leg.ranks for leg in plan_chain(1, 1, ALL, ())} == {None}
