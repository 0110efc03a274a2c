"""The schedule of faults: a pure function of the seed, in which everything comes up."""

import hashlib
from collections import Counter

import pytest

from unbroken.prove.fault_schedule import (
    DAMAGE,
    ENDINGS,
    FAULTS,
    KILLED_AT,
    PLANNED_JOBS,
    REFUSED_AT,
    TROUBLE,
    plan_chain,
)

ALL = tuple(FAULTS)


def planned_jobs(
    seed: int, chains: int, faults: tuple[str, ...] = ALL, ranks: tuple[int, ...] = (1, 2, 3)
) -> list[str]:
    return [
        repr(planned).replace("PlannedJob(", "Leg(", 1)
        for chain in range(1, chains + 1)
        for planned in plan_chain(seed, chain, faults, ranks)
    ]


def test_a_seed_gives_the_same_jobs_on_every_machine() -> None:
    # A digest that is written down: what failed elsewhere under this seed must fail here too.
    digest = hashlib.sha256("\n".join(planned_jobs(7, 3)).encode()).hexdigest()
    assert digest.startswith("97cf7b9c769c0258")


def test_a_chain_does_not_depend_on_those_before_it() -> None:
    assert plan_chain(5, 9, ALL, (1, 2)) == plan_chain(5, 9, ALL, (1, 2))
    assert plan_chain(5, 9, ALL, (1, 2)) != plan_chain(5, 8, ALL, (1, 2))
    assert plan_chain(6, 9, ALL, (1, 2)) != plan_chain(5, 9, ALL, (1, 2))


@pytest.mark.parametrize("seed", range(5))
def test_every_fault_comes_up_within_a_few_chains(seed: int) -> None:
    found = [planned for chain in range(1, 8) for planned in plan_chain(seed, chain, ALL, (1, 2, 3))]
    assert {planned.ending for planned in found} == set(ENDINGS)
    assert {planned.damage for planned in found} == {*DAMAGE, None}
    assert {planned.trouble for planned in found} == {*TROUBLE, None}
    assert {planned.phase for planned in found} == set(KILLED_AT)
    assert {planned.refused_at for planned in found} == set(REFUSED_AT)
    assert {planned.ranks for planned in found} == {1, 2, 3}


def test_endings_come_up_equally_often() -> None:
    found = Counter(planned.ending for chain in range(1, 26) for planned in plan_chain(3, chain, ALL, ()))
    assert set(found.values()) == {25 * PLANNED_JOBS // len(ENDINGS)}


@pytest.mark.parametrize("seed", range(20))
def test_jobs_end_one_behind_the_other_and_the_first_loses_no_checkpoint(seed: int) -> None:
    chain = plan_chain(seed, 1, ALL, ())
    assert len(chain) == PLANNED_JOBS
    assert [planned.at for planned in chain] == sorted(planned.at for planned in chain)
    assert all(0 <= planned.at < PLANNED_JOBS / (PLANNED_JOBS + 1) for planned in chain)
    assert chain[0].damage is None


def test_only_what_was_chosen_is_done() -> None:
    found = [planned for chain in range(1, 10) for planned in plan_chain(1, chain, ("stop", "flip"), (2, 1))]
    assert {name for planned in found for name in planned.faults} == {"stop", "flip"}
    assert {planned.ranks for planned in found} == {2}


def test_without_an_ending_jobs_are_killed_so_that_there_is_something_to_recover() -> None:
    assert {planned.ending for planned in plan_chain(1, 1, ("flip",), ())} == {"kill"}


def test_the_first_job_has_the_ranks_of_the_uninterrupted_run() -> None:
    assert {plan_chain(seed, 1, ALL, (3, 1, 2))[0].ranks for seed in range(20)} == {3}
    assert {planned.ranks for planned in plan_chain(1, 1, ALL, ())} == {None}
