"""A loop that uses the reducer in a way that would give wrong sums is told so; nothing is summed wrongly in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unbroken import exact
from unbroken.errors import LaneBroken

ROWS = torch.ones(1, 3)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


def weight(net: nn.Sequential, layer: int) -> nn.Parameter:
    found = net[layer].weight
    assert isinstance(found, nn.Parameter)
    return found


def run_step(reducer: exact.Reducer, loss: Callable[[], torch.Tensor], step: int = 0) -> None:
    for lane in reducer.lanes(step):
        lane.backward(loss())


@pytest.mark.parametrize("stock", [False, True])
def test_a_referenced_gradient_keeps_its_bits_in_the_next_step(stock: bool) -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=2, seed=0, stock=stock)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(3):
        run_step(reducer, lambda: net(ROWS).sum() * (step + 1), step)  # noqa: B023 -- called before step moves on
        gradient = weight(net, 0).grad
        assert gradient is not None
        held.append((gradient, gradient.clone()))
    assert all(torch.equal(one, then) for one, then in held)
    assert len({float(then.sum()) for _, then in held}) == 3


def test_memory_of_freed_gradients_is_reused() -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=2, seed=0)
    places = set()
    for step in range(3):
        run_step(reducer, lambda: net(ROWS).sum(), step)
        gradient = weight(net, 0).grad
        assert gradient is not None
        places.add(gradient.data_ptr())
        del gradient
    assert len(places) == 1


@pytest.mark.parametrize("stock", [False, True])
def test_a_closed_reducer_computes_nothing(stock: bool) -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=1, seed=0, stock=stock)
    reducer.close()
    with pytest.raises(LaneBroken, match="is closed"):
        run_step(reducer, lambda: net(ROWS).sum())


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        raise MemoryError


def test_a_lane_whose_error_was_caught_inside_the_loop_does_not_count_as_computed() -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=2, seed=0)

    def catching() -> None:
        for lane in reducer.lanes(0):
            try:
                lane.backward(_Failing.apply(net(ROWS)).sum())  # type: ignore[no-untyped-call]
            except MemoryError:
                continue

    with pytest.raises(LaneBroken, match=r"lane 0 ended without lane\.backward"):
        catching()


def test_a_norm_before_there_is_a_gradient_is_refused() -> None:
    with pytest.raises(LaneBroken, match="no gradients yet"):
        exact.Reducer(two_layers(), lanes=1, seed=0).clip(1.0)


def test_a_parameter_that_is_trained_only_since_the_reducer_was_made_is_named() -> None:
    net = two_layers()
    net[0].requires_grad_(False)
    reducer = exact.Reducer(net, lanes=1, seed=0)
    run_step(reducer, lambda: net(ROWS).sum())
    net[0].requires_grad_(True)
    with pytest.raises(LaneBroken, match=r"'0\.weight' was frozen"):
        run_step(reducer, lambda: net(ROWS).sum())


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_parameters_are_computed_with_in_the_type_of_the_lanes(frozen: int) -> None:
    net = two_layers()
    net[frozen].requires_grad_(False)
    kept = weight(net, frozen).clone()
    reducer = exact.Reducer(net, lanes=1, seed=0, compute_dtype=torch.bfloat16)
    run_step(reducer, lambda: net(ROWS.bfloat16()).float().sum())
    assert torch.equal(weight(net, frozen), kept)
    assert weight(net, frozen).grad is None
    assert weight(net, 1 - frozen).grad is not None


def test_a_sparse_gradient_is_refused() -> None:
    net = nn.Embedding(4, 2, sparse=True)
    reducer = exact.Reducer(net, lanes=1, seed=0)
    with pytest.raises(LaneBroken, match="sparse=False"):
        run_step(reducer, lambda: net(torch.tensor([1])).sum())


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_gradients_are_clipped_by_a_number_above_zero_alone(max_norm: float) -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=1, seed=0)
    run_step(reducer, lambda: net(ROWS).sum())
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        reducer.clip(max_norm)


@pytest.mark.parametrize("lanes", [0, 2.5])
def test_a_step_has_a_whole_number_of_lanes(lanes: int) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        exact.Reducer(two_layers(), lanes=lanes, seed=0)


def test_a_lane_in_float16_needs_a_scale_unless_it_is_waived() -> None:
    net = two_layers()
    reducer = exact.Reducer(net, lanes=1, seed=0, compute_dtype=torch.float16)
    with pytest.raises(LaneBroken, match=r"scaled=scaler\.scale\(loss\)"):
        run_step(reducer, lambda: net(ROWS.half()).sum())
    for lane in reducer.lanes(0):
        loss = net(ROWS.half()).sum()
        lane.backward(loss, scaled=loss)
    assert all(parameter.grad is not None for parameter in net.parameters())
