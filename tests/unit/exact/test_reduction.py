"""The fold adds what is there, in lane order, and nothing else: seen with ranks that are only told."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from unbroken.exact.exchange import RankGroup, Transfer
from unbroken.exact.reduction import ReplicatedFold
from unbroken.exact.stock import ReplicatedStock
from unbroken.exact.sums import _AT_ONCE, Accumulator, SumBuffers, put

Say = Callable[[torch.Tensor], torch.Tensor]
BIG, SMALL = 2.0**24, 1.0  # in float32, BIG + SMALL is BIG: another order is another sum


@dataclass(frozen=True)
class TwoRanks(RankGroup):
    """This rank and one whose slices are made up."""

    other: Say = torch.clone

    def swap(self, received: torch.Tensor, sent: torch.Tensor) -> Transfer:
        mine = sent.view(2, -1)[self.rank]
        theirs = self.other(mine)
        received.view(2, -1)[self.rank] = mine
        received.view(2, -1)[1 - self.rank] = theirs
        return Transfer(None)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Transfer:
        whole.view(2, -1).copy_(part.clone())
        return Transfer(None)


def folded(rank: int, rounds: list[tuple[float, float, int]]) -> float:
    """One parameter of two equal elements; each round says my gradient, the other's, and how many ranks have a lane."""
    parameter = nn.Parameter(torch.zeros(2))
    said = [0.0]
    ranks = TwoRanks(rank, 2, None, lambda mine: torch.full_like(mine, said[0]))
    fold = ReplicatedFold([parameter], lambda each: each.dtype, ranks)
    for number, (mine, other, present) in enumerate(rounds):
        said[0] = other
        fold.begin_round(present, is_first=number == 0, is_last=number == len(rounds) - 1)
        if rank < present:
            (parameter * torch.full_like(parameter, mine)).sum().backward()  # type: ignore[no-untyped-call]
        fold.end_round()
    fold.finish()
    assert parameter.grad is not None
    return parameter.grad[0].item()


@pytest.mark.parametrize("rank", [0, 1])
def test_lanes_are_added_in_their_order_whichever_rank_adds(rank: int) -> None:
    # In lane order: BIG, SMALL, SMALL, -BIG. The first rank's lanes are BIG and SMALL, the second's SMALL and -BIG.
    lanes = ((BIG, SMALL, 2), (SMALL, -BIG, 2))
    rounds = [(pair[rank], pair[1 - rank], pair[2]) for pair in lanes]
    expected = torch.tensor(0.0)
    for lane in (BIG, SMALL, SMALL, -BIG):
        expected = expected + torch.tensor(lane)
    assert folded(rank, rounds) == expected.item()
    assert expected.item() != BIG + SMALL + SMALL - BIG


def test_a_rank_without_a_lane_adds_nothing_not_even_a_zero() -> None:
    assert str(folded(0, [(-0.0, 0.0, 1)])) == "-0.0"
    assert folded(1, [(1.0, 2.0, 2), (9.0, 4.0, 1)]) == 2.0 + 1.0 + 4.0


def test_the_first_lane_is_taken_as_it_is_and_a_new_step_begins_afresh() -> None:
    total = Accumulator(1, torch.device("cpu"), SumBuffers())
    for _ in range(2):
        total.add(torch.tensor([-0.0]))
        assert str(total.tensor.item()) == "-0.0"
        total.add(torch.tensor([3.0], dtype=torch.bfloat16))
        assert total.tensor.tolist() == [3.0]
        total.give_up()


def test_a_narrow_part_is_added_piece_by_piece_as_if_at_once() -> None:
    part, start = torch.randn(_AT_ONCE * 2 + 5).bfloat16(), torch.randn(_AT_ONCE * 2 + 5)
    total = start.clone()
    put(total, part, is_first=False)
    assert torch.equal(total, start + part.float())


def test_a_part_that_is_not_there_is_one_of_zeros() -> None:
    for is_first in (True, False):
        absent, zeros = (torch.tensor([-0.0, 0.0, 3.0]) for _ in range(2))
        put(absent, None, is_first=is_first)
        put(zeros, torch.zeros(3), is_first=is_first)
        assert [str(each) for each in absent.tolist()] == [str(each) for each in zeros.tolist()]


def test_no_sum_outlives_its_step() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    fold = ReplicatedFold([parameter], lambda each: each.dtype, RankGroup(0, 1))
    for _ in range(2):
        nn.ParameterList([parameter]).zero_grad()
        fold.begin_round(1, is_first=True, is_last=True)
        assert not any(room.is_made for room in fold._sums)
        (parameter * 2.0).sum().backward()  # type: ignore[no-untyped-call]
        fold.end_round()
        fold.finish()
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [2.0] * 1000


@dataclass(frozen=True)
class LateRanks(TwoRanks):
    """Two ranks whose slices arrive when the test says so, as those of a step that was abandoned may."""

    late: list[Callable[[], object]] = field(default_factory=list)

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Transfer:
        self.late.append(lambda: whole.fill_(torch.nan))
        return super().gather(whole, part)

    def add_up_as_stock(self, numbers: torch.Tensor) -> Transfer:
        self.late.append(lambda: numbers.fill_(torch.nan))
        return Transfer(None)


@pytest.mark.parametrize("kind", [ReplicatedFold, ReplicatedStock])
def test_what_arrives_after_its_step_was_abandoned_is_in_no_sum(kind: type[ReplicatedFold | ReplicatedStock]) -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    ranks = LateRanks(0, 2, None)
    fold = kind(parameters, lambda each: each.dtype, ranks, bucket_bytes=1)
    for is_abandoned in (True, False):
        fold.begin_round(2, is_first=True, is_last=True)
        for parameter in parameters:
            (parameter * 3.0).sum().backward()  # type: ignore[no-untyped-call]
        fold.end_round()
        if is_abandoned:
            fold.abandon()
            late = ranks.late.copy()
            assert len(late) == len(parameters)
    for arrive in late:
        arrive()
    fold.finish()
    each_sum = 6.0 if kind is ReplicatedFold else 3.0  # the other rank's share of a stock sum never comes
    assert [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None] == [[each_sum] * 2] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 1_000, 1_024, 5_003])
def test_on_a_gpu_a_narrow_part_is_widened_and_added(dtype: torch.dtype, count: int) -> None:
    first, second = (torch.randn(count + 1).to(dtype).cuda()[1:] for _ in range(2))
    first[0] = -0.0
    total = torch.full((count,), torch.nan, device="cuda")
    put(total, first, is_first=True)
    assert torch.equal(total, first.float())
    assert torch.signbit(total[0])
    put(total, second, is_first=False)
    assert torch.equal(total, first.float() + second.float())
