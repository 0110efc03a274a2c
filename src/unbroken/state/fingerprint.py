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
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from unbroken.errors import Bug
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.mixing import SHORT_WORDS, WORDS, Add, Keys, Numbers, ShortRows, add_box, arithmetic
from unbroken.torch_private import ShardedTensor
from unbroken.world import World

Box = tuple[tuple[int, ...], tuple[int, ...]]
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_PRINT_LENGTH: Final = 32


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
    summed = world.add_up(mine)
    found = dict(zip(names, prints_of(summed.numpy().view(np.uint64)), strict=True))
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


def prints_of(sums: Numbers) -> list[str]:
    """The fingerprints of many tensors from their sums, two numbers each, with their keys in them."""
    text = sums.astype(">u8").tobytes().hex()
    return [text[at : at + _PRINT_LENGTH] for at in range(0, len(text), _PRINT_LENGTH)]


def keys_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Keys:
    """The two numbers for a tensor's name, dtype and global shape."""
    digest = _key_bytes(name, dtype, tuple(shape))
    return Keys(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def key_table(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Numbers:
    """The keys of many tensors, a line each."""
    digests = b"".join(_key_bytes(name, dtype, shape) for name, dtype, shape in tensors)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64).reshape(-1, 2)


def _key_bytes(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    # The JSON of a list of the three, put together of two parts, of which the second is nearly always known.
    text = f"[{encode_basestring_ascii(name)}, {_kind_text(dtype, shape)}]"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@lru_cache(maxsize=1 << 14)
def _kind_text(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f'"{str(dtype).removeprefix("torch.")}", {json.dumps(list(shape))}'


class _Tally:
    """Two sums a tensor on each device that holds some of them, read in one go so that the devices never wait."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._keys = np.zeros((count, 2), dtype=np.uint64)
        self._has_keys = np.zeros(count, dtype=bool)
        self._short_sums = np.zeros((count, 2), dtype=np.uint64)
        self._short = ShortRows(self._keys, self._short_sums)
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

    def know(self, row: int, keys: Keys, *, are_counted: bool) -> None:
        """The keys of a tensor, and whether this rank is the one that adds them to its sums."""
        self._keys[row, 0], self._keys[row, 1], self._has_keys[row] = keys.first, keys.second, are_counted

    def add_short(self, words: torch.Tensor, begin: int, row: int) -> None:
        """Add a short row of words in host memory, the first of which is word ``begin`` of the tensor of this row."""
        self._short.add(words, begin, row)

    def read(self) -> torch.Tensor:
        """The sums of all tensors over all devices, on the CPU."""
        self._short.flush()
        counted = self._short_sums + np.where(self._has_keys[:, None], self._keys, np.uint64(0))
        total = torch.from_numpy(counted.view(np.int64))
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
    # Without its keys an empty tensor's print would not depend on its name and shape.
    tally.know(row, keys, are_counted=index == 0)
    if (words := _short_words(tensor)) is not None:
        first, each = _cut(tensor.numel(), index, count)
        per_element = words.numel() // tensor.numel()
        tally.add_short(words[first * per_element : (first + each) * per_element], first * per_element, row)
        return
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
    first, each = _cut(cut.shape[0], index, count)
    offsets = (first, *(0 for _ in cut.shape[1:]))
    return tuple(cut.shape), offsets, cut.narrow(0, first, each)


def _cut(length: int, index: int, count: int) -> tuple[int, int]:
    """Where one of ``count`` slices of a row begins, and how long it is."""
    each = -(-length // count)
    first = min(index * each, length)
    return first, min(each, length - first)


def _short_words(tensor: torch.Tensor) -> torch.Tensor | None:
    """The words of a plain, contiguous tensor of a few elements in host memory; None for every other."""
    if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
        return None
    if not 0 < tensor.nbytes <= SHORT_WORDS or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    flat = tensor.detach().reshape(-1)
    # A single element counts as contiguous whatever its stride, but cannot be viewed as words.
    return flat.view(WORDS[min(flat.itemsize, 4)]) if flat.stride(0) == 1 else None


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
