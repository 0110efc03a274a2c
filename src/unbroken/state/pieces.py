"""Who writes what: the local shards of every rank, as one list of pieces without duplicates.

PyTorch's distributed checkpoint knows what a rank holds of each tensor. Rank 0 gathers that, decides who writes what,
and sends each rank its own part of the plan, so that no rank but the first receives or holds what grows with the number
of ranks. A piece that several ranks hold is written by the one with the least to write; tensors that are one tensor
under several names are written once. Another planner (``planners.py``) may choose another holder. The plan stays valid
while names, dtypes, shapes and placements stay the same, and a save that finds it so exchanges nothing but one vote.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

# FSDP1 hands out this class, and this is the only name it has; if it moves, so do FSDP1's own imports.
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unbroken.errors import RankFailed, TensorUnsupported
from unbroken.state.index import DTYPES, Box, coverage_complaint, dtype_name
from unbroken.state.planners import DEFAULT, Piece, SavePlanner, require_holders
from unbroken.world import World

# Most tensors are of these, and there may be tens of thousands: they take a short cut on the way to a save.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class Held(NamedTuple):
    """What one rank holds of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    # The first name on this rank under which the very same memory is held; empty where there is no memory to compare.
    same_as: str


@dataclass(frozen=True)
class Planned:
    """One tensor in the plan; ``same_as`` is the name under which it is written."""

    dtype: str
    shape: tuple[int, ...]
    same_as: str


@dataclass(frozen=True)
class SavePlan:
    """What every rank writes, and the structure it was made for.

    ``tensors`` and ``total_bytes`` are the same on every rank. ``pieces_by_rank`` is complete on rank 0; on another
    rank only its own pieces are filled in.
    """

    rank: int
    tensors: Mapping[str, Planned]
    pieces_by_rank: tuple[tuple[Piece, ...], ...]
    structure: tuple[object, ...]
    total_bytes: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank writes."""
        return self.pieces_by_rank[self.rank]

    @property
    def size_bytes(self) -> int:
        """The bytes of this rank's elements."""
        return sum(piece.size_bytes for piece in self.pieces)

    def part_names(self, files: int) -> tuple[str, ...]:
        """The parts that all ranks together will write, each into so many files; on rank 0."""
        return tuple(
            part_name(rank, number)
            for rank, pieces in enumerate(self.pieces_by_rank)
            for number in range(min(files, len(pieces)))
        )


def part_name(rank: int, number: int) -> str:
    """The name of a rank's part; the one that stock tools give it."""
    return f"state/__{rank}_{number}.distcp"


def plan_save(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    cached: SavePlan | None = None,
    *,
    planner: SavePlanner = DEFAULT,
    is_stale: bool = False,
) -> SavePlan:
    """Agree on who writes what. Collective: every rank calls it at the same place, with a cached plan or without.

    ``is_stale`` on any rank makes all of them plan anew.

    Raises:
        TensorUnsupported: a tensor is of a kind that cannot be kept, or the ranks do not agree on what it is.
    """
    structure = structure_of(tensors)
    # A rank alone cannot know: what it writes depends on what the others hold.
    if cached is not None and not world.any_rank(is_stale or structure != cached.structure):
        return cached
    with _refused_alike(is_of_rank=True):
        mine = world.all_or_none(lambda: held_by(tensors))
    held = world.gather(mine)
    assigned: list[list[Piece]] = []

    def decide() -> tuple[dict[str, Planned], int]:
        planned = agree_on(held)
        assigned.extend(assign(held, planned, planner))
        return planned, sum(piece.size_bytes for pieces in assigned for piece in pieces)

    with _refused_alike(is_of_rank=False):
        planned, total_bytes = world.from_first(decide)
    if world.is_first:
        pieces_by_rank = tuple(map(tuple, assigned))
        world.scatter([chosen_of(theirs, pieces) for theirs, pieces in zip(held, assigned, strict=True)])
    else:
        # Numbers instead of pieces: this rank knows the names and boxes of what it holds.
        chosen: list[int] = world.scatter(())
        offered = [Piece(one.name, one.dtype, box) for one, box in _boxes(mine)]
        empty: list[tuple[Piece, ...]] = [()] * world.size
        empty[world.rank] = tuple(offered[number] for number in chosen)
        pieces_by_rank = tuple(empty)
    return SavePlan(world.rank, planned, pieces_by_rank, structure, total_bytes)


@contextlib.contextmanager
def _refused_alike(*, is_of_rank: bool) -> Iterator[None]:
    """Raise on every rank what one of them has refused; ``is_of_rank`` says whether it is about that rank's tensor."""
    try:
        yield
    except RankFailed as failed:
        if not isinstance(failed.cause, TensorUnsupported):
            raise
        name, reason = failed.cause.name, failed.cause.reason
        raise TensorUnsupported(name=name, reason=reason, rank=failed.rank if is_of_rank else None) from failed


def chosen_of(held: Sequence[Held], pieces: Sequence[Piece]) -> list[int]:
    """Which of the boxes that a rank holds, counted through, it writes."""
    numbers = {(one.name, box): number for number, (one, box) in enumerate(_boxes(held))}
    return [numbers[piece.name, piece.box] for piece in pieces]


def _boxes(held: Sequence[Held]) -> Iterator[tuple[Held, Box]]:
    return ((one, box) for one in held for box in one.boxes)


def structure_of(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """All that a plan depends on, cheap to compute and to compare."""
    first = _first_names(tensors)
    return tuple(
        (name, tensor.dtype, tensor.shape, first[name], *_placement(tensor)) for name, tensor in tensors.items()
    )


def local_piece(tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    """This rank's memory of a box that it holds."""
    if type(tensors[name]) in _PLAIN:
        return tensors[name].detach()
    found = find_state_dict_object({name: tensors[name]}, MetadataIndex(name, box.offsets))
    assert isinstance(found, torch.Tensor)
    return found.detach()


def held_by(tensors: Mapping[str, torch.Tensor]) -> list[Held]:
    """What this rank holds of each tensor.

    Raises:
        TensorUnsupported: a tensor is of a kind that cannot be kept.
    """
    first = _first_names(tensors)
    held = []
    for name, tensor in tensors.items():
        require_supported(name, tensor)
        items = create_default_local_save_plan({name: tensor}, False).items
        boxes = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
        if boxes:
            mine = tuple(Box(tuple(box.offsets), tuple(box.sizes)) for box in boxes)
            held.append(Held(name, dtype_name(tensor.dtype), tuple(tensor.shape), mine, first[name]))
    return held


def require_supported(name: str, tensor: torch.Tensor) -> None:
    """Pass if a tensor is of a kind that a checkpoint can hold.

    Raises:
        TensorUnsupported: it is not.
    """
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise TensorUnsupported(name=name, reason="it is a partial sum that no rank holds whole")
    for local in local_tensors(tensor):
        if local.layout is not torch.strided or local.is_nested:
            raise TensorUnsupported(name=name, reason=f"its layout is {str(local.layout).removeprefix('torch.')}")
        if dtype_name(local.dtype) not in DTYPES:
            raise TensorUnsupported(name=name, reason=f"its dtype is {dtype_name(local.dtype)}")
        if local.device.type == "meta":
            raise TensorUnsupported(name=name, reason="it is on the meta device and has no elements")
        if _keeps_data_elsewhere(local):
            raise TensorUnsupported(name=name, reason=f"it is a {type(local).__name__}, whose bytes are elsewhere")


def _keeps_data_elsewhere(local: torch.Tensor) -> bool:
    return type(local) not in _PLAIN and is_traceable_wrapper_subclass(local)


def local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The memory of this rank behind a tensor: one, or for a ``ShardedTensor`` as many as it has shards here."""
    if type(tensor) in _PLAIN:
        return [tensor]
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return [tensor.to_local()]
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


def _placement(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return (tensor.placements, tensor.device_mesh)
    if isinstance(tensor, ShardedTensor):
        shards = [shard.metadata for shard in tensor.local_shards()]
        return tuple((tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards)
    return ()


def _first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one for the same memory with the same layout; "" where there is no memory."""
    first: dict[object, str] = {}
    return {
        name: "" if (key := _memory(tensor)) is None else first.setdefault(key, name)
        for name, tensor in tensors.items()
    }


def _memory(tensor: torch.Tensor) -> object | None:
    locals_ = local_tensors(tensor)
    if any(local.layout is not torch.strided or _keeps_data_elsewhere(local) for local in locals_):
        return None
    if not any(local.numel() for local in locals_):
        return None
    where = tuple(
        (local.data_ptr(), local.device, local.shape, local.stride(), local.is_conj(), local.is_neg())
        for local in locals_
    )
    return (where, tensor.dtype, tensor.shape, _placement(tensor))


def agree_on(held: Sequence[Sequence[Held]]) -> dict[str, Planned]:
    """The tensors that all ranks together hold, by what each of them reports.

    Raises:
        TensorUnsupported: the ranks do not agree on what a tensor is, or do not hold all of it.
    """
    by_name: dict[str, dict[int, Held]] = {}
    for rank, mine in enumerate(held):
        for one in mine:
            by_name.setdefault(one.name, {})[rank] = one
    planned: dict[str, Planned] = {}
    for name, holders in by_name.items():
        (first_rank, first), *others = holders.items()
        for rank, one in others:
            if (one.dtype, one.shape) != (first.dtype, first.shape):
                seen = f"rank {first_rank} has {first.dtype} {list(first.shape)}, rank {rank} has"
                raise TensorUnsupported(name=name, reason=f"{seen} {one.dtype} {list(one.shape)}")
        boxes = {box for one in holders.values() for box in one.boxes}
        if complaint := coverage_complaint(first.shape, list(boxes)):
            raise TensorUnsupported(name=name, reason=complaint)
        planned[name] = Planned(first.dtype, first.shape, _written_as(name, by_name, planned))
    return planned


def _written_as(name: str, by_name: Mapping[str, Mapping[int, Held]], planned: Mapping[str, Planned]) -> str:
    """The name under which a tensor is written: another one only if they are one tensor on every rank."""
    holders = by_name[name]
    other = next((one.same_as for one in holders.values() if one.same_as), name)
    if other == name or other not in planned or planned[other].same_as != other:
        return name
    twins = by_name[other]
    is_one = twins.keys() == holders.keys() and all(
        one.boxes == twins[rank].boxes and one.same_as == (other if twins[rank].same_as else "")
        for rank, one in holders.items()
    )
    return other if is_one else name


def assign(
    held: Sequence[Sequence[Held]], planned: Mapping[str, Planned], planner: SavePlanner = DEFAULT
) -> list[list[Piece]]:
    """Give every piece to one of its holders, as the planner chooses.

    Raises:
        TensorUnsupported: the planner left a piece out, or gave it to a rank that does not hold it.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, mine in enumerate(held):
        for one in mine:
            if planned[one.name].same_as != one.name:
                continue
            for box in one.boxes:
                if box.elements or not math.prod(one.shape):
                    holders.setdefault(Piece(one.name, one.dtype, box), []).append(rank)
    writer = planner.writers(holders, len(held))
    require_holders(writer, holders)
    assigned: list[list[Piece]] = [[] for _ in held]
    for piece in holders:
        assigned[writer[piece]].append(piece)
    return assigned
