"""The save planner can be exchanged: who writes a piece changes, what is saved does not."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import unbroken
from tests.unit.state.tiny import bits, job, model, quietly, tiny
from unbroken.errors import TensorUnsupported
from unbroken.state.index import Box
from unbroken.state.pieces import Held, Holding, agree_on, assign, spread_over
from unbroken.state.planners import BalanceBytes, BalanceTime, Holders, Piece, SavePlanner


def replicated(count: int, ranks: int, elements: int = 100) -> Holders:
    pieces = [Piece(f"w{number}", "float32", Box((0,), (elements,))) for number in range(count)]
    return dict.fromkeys(pieces, tuple(range(ranks)))


def load(chosen: Mapping[Piece, int], ranks: int) -> list[int]:
    return [sum(piece.size_bytes for piece, rank in chosen.items() if rank == each) for each in range(ranks)]


@pytest.mark.promise("M28")
def test_bytes_are_balanced_by_default_and_time_by_measured_speed() -> None:
    holders = replicated(120, 3)
    assert load(BalanceBytes().writers(holders, [0, 0, 0]), 3) == [16_000] * 3
    planner = BalanceTime()
    assert load(planner.writers(holders, [0, 0, 0]), 3) == [16_000] * 3
    # The disk of rank 2 writes a quarter as fast as the others.
    assert planner.learn([(16_000, 1.0), (16_000, 1.0), (16_000, 4.0)])
    found = load(planner.writers(holders, [0, 0, 0]), 3)
    assert sum(found) == 48_000 and abs(found[0] - found[1]) <= 400 and abs(found[2] * 4 - found[0]) <= 1_600
    # With that plan all take as long, and it stays.
    assert not planner.learn([(size, size / speed) for size, speed in zip(found, (16e3, 16e3, 4e3), strict=True)])


def test_a_rank_that_wrote_nothing_is_not_taken_for_a_slow_one() -> None:
    planner = BalanceTime()
    planner.learn([(1_000, 1.0), (0, 0.0)])
    assert planner.bytes_per_s == [1_000.0, 1_000.0]
    assert not planner.learn([(0, 0.0), (0, 0.0)])


class Careless:
    """Gives everything to one rank, whether it holds it or not."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def writers(self, holders: Holders, load: Sequence[int]) -> Mapping[Piece, int]:
        return {} if self.rank is None else dict.fromkeys(holders, self.rank)

    def learn(self, written: Sequence[tuple[int, float]]) -> bool:
        return False


@pytest.mark.promise("M28")
@pytest.mark.parametrize(("rank", "given"), [(2, "rank 2"), (None, "no rank")])
def test_a_planner_that_would_lose_a_piece_is_an_error(rank: int | None, given: str) -> None:
    one = Held("w", "float32", (4,), (Box((0,), (4,)),), "")
    held = [Holding.of([one]), Holding.of([one]), Holding.of([])]
    spreads = spread_over(held)
    with pytest.raises(TensorUnsupported, match=f"gave it to {given}"):
        assign(held, spreads, agree_on(spreads), Careless(rank))


@pytest.mark.promise("M28")
def test_a_run_saves_with_another_planner_and_resumes_without_it(tmp_path: Path) -> None:
    objects = tiny()
    planner = BalanceTime()
    job(tmp_path / "run", 4, quietly(planner=planner), **objects)
    # Both saves were measured.
    assert len(planner.bytes_per_s) == 1 and planner.bytes_per_s[0] > 0
    other = model(5)
    unbroken.load(tmp_path / "run", model=other)
    assert bits(other) == bits(objects["model"])
    with pytest.raises(ValueError, match=r"Settings\.planner is a int"):
        quietly(planner=3)
    assert unbroken.BalanceBytes is BalanceBytes and unbroken.SavePlanner is SavePlanner
