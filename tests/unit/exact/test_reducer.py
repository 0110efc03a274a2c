"""The reducer of one process: ordinary accumulation, and clear words where a loop uses it wrongly."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from unbroken import exact
from unbroken.errors import ArithmeticDiffers, CannotFold, LaneBroken, NoProcessGroup
from unbroken.exact.reducer import DeferringReducer
from unbroken.exact.stock import NOT_PROMISED

LANES = 5


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 1))


def batch(step: int, lane: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + lane))


def loss_of(net: nn.Module, step: int, lane: int) -> torch.Tensor:
    found: torch.Tensor = net(batch(step, lane).to(next(net.parameters()).dtype)).float().square().mean()
    return found


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def are_equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_with_one_rank_it_is_ordinary_gradient_accumulation(bucket_bytes: int) -> None:
    net, plain = model(), model()
    reducer = exact.Reducer(net, lanes=LANES, seed=3, bucket_bytes=bucket_bytes)
    for step in range(2):
        for lane in reducer.lanes(step):
            lane.backward(loss_of(net, step, lane.number))
        plain.zero_grad()
        losses = []
        for number in range(LANES):
            torch.manual_seed(exact.lane_seed(3, step, number))
            losses.append(loss_of(plain, step, number))
            losses[-1].backward()  # type: ignore[no-untyped-call]
        assert reducer.losses.tolist() == [each.item() for each in map(torch.Tensor.detach, losses)]
        expected = [each * torch.tensor(1.0 / LANES) for each in gradients(plain)]
        assert are_equal(gradients(net), expected)


def test_losses_and_gradients_are_those_of_all_counted_tokens_together() -> None:
    net, plain = nn.Linear(4, 1), nn.Linear(4, 1)
    plain.load_state_dict(net.state_dict())
    reducer = exact.Reducer(net, lanes=3, seed=0)
    counts = (3, 1, 2)
    for lane in reducer.lanes(0):
        kept = batch(0, lane.number)[: counts[lane.number]]
        count = counts[lane.number] if lane.number else torch.tensor(counts[0])
        lane.backward(net(kept).sum(), count=count)
    everything = torch.cat([batch(0, number)[:count] for number, count in enumerate(counts)])
    mean = plain(everything).mean()
    mean.backward()
    mean = mean.detach()
    assert int(reducer.count) == 6
    assert float(reducer.loss) == pytest.approx(mean.item(), rel=1e-6)
    for one, two in zip(gradients(net), gradients(plain), strict=True):
        torch.testing.assert_close(one, two)


def test_a_step_without_anything_to_count_has_gradients_of_zero() -> None:
    net = model()
    reducer = exact.Reducer(net, lanes=2, seed=0)
    for lane in reducer.lanes(0):
        lane.backward(loss_of(net, 0, lane.number) * 0.0, count=0)
    assert float(reducer.loss) == 0.0
    assert all(not each.any() for each in gradients(net))


def test_in_lower_precision_lanes_compute_in_it_and_the_parameters_stay_as_they_are() -> None:
    net = model()
    before = [p.data_ptr() for p in net.parameters()]
    reducer = exact.Reducer(net, lanes=2, seed=0, compute_dtype=torch.bfloat16)
    for lane in reducer.lanes(0):
        assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
        lane.backward(loss_of(net, 0, lane.number))
    assert {p.dtype for p in net.parameters()} == {torch.float32} == {each.dtype for each in gradients(net)}
    assert [p.data_ptr() for p in net.parameters()] == before
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    with reducer.computing(), reducer.computing():
        assert all(p.dtype == torch.bfloat16 and bool((p == 1.0).all()) for p in net.parameters())
    assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_the_scaled_loss_is_differentiated_and_the_unscaled_loss_is_reported() -> None:
    net, plain = nn.Linear(4, 1), nn.Linear(4, 1)
    plain.load_state_dict(net.state_dict())
    reducer = exact.Reducer(net, lanes=1, seed=0)
    for lane in reducer.lanes(0):
        loss = loss_of(net, 0, 0)
        lane.backward(loss, scaled=loss * 8.0)
    loss_of(plain, 0, 0).backward()  # type: ignore[no-untyped-call]
    assert are_equal(gradients(net), [each * 8.0 for each in gradients(plain)])
    assert float(reducer.loss) == float(loss_of(plain, 0, 0).detach())


def test_a_parameter_that_a_lane_does_not_use_counts_as_zero_there() -> None:
    net = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    reducer = exact.Reducer(net, lanes=4, seed=0)
    for lane in reducer.lanes(0):
        lane.backward(net[lane.number % 2](torch.ones(1, 2)).sum())
    assert [each.tolist() for each in gradients(net)] == [[[0.5, 0.5]], [[0.5, 0.5]]]


def test_a_backward_outside_the_lanes_is_the_users_own() -> None:
    net = model()
    reducer = exact.Reducer(net, lanes=1, seed=0)
    loss_of(net, 0, 0).backward()  # type: ignore[no-untyped-call]
    assert len(gradients(net)) == 4
    for lane in reducer.lanes(0):
        assert gradients(net) == []
        lane.backward(loss_of(net, 0, lane.number))
    assert len(gradients(net)) == 4


BROKEN = {
    "forgotten": "lane 0 ended without lane.backward",
    "twice": "lane 0 called backward twice",
    "left": "not all computed",
}


@pytest.mark.parametrize(("how", "words"), list(BROKEN.items()))
def test_a_lane_that_is_not_computed_is_named_and_the_next_step_is_as_ever(how: str, words: str) -> None:
    net = model()
    kept = [p.data_ptr() for p in net.parameters()]
    reducer = exact.Reducer(net, lanes=2, seed=0, compute_dtype=torch.bfloat16)
    drawn = torch.get_rng_state()

    def broken() -> None:
        lanes = reducer.lanes(0)
        for lane in lanes:
            if how != "forgotten":
                lane.backward(loss_of(net, 0, lane.number))
            if how == "twice":
                lane.backward(loss_of(net, 0, lane.number))
            if how == "left":
                lanes.close()  # type: ignore[attr-defined]
                break
        _ = reducer.loss

    with pytest.raises(LaneBroken, match=words):
        broken()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [p.data_ptr() for p in net.parameters()] == kept
    again = model()
    other = exact.Reducer(again, lanes=2, seed=0, compute_dtype=torch.bfloat16)
    for each, one in ((net, reducer), (again, other)):
        for lane in one.lanes(1):
            lane.backward(loss_of(each, 1, lane.number))
    assert reducer.losses.tolist() == other.losses.tolist()
    assert are_equal(gradients(net), gradients(again))


def test_after_an_error_inside_a_lane_the_next_step_is_as_ever_though_the_error_is_still_held() -> None:
    net, again = model(), model()
    reducer = exact.Reducer(net, lanes=2, seed=0, compute_dtype=torch.bfloat16)
    other = exact.Reducer(again, lanes=2, seed=0, compute_dtype=torch.bfloat16)

    def broken() -> None:
        for lane in reducer.lanes(0):
            lane.backward(loss_of(net, 0, lane.number))
            raise MemoryError

    with pytest.raises(MemoryError) as held:
        broken()
    for each, one in ((net, reducer), (again, other)):
        for lane in one.lanes(1):
            lane.backward(loss_of(each, 1, lane.number))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    del held
    assert are_equal(gradients(net), gradients(again))


def test_what_cannot_be_summed_exactly_is_refused_with_its_name() -> None:
    with pytest.raises(CannotFold, match="sums gradients itself"):
        exact.Reducer(DataParallel(model()), lanes=1, seed=0)
    with pytest.raises(CannotFold, match=r"'0.weight'.*bfloat16"):
        exact.Reducer(model().bfloat16(), lanes=1, seed=0)
    with pytest.raises(CannotFold, match="no trainable parameter"):
        exact.Reducer(nn.Tanh(), lanes=1, seed=0)


def test_frozen_parameters_are_left_alone_in_any_type() -> None:
    net = model()
    net[0].requires_grad_(False).bfloat16().float()
    net[3].weight.requires_grad_(False)
    reducer = exact.Reducer(net, lanes=2, seed=0)
    for lane in reducer.lanes(0):
        lane.backward(loss_of(net, 0, lane.number))
    assert len(gradients(net)) == len(reducer.gradients()) == 1


def test_a_launcher_with_several_ranks_and_no_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NoProcessGroup):
        exact.Reducer(model(), lanes=2, seed=0)


def test_a_checkpoint_of_other_lanes_is_refused_and_of_the_same_is_taken() -> None:
    saved = exact.Reducer(model(), lanes=8, seed=1).state_dict()
    exact.Reducer(model(), lanes=8, seed=1).load_state_dict(saved)
    with pytest.raises(ArithmeticDiffers) as refused:
        exact.Reducer(model(), lanes=7, seed=2, compute_dtype=torch.bfloat16).load_state_dict(saved)
    assert refused.value.differences == (
        ("lanes", "8", "7"),
        ("seed", "1", "2"),
        ("compute_dtype", "float32", "bfloat16"),
    )


def test_opting_out_says_what_is_no_longer_promised(caplog: pytest.LogCaptureFixture) -> None:
    net, plain = model(), model()
    with caplog.at_level(logging.WARNING):
        stock = exact.Reducer(net, lanes=2, seed=0, stock=True)
    assert NOT_PROMISED in caplog.text
    folded = exact.Reducer(plain, lanes=2, seed=0)
    for each, one in ((net, stock), (plain, folded)):
        for lane in one.lanes(0):
            lane.backward(loss_of(each, 0, lane.number))
    # With one rank torch's own sum is the same one.
    assert are_equal(gradients(net), gradients(plain))
    assert float(stock.clip(0.1)) == pytest.approx(float(folded.clip(0.1)), rel=1e-6)
    with pytest.raises(ArithmeticDiffers, match="reduction"):
        stock.load_state_dict(folded.state_dict())


@pytest.mark.parametrize("stock", [False, True])
def test_closed_it_lets_the_model_go_and_gradients_are_torchs_own_again(stock: bool) -> None:
    net, plain = model().eval(), model().eval()
    reducer = exact.Reducer(net, lanes=LANES, seed=3, stock=stock)
    for lane in reducer.lanes(0):
        lane.backward(loss_of(net, 0, lane.number))
    held = weakref.ref(reducer)
    reducer.close()
    reducer.close()
    del reducer, lane
    gc.collect()
    assert held() is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())
    net.zero_grad()
    for each in (net, plain):
        loss_of(each, 0, 0).backward()  # type: ignore[no-untyped-call]
    assert are_equal(gradients(net), gradients(plain))


def test_closed_in_the_middle_of_a_step_it_gives_back_what_it_had_lent() -> None:
    net = model()
    before = torch.get_rng_state()
    reducer = exact.Reducer(net, lanes=LANES, seed=3, compute_dtype=torch.bfloat16)
    lanes = reducer.lanes(0)
    next(lanes)
    reducer.close()
    assert all(parameter.dtype == torch.float32 for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_scale_that_is_left_to_the_optimizer_is_the_one_that_would_have_been_applied() -> None:
    net, plain = model(), model()
    deferring = DeferringReducer(net, lanes=2, seed=0)
    scaling = exact.Reducer(plain, lanes=2, seed=0)
    for step in range(2):
        for each, one in ((net, deferring), (plain, scaling)):
            for lane in one.lanes(step):
                lane.backward(loss_of(each, step, lane.number))
        norms = deferring.clip(0.01), scaling.clip(0.01)
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
        for sums, scaled in zip(gradients(net), gradients(plain), strict=True):
            torch.testing.assert_close(sums * deferring.pending_scale.float(), scaled)
