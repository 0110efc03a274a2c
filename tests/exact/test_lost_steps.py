"""A step that is left in the middle leaves nothing behind, and what would be summed wrongly is refused."""

import pytest

from tests.exact.misuse_world import WAYS, afresh_each, branch_gradients, complaints
from unbroken.testing.worlds import logs, spawn


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("is_sharded", "is_stock"), [(False, False), (True, False), (True, True)])
def test_after_an_error_in_any_lane_the_next_step_is_as_if_there_had_been_none(
    size: int, is_sharded: bool, is_stock: bool
) -> None:
    ended = spawn(size, afresh_each, is_sharded, is_stock)
    assert all(each.is_good for each in ended), logs(ended)
    for each in ended:
        assert len(each.value) == 3 * len(WAYS)
        assert all(each.value.values()), [where for where, is_afresh in each.value.items() if not is_afresh]


@pytest.mark.parametrize("size", [1, 2])
def test_lanes_that_use_different_parameters_of_a_sharded_model_are_refused_by_name(size: int) -> None:
    ended = spawn(size, complaints)
    assert all(each.is_good for each in ended), logs(ended)
    for results in (each.value for each in ended):
        # Alone, FSDP2 keeps the gradients of lanes before: only one that is new stands out, and none is lost.
        branch = "left" if size > 1 else "right"
        assert f"some lanes use '{branch}.weight' and others do not" in results["another branch"]
        assert "some lanes use 'trunk.weight'" in results["a trunk at last"]
        assert ("no trunk" in results) == (size > 1)
        assert ("lanes of different ranks use different parameters" in results.get("a branch a rank", "")) == (size > 1)
        for is_stock in (False, True):
            assert "belongs to another reducer" in results[f"two reducers, stock={is_stock}"]


def test_a_parameter_that_no_lane_uses_has_a_gradient_of_zero_however_the_model_is_held() -> None:
    [alone], two = spawn(1, branch_gradients), spawn(2, branch_gradients)
    assert all(each.is_good for each in (alone, *two)), logs([alone, *two])
    plain = alone.value[0]
    assert [any(each) for each in plain] == [True, False, False, True]
    assert all(found == plain for each in (alone, *two) for found in each.value)
