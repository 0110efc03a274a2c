"""The bits of a training do not depend on how many ranks share its lanes, nor on how they hold the model.

Each world is spawned once and trains every case; the cases that differ only in the world or in how the model is held
must agree in every lane's loss, every norm and the fingerprint of parameters and moments.
"""

from collections import defaultdict
from typing import Any

import pytest

from tests.exact.lane_world import Case, train_each
from tests.exact.small_gpt import Shape
from tests.torch_versions import NO_SHARDED_SUM
from unbroken.testing.worlds import logs, spawn

SIZES = (1, 2, 3, 4)
LANES = (7, 8)
# How the model is held: replicated, and sharded by FSDP2 where this torch lets its sum be replaced.
HELD = (False, True) if NO_SHARDED_SUM is None else (False,)
SHAPES = (
    Shape(),
    Shape(dropout=0.1),
    Shape(dropout=0.1, is_checkpointed=True),
    Shape(is_tied=False),
)
CASES = tuple(
    Case(is_sharded, is_low, lanes, shape)
    for shape in SHAPES
    for lanes in (LANES if shape.is_tied and not shape.is_checkpointed else (7,))
    for is_low in (False, True)
    for is_sharded in HELD
)
# In full precision: sums of rounded gradients are so wide that most orders give the same.
CONTROLS = tuple(
    case
    for case in (
        Case(broken="stock reduction", lanes=8),
        Case(broken="stock reduction", lanes=8, is_sharded=True),
        Case(broken="stock norm", is_sharded=True),
        Case(broken="rank-seeded dropout", shape=Shape(dropout=0.1)),
        Case(broken="rank-seeded dropout", shape=Shape(dropout=0.1), is_sharded=True),
    )
    if case.is_sharded in HELD
)
Told = dict[int, dict[Case, dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Told:
    """What every world says of every case."""
    found: Told = {}
    for size in SIZES:
        cases = CASES + CONTROLS
        ended = spawn(size, train_each, cases)
        assert all(each.is_good for each in ended), logs(ended)
        assert all(each.value == ended[0].value for each in ended), "the ranks disagree"
        found[size] = dict(zip(cases, ended[0].value, strict=True))
    return found


def families() -> dict[tuple[object, ...], list[Case]]:
    found: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in CASES:
        found[case.family].append(case)
    return found


def shown(cases: list[Case]) -> str:
    case = cases[0]
    traits = ["bf16" if case.is_low else "fp32", f"{case.lanes} lanes", f"dropout {case.shape.dropout}"]
    traits += ["checkpointed"] if case.shape.is_checkpointed else []
    return " ".join(traits if case.shape.is_tied else [*traits, "untied"])


@pytest.mark.promise("G1", "X1")
@pytest.mark.parametrize("cases", families().values(), ids=shown)
def test_every_loss_bit_and_the_final_state_are_equal_in_every_world(results: Told, cases: list[Case]) -> None:
    assert tuple(case.is_sharded for case in cases) == HELD
    expected = results[1][cases[0]]
    for size in SIZES:
        for case in cases:
            assert results[size][case] == expected, (size, case)


def test_each_family_of_cases_is_another_training(results: Told) -> None:
    prints = {results[1][cases[0]]["fingerprint"] for cases in families().values()}
    # Checkpointing changes when activations are computed, not what.
    assert len(prints) == len(families()) - 2


@pytest.mark.parametrize("control", CONTROLS, ids=lambda case: f"{case.broken} sharded={case.is_sharded}")
def test_without_any_one_of_its_parts_the_bits_depend_on_the_world(results: Told, control: Case) -> None:
    prints = [results[size][control]["fingerprint"] for size in SIZES]
    assert all(each != prints[0] for each in prints[1:]), prints


def test_a_rank_that_idles_in_the_last_round_takes_part_and_counts_for_nothing(results: Told) -> None:
    # 7 lanes on 2, 3 and 4 ranks leave the last round unfilled; each loss is there once, in lane order.
    for size in SIZES:
        for case in (case for case in CASES if case.lanes == 7):
            assert all(len(step) == 7 + 2 for step in results[size][case]["steps"])
            assert len(set(results[size][case]["steps"][0][:7])) == 7
