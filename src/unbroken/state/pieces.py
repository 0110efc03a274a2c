"""Who writes what: the local shards of every rank, as one list of pieces without duplicates.

PyTorch's distributed checkpoint knows what a rank holds of each tensor. Rank 0 gathers that, decides who writes what,
and sends each rank its own part of the plan, so that no rank but the first receives or holds what grows with the number
of ranks. A piece that several ranks hold is written by the one with the least to write; tensors that are one tensor
under several names are written once. Another planner (``planners.py``) may choose another holder. The plan stays valid
while names, dtypes, shapes and placements stay the same, and a save that finds it so exchanges nothing but one vote.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import torch

# FSDP1 hands out this class, and this is the only name it has; if it moves, so do FSDP1's own imports.
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from unbroken.errors import RankFailed, TensorUnsupported
from unbroken.state.fingerprint import key_table
from unbroken.state.index import DTYPES, Box, coverage_complaint, dtype_name
from unbroken.state.mixing import Numbers
from unbroken.state.planners import DEFAULT, Piece, SavePlanner, require_holders
from unbroken.torch_private import ShardedTensor, is_wrapper_subclass
from unbroken.world import World

# Most tensors are of these, and there may be tens of thousands: they take a short cut on the way to a save.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_KEPT: Final = frozenset(DTYPES.values())


class Held(NamedTuple):
    """What one rank holds of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    # The first name on this rank under which the very same memory is held; empty where there is no memory to compare.
    same_as: str


class TensorLayout(NamedTuple):
    """How a tensor lies on one rank: what the whole tensor is, and the boxes of it that are here."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Holding:
    """All that one rank holds, by column: ten thousand tensors have a few layouts, and each is sent and hashed once."""

    names: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]
    # By name: which of the layouts, and the name as in ``Held.same_as``.
    layout_of: tuple[int, ...]
    same_as: tuple[str, ...]

    @classmethod
    def of(cls, held: Sequence[Held]) -> "Holding":
        """The same as a list of tensors."""
        numbers: dict[TensorLayout, int] = {}
        layout_of = tuple(
            numbers.setdefault(TensorLayout(one.dtype, one.shape, one.boxes), len(numbers)) for one in held
        )
        return cls(tuple(one.name for one in held), tuple(numbers), layout_of, tuple(one.same_as for one in held))

    def pieces(self, names: Sequence[str], chosen: "Chosen") -> tuple[Piece, ...]:
        """What this rank is to write, from the names of all tensors of the plan in their order."""
        layouts = {name: self.layouts[number] for name, number in zip(self.names, self.layout_of, strict=True)}
        return tuple(
            Piece(names[tensor], layouts[names[tensor]].dtype, layouts[names[tensor]].boxes[box])
            for tensor, box in zip(chosen.tensors, chosen.boxes, strict=True)
        )


@dataclass(frozen=True)
class Chosen:
    """The pieces that one rank writes, as numbers: rank and rank 0 both know the names and boxes they stand for."""

    # Which tensor of the plan, and which of the boxes that the rank holds of it.
    tensors: list[int] = field(default_factory=list)
    boxes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
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

    @cached_property
    def keys(self) -> Numbers:
        """What goes into the fingerprint of each tensor beside its elements, a line each; true for every save."""
        return key_table((name, DTYPES[planned.dtype], planned.shape) for name, planned in self.tensors.items())

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank writes."""
        return self.pieces_by_rank[self.rank]

    @property
    def size_bytes(self) -> int:
        """The bytes of this rank's elements."""
        return sum(piece.size_bytes for piece in self.pieces)

    def part_names(self, files: int | None) -> tuple[str, ...]:
        """The parts that all ranks together will write, each into so many files; on rank 0."""
        return tuple(
            part_name(rank, number)
            for rank, pieces in enumerate(self.pieces_by_rank)
            for number in range(number_of_files(pieces, files))
        )


# From this size on a file is written past the page cache, and the next file is worth its while.
LARGE_BYTES: Final = 64 << 20
MOST_FILES: Final = 2


def number_of_files(pieces: Sequence[Piece], files: int | None) -> int:
    """Into how many files a rank writes its pieces; None: one for each ``LARGE_BYTES``, at most two.

    Measured on local disks with direct I/O, two are within a tenth of the best number, whichever that is on the day.
    """
    if files is None:
        files = max(1, min(MOST_FILES, sum(piece.size_bytes for piece in pieces) // LARGE_BYTES))
    if files < 1:
        raise ValueError(f"a rank writes into at least one file, not {files}")
    return min(files, len(pieces))


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
    first = first_names(tensors)
    structure = structure_of(tensors, first)
    # A rank alone cannot know: what it writes depends on what the others hold.
    if cached is not None and not world.any_rank(is_stale or structure != cached.structure):
        return cached
    with _refused_alike(is_of_rank=True):
        mine = world.all_or_none(lambda: Holding.of(held_by(tensors, first)))
    held = world.gather(mine)
    assigned: list[Chosen] = []

    def decide() -> tuple[dict[str, Planned], int]:
        spreads = spread_over(held)
        planned = agree_on(spreads)
        assigned.extend(assign(held, spreads, planned, planner))
        return planned, bytes_of(planned)

    with _refused_alike(is_of_rank=False):
        planned, total_bytes = world.from_first(decide)
    names = list(planned)
    chosen = world.scatter(assigned)
    if world.is_first:
        pieces_by_rank = tuple(one.pieces(names, its) for one, its in zip(held, assigned, strict=True))
    else:
        nothing: tuple[Piece, ...] = ()
        pieces_by_rank = (nothing,) * world.rank + (mine.pieces(names, chosen),)
        pieces_by_rank += (nothing,) * (world.size - world.rank - 1)
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


def structure_of(tensors: Mapping[str, torch.Tensor], first: Mapping[str, str]) -> tuple[object, ...]:
    """All that a plan depends on, cheap to compute and to compare: by column, so that no tensor has an object of it.

    ``first`` are the names as ``first_names`` finds them.
    """
    # Each shape once: most tensors share one, and every object that stays is looked at by the garbage collector.
    shapes: dict[torch.Size, torch.Size] = {}
    return (
        tuple(tensors),
        tuple(tensor.dtype for tensor in tensors.values()),
        tuple(shapes.setdefault(shape, shape) for shape in (tensor.shape for tensor in tensors.values())),
        tuple(first[name] for name in tensors),
        tuple(_placement(tensor) for tensor in tensors.values()),
    )


def local_piece(tensors: Mapping[str, torch.Tensor], name: str, box: Box) -> torch.Tensor:
    """This rank's memory of a box that it holds."""
    if type(tensors[name]) in _PLAIN:
        return tensors[name].detach()
    found = find_state_dict_object({name: tensors[name]}, MetadataIndex(name, box.offsets))
    assert isinstance(found, torch.Tensor)
    return found.detach()


def held_by(tensors: Mapping[str, torch.Tensor], first: Mapping[str, str] | None = None) -> list[Held]:
    """What this rank holds of each tensor; ``first`` are the names as ``first_names`` finds them, where they are known.

    Raises:
        TensorUnsupported: a tensor is of a kind that cannot be kept.
    """
    first = first_names(tensors) if first is None else first
    whole: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[Box, ...]]] = {}
    held = []
    for name, tensor in tensors.items():
        require_supported(name, tensor)
        if type(tensor) in _PLAIN:
            # What torch would say of it, without the objects that torch makes to say it.
            if (known := whole.get(tensor.shape)) is None:
                shape = tuple(tensor.shape)
                known = whole[shape] = shape, (Box((0,) * len(shape), shape),)
            held.append(Held(name, dtype_name(tensor.dtype), *known, first[name]))
            continue
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
    if type(tensor) in _PLAIN and _is_ordinary(tensor):
        return
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
        if _shares_elements(local):
            raise TensorUnsupported(name=name, reason="several of its elements are the same memory; clone() it")


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is one of the many that need no closer look; False says nothing."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_nested
        and not tensor.is_meta
        and tensor.dtype in _KEPT
    )


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions along which all elements are one in memory, as ``expand`` makes them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def _shares_elements(local: torch.Tensor) -> bool:
    """Whether windows overlap, as ``unfold`` makes them: they have more elements than there are in the memory below."""
    if not local.numel():
        return False
    rows = [(size, stride) for size, stride in zip(local.shape, local.stride(), strict=True) if stride]
    return math.prod(size for size, _ in rows) > 1 + sum((size - 1) * stride for size, stride in rows)


def _keeps_data_elsewhere(local: torch.Tensor) -> bool:
    return type(local) not in _PLAIN and is_wrapper_subclass(local)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is torch's own kind and no other: then it is all here, and all of it in one place."""
    return type(tensor) in _PLAIN


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


def copies_of(tensor: torch.Tensor, world_size: int) -> int:
    """How many ranks hold the same elements as this one."""
    if isinstance(tensor, ShardedTensor):
        return 1
    if not isinstance(tensor, DTensor):
        return world_size
    mesh = tensor.device_mesh
    along = [mesh.size(dim) for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return math.prod(along) * max(1, world_size // mesh.size())


def _placement(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        return (tensor.placements, tensor.device_mesh)
    if isinstance(tensor, ShardedTensor):
        shards = [shard.metadata for shard in tensor.local_shards()]
        return tuple((tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards)
    return ()


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one for the same memory with the same layout; "" where there is no memory."""
    starts = [_start(tensor) for tensor in tensors.values()]
    several = {start for start, names in Counter(starts).items() if names > 1 or start is None}
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for (name, tensor), start in zip(tensors.items(), starts, strict=True):
        # Nothing else begins where most tensors begin, so that nothing else can be the same memory.
        if start not in several:
            found[name] = name
        else:
            found[name] = "" if (key := _memory(tensor)) is None else first.setdefault(key, name)
    return found


def _start(tensor: torch.Tensor) -> int | None:
    """Where the memory of a plain tensor begins; None for one that needs a closer look."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel():
        return tensor.data_ptr()
    return None


def _memory(tensor: torch.Tensor) -> object | None:
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        if not tensor.numel():
            return None
        return (
            tensor.data_ptr(),
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
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


# ---- decisions of rank 0 ----

# A job of 512 ranks with 10,000 sharded tensors has five million pieces. Tensors are spread over the ranks in a few
# ways only, so that what costs time is worked out once for each way, and not for each piece.


@dataclass(frozen=True, eq=False)
class Way:
    """One way in which tensors are spread over the ranks: who holds them, and each in which layout."""

    ranks: tuple[int, ...]
    layouts: tuple[TensorLayout, ...]

    @cached_property
    def complaint(self) -> str | None:
        """Why this cannot be saved: the ranks do not agree on what a tensor is, or do not hold all of it."""
        first = self.layouts[0]
        for rank, one in zip(self.ranks, self.layouts, strict=True):
            if (one.dtype, one.shape) != (first.dtype, first.shape):
                seen = f"rank {self.ranks[0]} has {first.dtype} {list(first.shape)}, rank {rank} has"
                return f"{seen} {one.dtype} {list(one.shape)}"
        return coverage_complaint(first.shape, list(dict.fromkeys(box for one in self.layouts for box in one.boxes)))

    @cached_property
    def holders(self) -> dict[Box, list[int]]:
        """The ranks that hold each box that is to be written, in their order."""
        is_empty = not math.prod(self.layouts[0].shape)
        found: dict[Box, list[int]] = {}
        for rank, one in zip(self.ranks, self.layouts, strict=True):
            for box in one.boxes:
                if box.elements or is_empty:
                    found.setdefault(box, []).append(rank)
        return found

    @cached_property
    def by_first_holder(self) -> dict[int, list[Box]]:
        """The boxes under the first rank that holds them."""
        found: dict[int, list[Box]] = {}
        for box, ranks in self.holders.items():
            found.setdefault(ranks[0], []).append(box)
        return found

    @cached_property
    def numbers(self) -> dict[int, dict[Box, int]]:
        """Which of the boxes that a rank holds each is."""
        by_rank = zip(self.ranks, self.layouts, strict=True)
        return {rank: {box: number for number, box in enumerate(one.boxes)} for rank, one in by_rank}

    def load(self, box: Box) -> int:
        """What a box adds to the work of its writer: its bytes; an empty one has to be written too."""
        return max(box.elements * DTYPES[self.layouts[0].dtype].itemsize, 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """How one tensor is spread over the ranks; ``same_as`` is what each of them says of its memory."""

    way: Way
    same_as: list[str]


def spread_over(held: Sequence[Holding]) -> dict[str, Spread]:
    """How each tensor is spread, by what each rank holds, in the order in which the ranks name them."""
    if len(held) == 1:
        (mine,) = held
        alone = [Way((0,), (layout,)) for layout in mine.layouts]
        rows = zip(mine.names, mine.layout_of, mine.same_as, strict=True)
        return {name: Spread(alone[layout], [same_as]) for name, layout, same_as in rows}
    numbers: dict[TensorLayout, int] = {}
    columns: dict[str, tuple[list[int], list[int], list[str]]] = {}
    for rank, mine in enumerate(held):
        known = [numbers.setdefault(layout, len(numbers)) for layout in mine.layouts]
        for name, layout, same_as in zip(mine.names, mine.layout_of, mine.same_as, strict=True):
            if (column := columns.get(name)) is None:
                column = columns[name] = ([], [], [])
            column[0].append(rank)
            column[1].append(known[layout])
            column[2].append(same_as)
    layouts = list(numbers)
    ways: dict[tuple[tuple[int, ...], tuple[int, ...]], Way] = {}
    found: dict[str, Spread] = {}
    for name, (ranks, of_ranks, memories) in columns.items():
        key = (tuple(ranks), tuple(of_ranks))
        if (way := ways.get(key)) is None:
            way = ways[key] = Way(key[0], tuple(layouts[number] for number in of_ranks))
        found[name] = Spread(way, memories)
    return found


def agree_on(spreads: Mapping[str, Spread]) -> dict[str, Planned]:
    """The tensors that all ranks together hold.

    Raises:
        TensorUnsupported: the ranks do not agree on what a tensor is, or do not hold all of it.
    """
    planned: dict[str, Planned] = {}
    for name, spread in spreads.items():
        if spread.way.complaint:
            raise TensorUnsupported(name=name, reason=spread.way.complaint)
        first = spread.way.layouts[0]
        planned[name] = Planned(first.dtype, first.shape, _written_as(name, spreads, planned))
    return planned


def _written_as(name: str, spreads: Mapping[str, Spread], planned: Mapping[str, Planned]) -> str:
    """The name under which a tensor is written: another one only if they are one tensor on every rank."""
    mine = spreads[name]
    other = next(filter(None, mine.same_as), name)
    if other == name or other not in planned or planned[other].same_as != other:
        return name
    twin = spreads[other]
    # Where a rank holds nothing of them, it has no memory to compare.
    is_one = twin.way is mine.way and mine.same_as == [other if same_as else "" for same_as in twin.same_as]
    return other if is_one else name


def assign(
    held: Sequence[Holding],
    spreads: Mapping[str, Spread],
    planned: Mapping[str, Planned],
    planner: SavePlanner = DEFAULT,
) -> list[Chosen]:
    """Give every piece to one of its holders; of several, to the one that the planner chooses.

    Raises:
        TensorUnsupported: the planner left a piece out, or gave it to a rank that does not hold it.
    """
    ways = {name: spreads[name].way for name, one in planned.items() if one.same_as == name}
    numbers = {name: number for number, name in enumerate(planned)}
    load = [0] * len(held)
    for way, count in Counter(ways.values()).items():
        for box, ranks in way.holders.items():
            if len(ranks) == 1:
                load[ranks[0]] += count * way.load(box)
    offers = [(name, box, ranks) for name, _, box, ranks in _offers(held, ways) if len(ranks) > 1]
    shared = {Piece(name, planned[name].dtype, box): ranks for name, box, ranks in offers}
    writers = planner.writers(shared, load)
    require_holders(writers, shared)
    assigned = [Chosen() for _ in held]
    for name, way, box, ranks in _offers(held, ways):
        writer = ranks[0] if len(ranks) == 1 else writers[Piece(name, planned[name].dtype, box)]
        assigned[writer].tensors.append(numbers[name])
        assigned[writer].boxes.append(way.numbers[writer][box])
    return assigned


def _offers(held: Sequence[Holding], ways: Mapping[str, Way]) -> Iterator[tuple[str, Way, Box, list[int]]]:
    """Every box of every tensor once, with the ranks that could write it, in the order in which the ranks name them."""
    for rank, mine in enumerate(held):
        for name in mine.names:
            if (way := ways.get(name)) is not None:
                for box in way.by_first_holder.get(rank, ()):
                    yield name, way, box, way.holders[box]


def bytes_of(planned: Mapping[str, Planned]) -> int:
    """The bytes of all elements, those of one tensor under several names once."""
    return sum(
        math.prod(one.shape) * DTYPES[one.dtype].itemsize for name, one in planned.items() if one.same_as == name
    )
