"""Fingerprints of live tensors: the same however a tensor is sharded, on any device and any number of ranks.

A tensor's fingerprint is 128 bits over its name, its dtype, its global shape and, for each element, its place in the
whole tensor and its bits. It is a sum over elements, so each rank adds what it holds and one exchange of integers
gives the whole; what several ranks hold is counted once. It finds accidents (a flipped bit, an exchanged element, a
tensor that was never loaded); it does not protect against forgery. ``mixing`` owns the arithmetic.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from unbroken.errors import Bug
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.mixing import Add, Keys, add_box, arithmetic, signed
from unbroken.torch_private import ShardedTensor
from unbroken.world import World

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class CountedBelow:
    """Of this rank's boxes, those that a lower rank counts; found by the first count, valid for the same placements."""

    boxes: Mapping[str, Collection[Box]] | None = None


@torch.no_grad()
def fingerprints(
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    own: Collection[str] = (),
    below: CountedBelow | None = None,
) -> dict[str, str]:
    """The fingerprint of every tensor of every rank, by name; the same on all ranks. Collective.

    Args:
        tensors: this rank's live tensors. A plain tensor that several ranks have is taken to be equal on them, and
            each of them hashes a slice of it.
        world: the ranks.
        own: the names that no other rank has; each is hashed whole where it is.
        below: what an earlier count of tensors with the same placements on all ranks has found out, so that boxes are
            exchanged once and not at every save.

    Raises:
        Bug: a tensor is of a kind that holds no elements of the whole, such as a partial sum.
    """
    shared = sorted(tensors.keys() - set(own))
    below = below or CountedBelow()
    is_first_count = below.boxes is None
    said = world.gather_or_none(lambda: _saying(tensors, shared, own, world, with_boxes=is_first_count))
    counted_below = _counted_below(said, world.rank) if below.boxes is None else below.boxes
    below.boxes = counted_below
    holders: dict[str, list[int]] | None = None
    if len({digest for digest, _, _ in said}) > 1:  # pipeline stages have different tensors
        holders = _holders(world.all_gather(shared))
    names = shared if holders is None else sorted(holders)

    def counted() -> torch.Tensor:
        tally = _Tally(len(names))
        for row, name in enumerate(names):
            if name in tensors:
                ranks = range(world.size) if holders is None else holders[name]
                share, seen = (ranks.index(world.rank), len(ranks)), counted_below.get(name)
                with asking_for_memory():
                    _contribute(name, tensors[name], tally, row, share=share, seen=seen)
        return tally.read()

    # On all ranks or on none: counting needs memory, and the others would wait for the sums of one that has none.
    mine = world.all_or_none(counted)
    summed = world.add_up(mine).tolist()
    found = {name: _text(sums) for name, sums in zip(names, summed, strict=True)}
    for _, theirs, _ in said:
        found.update(theirs)
    return found


_Saying = tuple[str, dict[str, str], dict[str, list[Box]]]


def _saying(
    tensors: Mapping[str, torch.Tensor], shared: Sequence[str], own: Collection[str], world: World, *, with_boxes: bool
) -> _Saying:
    """What one rank sends the others first: a digest of its names, the fingerprints of its own tensors, its boxes."""
    with asking_for_memory():
        prints = {name: _text(contribution(name, tensors[name])) for name in sorted(own)}
    compared = shared if with_boxes else ()
    boxes = {name: held for name in compared if (held := _boxes_to_compare(tensors[name], world)) is not None}
    return _names_digest(shared), prints, boxes


def _counted_below(said: Sequence[_Saying], rank: int) -> dict[str, set[Box]]:
    """Of each tensor whose boxes are compared, those of this rank that a lower one holds too."""
    found: dict[str, set[Box]] = {}
    for name, mine in said[rank][2].items():
        held = set(mine)
        found[name] = {box for _, _, theirs in said[:rank] for box in theirs.get(name, ()) if box in held}
    return found


@torch.no_grad()
def contribution(name: str, tensor: torch.Tensor, *, rank: int = 0, size: int = 1) -> tuple[int, int]:
    """What one rank of a world adds to the two sums of a tensor; the sums over all ranks, modulo 2**64, are its print.

    Raises:
        Bug: the tensor is of a kind that holds no elements of the whole, such as a partial sum.
    """
    tally = _Tally(1)
    _contribute(name, tensor, tally, 0, share=(rank, size))
    first, second = tally.read()[0].tolist()
    return first, second


@torch.no_grad()
def box_sums(name: str, box: torch.Tensor, offsets: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
    """What one box of a tensor adds to its two sums, on any rank; ``print_of`` puts them together."""
    total = torch.zeros(2, dtype=torch.int64, device=box.device)
    keys = keys_of(name, box.dtype, whole)
    add_box(total, box, whole=whole, offsets=offsets, keys=keys, add=arithmetic(box.device))
    first, second = total.tolist()
    return first, second


def print_of(name: str, dtype: torch.dtype, shape: Sequence[int], boxes: Iterable[Sequence[int]]) -> str:
    """The fingerprint of a tensor from the sums of the boxes that fill it."""
    keys = keys_of(name, dtype, shape)
    sums = [(keys.first, keys.second), *boxes]
    return _text([sum(first for first, _ in sums), sum(second for _, second in sums)])


def combine(prints: Mapping[str, str]) -> str:
    """One digest over the fingerprints of all tensors, in whatever order they are given."""
    return _digest(sorted(prints.items()), 16).hex()


def keys_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Keys:
    """The two numbers for a tensor's name, dtype and global shape."""
    digest = _digest([name, str(dtype).removeprefix("torch."), list(shape)], 16)
    return Keys(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


class _Tally:
    """Two sums a tensor on each device that holds some of them, read in one go so that the devices never wait."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._adds: dict[torch.device, Add] = {}

    def sums(self, device: torch.device, row: int) -> torch.Tensor:
        """The sums of one tensor on a device."""
        if device not in self._sums:
            self._sums[device] = torch.zeros(self._count, 2, dtype=torch.int64, device=device)
        return self._sums[device][row]

    def add(self, device: torch.device) -> Add:
        """What adds to sums on a device."""
        if device not in self._adds:
            self._adds[device] = arithmetic(device)
        return self._adds[device]

    def read(self) -> torch.Tensor:
        """The sums of all tensors over all devices, on the CPU."""
        total = torch.zeros(self._count, 2, dtype=torch.int64, device="cpu")
        for sums in self._sums.values():
            total += sums.cpu()
        return total


def _contribute(
    name: str,
    tensor: torch.Tensor,
    tally: _Tally,
    row: int,
    *,
    share: tuple[int, int],
    seen: Collection[Box] | None = None,
) -> None:
    """Add what this rank counts of a tensor.

    Args:
        name: the tensor's name.
        tensor: this rank's view of it.
        tally: the sums.
        row: the tensor's place in the tally.
        share: which of how many holders of the tensor this rank is.
        seen: the boxes that a lower rank counts, where placements alone do not say it.
    """
    index, count = share
    whole = tuple(tensor.size())
    keys = keys_of(name, tensor.dtype, whole)
    if index == 0:
        # Without this an empty tensor's print would not depend on its name and shape.
        sums = tally.sums(torch.device("cpu"), row)
        sums += torch.tensor([signed(keys.first), signed(keys.second)], device="cpu")
    if not isinstance(tensor, DTensor | ShardedTensor):
        shape, offsets, local = _slice(tensor, index, count)
        parts: Iterable[tuple[tuple[int, ...], torch.Tensor]] = [(offsets, local)]
    elif seen is None and _is_copy(tensor):
        return
    else:
        shape = whole
        parts = (part for part in _local_parts(name, tensor) if not seen or _box(*part) not in seen)
    for offsets, local in parts:
        sums = tally.sums(local.device, row)
        add_box(sums, local, whole=shape, offsets=offsets, keys=keys, add=tally.add(local.device))


def _slice(tensor: torch.Tensor, index: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    """One of ``count`` slices of a plain tensor: the shape it is counted in, where it begins, its elements."""
    # Rows and columns do not matter to the count of a contiguous tensor, so that it can be cut anywhere.
    cut = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    length = cut.shape[0]
    each = -(-length // count)
    first = min(index * each, length)
    offsets = (first, *(0 for _ in cut.shape[1:]))
    return tuple(cut.shape), offsets, cut.narrow(0, first, min(each, length - first))


def _local_parts(name: str, tensor: DTensor | ShardedTensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Where each part that this rank holds of a sharded tensor begins, and its elements."""
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            yield tuple(shard.metadata.shard_offsets), shard.tensor
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise Bug(cause=f"{name} is a DTensor that waits for a reduction; it holds no elements of the whole")
    local = tensor.to_local()
    if tensor.device_mesh.get_coordinate() is None or local.numel() == 0:
        return
    # The protocol of torch's own checkpoints: uneven shards, nested shards and strided shards come out right.
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1:
        raise Bug(cause=f"{name} is a DTensor of {len(chunks)} parts on one rank")
    yield tuple(chunks[0].offsets), local


def _box(offsets: tuple[int, ...], local: torch.Tensor) -> Box:
    return offsets, tuple(local.shape)


def _boxes_to_compare(tensor: torch.Tensor, world: World) -> list[Box] | None:
    """The boxes that this rank holds, if ranks outside the tensor's own mesh or group may hold the same ones."""
    if isinstance(tensor, ShardedTensor) or (isinstance(tensor, DTensor) and tensor.device_mesh.size() < world.size):
        return [_box(*part) for part in _local_parts("", tensor)]
    return None


def _is_copy(tensor: DTensor | ShardedTensor) -> bool:
    """Whether a rank with a lower coordinate in the tensor's mesh holds the same elements."""
    if isinstance(tensor, ShardedTensor):
        return False
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return any(at and placement.is_replicate() for at, placement in zip(coordinate, tensor.placements, strict=False))


def _holders(names: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(names):
        for name in held:
            holders.setdefault(name, []).append(rank)
    return holders


def _names_digest(names: Sequence[str]) -> str:
    return _digest(list(names), 16).hex()


def _digest(value: object, size: int) -> bytes:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=size).digest()


def _text(sums: Sequence[int]) -> str:
    return "".join(f"{number % (1 << 64):016x}" for number in sums)
