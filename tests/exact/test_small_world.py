"""Two steps on one rank and on three: the matrix of ``test_world_size`` in a few seconds."""

import pytest

from tests.exact.lane_world import Case, gradients_after_closing, refused_each, train_each
from tests.exact.small_gpt import Shape
from tests.torch_versions import NO_SHARDED_SUM
from unbroken.errors import TooManyRanks
from unbroken.testing.worlds import logs, spawn

SHAPE = Shape(dropout=0.1)
PRECISIONS = (("fp32", False), ("bf16", True))
HELD = (False, True) if NO_SHARDED_SUM is None else (False,)
CASES = {name: tuple(Case(is_sharded, is_low, 7, SHAPE, steps=2) for is_sharded in HELD) for name, is_low in PRECISIONS}


@pytest.mark.promise("X1")
def test_three_ranks_give_the_bits_of_one() -> None:
    cases = (*CASES["fp32"], *CASES["bf16"])
    [alone] = spawn(1, train_each, cases)
    assert alone.is_good, logs([alone])
    three = spawn(3, train_each, cases)
    assert all(each.is_good for each in three), logs(three)
    assert all(each.value == alone.value for each in three)
    # Whole or sharded the bits are the same, and those of the other precision are others.
    of_fp32, of_bf16 = alone.value[: len(HELD)], alone.value[len(HELD) :]
    assert of_fp32[0] == of_fp32[-1] and of_bf16[0] == of_bf16[-1] and of_fp32[0] != of_bf16[0]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_more_ranks_than_lanes_is_refused_on_every_rank(is_sharded: bool) -> None:
    ended = spawn(3, train_each, (Case(is_sharded, lanes=2),))
    assert all(isinstance(each.error, TooManyRanks) for each in ended), logs(ended)


def test_a_model_that_is_held_otherwise_is_refused_by_the_name_of_its_parameter() -> None:
    ended = spawn(2, refused_each)
    assert all(each.is_good for each in ended), logs(ended)
    for results in (each.value for each in ended):
        assert results["two dimensions"].startswith("'0.weight' does not support exact gradient sums: its placement is")
        assert "'1.weight'" in results["half sharded"] and "it is not sharded" in results["half sharded"]
        assert "'0.weight'" in results["tensor parallel"] and "it is a DTensor" in results["tensor parallel"]
        assert "'DistributedDataParallel'" in results["ddp"] and "MixedPrecisionPolicy" in results["type said twice"]


@pytest.mark.parametrize("is_stock", [False, True])
def test_closed_it_lets_a_sharded_model_go_and_gradients_are_fsdp2s_own_again(is_stock: bool) -> None:
    ended = spawn(2, gradients_after_closing, is_stock)
    assert [each.value for each in ended] == [True, True], logs(ended)
