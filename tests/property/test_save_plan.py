"""The save plan of any world is the one made piece by piece: the same tensors, writers and order, or the same error."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import TensorUnsupported
from unbroken.state.index import Box, coverage_complaint
from unbroken.state.pieces import Held, Holding, Planned, agree_on, assign, bytes_of, spread_over
from unbroken.state.planners import Piece

# A mutated source only has to turn a test red; looking for the smallest example would cost a minute.
PLANS = settings(derandomize=True, max_examples=300, deadline=None, database=None)

Plan = tuple[dict[str, Planned], list[list[Piece]], int]


class Kind(NamedTuple):
    """A tensor of rows over some of the ranks, cut into so many boxes; ranks beyond that hold a copy."""

    dtype: str
    width: int
    boxes: int
    ranks: tuple[int, ...]


@st.composite
def worlds(draw: st.DrawFn) -> list[list[Held]]:
    """What each rank holds: tensors that are sharded, copied, both, empty, one under two names, or broken."""
    size = draw(st.integers(1, 5))
    held: list[list[Held]] = [[] for _ in range(size)]
    kinds: list[Kind] = []
    for number in range(draw(st.integers(1, 6))):
        ranks = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
        boxes = draw(st.integers(1, len(ranks)))
        kinds.append(Kind(draw(st.sampled_from(["float32", "int8"])), draw(st.integers(0, 3)), boxes, ranks))
        twin = draw(st.integers(0, number))
        kinds[number] = kind = kinds[twin]
        for place, rank in enumerate(kind.ranks):
            is_broken = draw(st.integers(0, 60)) == 0
            box = Box((place % kind.boxes, 0), (0 if is_broken else 1, kind.width))
            dtype = "int16" if draw(st.integers(0, 100)) == 0 else kind.dtype
            memory = f"t{twin if draw(st.integers(0, 8)) else number}" if box.elements else ""
            held[rank].append(Held(f"t{number}", dtype, (kind.boxes, kind.width), (box,), memory))
    return [draw(st.permutations(mine)) if draw(st.booleans()) else mine for mine in held]


def by_hand(held: Sequence[Sequence[Held]]) -> Plan:
    by_name: dict[str, dict[int, Held]] = {}
    for rank, mine in enumerate(held):
        for one in mine:
            by_name.setdefault(one.name, {})[rank] = one
    planned: dict[str, Planned] = {}
    for name, holders in by_name.items():
        first = next(iter(holders.values()))
        if any((one.dtype, one.shape) != (first.dtype, first.shape) for one in holders.values()):
            raise TensorUnsupported(name=name, reason="differs")
        if coverage_complaint(first.shape, list({box for one in holders.values() for box in one.boxes})):
            raise TensorUnsupported(name=name, reason="is not whole")
        other = next((one.same_as for one in holders.values() if one.same_as), name)
        twins = by_name.get(other, {})
        is_one = (
            other in planned
            and planned[other].same_as == other
            and twins.keys() == holders.keys()
            and all(
                one[1:4] == twins[rank][1:4] and one.same_as == (other if twins[rank].same_as else "")
                for rank, one in holders.items()
            )
        )
        planned[name] = Planned(first.dtype, first.shape, other if is_one else name)
    assigned = _assigned_by_hand(held, planned)
    return planned, assigned, sum(piece.size_bytes for pieces in assigned for piece in pieces)


def _assigned_by_hand(held: Sequence[Sequence[Held]], planned: dict[str, Planned]) -> list[list[Piece]]:
    holders: dict[Piece, list[int]] = {}
    for rank, mine in enumerate(held):
        for one in mine:
            for box in one.boxes if planned[one.name].same_as == one.name else ():
                if box.elements or not math.prod(one.shape):
                    holders.setdefault(Piece(one.name, one.dtype, box), []).append(rank)
    load, writers = [0] * len(held), {}
    for piece, ranks in sorted(holders.items(), key=lambda found: (len(found[1]) > 1, -found[0].size_bytes)):
        writers[piece] = min(ranks, key=lambda rank: (load[rank], rank))
        load[writers[piece]] += max(piece.size_bytes, 1)
    return [[piece for piece in holders if writers[piece] == rank] for rank in range(len(held))]


def planned_at_once(held: Sequence[Sequence[Held]]) -> Plan:
    holdings = [Holding.of(mine) for mine in held]
    spreads = spread_over(holdings)
    planned = agree_on(spreads)
    chosen = assign(holdings, spreads, planned)
    pieces = [list(one.pieces(list(planned), its)) for one, its in zip(holdings, chosen, strict=True)]
    return planned, pieces, bytes_of(planned)


@PLANS
@given(worlds())
def test_the_plan_is_the_one_made_piece_by_piece(held: list[list[Held]]) -> None:
    try:
        wanted = by_hand(held)
    except TensorUnsupported as refused:
        with pytest.raises(TensorUnsupported, match=f"the tensor '{refused.name}'"):
            planned_at_once(held)
        return
    planned, pieces, size_bytes = planned_at_once(held)
    assert list(planned.items()) == list(wanted[0].items())
    assert pieces == wanted[1]
    assert size_bytes == wanted[2]
