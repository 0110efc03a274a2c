"""Parts to tensors: every block's checksum is verified before it is used, every element is accounted for.

PyTorch's distributed checkpoint plans which boxes of the saved tensors fill the live ones, whatever the sharding then
and now; it plans against our index, and nothing is ever unpickled. Bytes are read in the blocks that the manifest has
digests for, each block once; from a block that is not what was written nothing reaches a tensor. Elements are counted
as they arrive, so a tensor that was skipped, in whole or in part, is an error with its name.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from unbroken.errors import DamagedCheckpoint, NotRestored, StateDiffers
from unbroken.state.host_copy import as_bits
from unbroken.state.host_memory import Arena
from unbroken.state.index import INDEX_PART, Chunk, Index, decode, dtype_name
from unbroken.state.pieces import expanded_dims, is_plain, local_tensors
from unbroken.store.digest import block_ranges
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Manifest, Part
from unbroken.store.parts import BlockReader, read_whole, require_block
from unbroken.world import World

DEFAULT_THREADS: Final = 8


def read_index(store: Store, name: str, manifest: Manifest) -> Index:
    """The index of a checkpoint, its checksums verified.

    Raises:
        DamagedCheckpoint: there is none, or it is not what a save wrote.
        StorageFailed: I/O error.
    """
    directory = store.path(name)
    data = read_whole(store.files, directory, manifest, INDEX_PART)
    if data is None:
        raise DamagedCheckpoint(path=directory, findings=(f"{INDEX_PART}: the manifest does not name it",))
    try:
        return decode(data, {part.name: part.size_bytes for part in manifest.parts})
    except Malformed as wrong:
        raise DamagedCheckpoint(path=directory, findings=(f"{INDEX_PART}: {wrong}",)) from wrong


def read(
    store: Store,
    name: str,
    manifest: Manifest,
    index: Index,
    tensors: Mapping[str, torch.Tensor],
    world: World,
    *,
    threads: int = DEFAULT_THREADS,
) -> None:
    """Fill live tensors, in place, from a checkpoint. Collective: it fails on all ranks or on none.

    Raises:
        StateDiffers: a tensor is not in the checkpoint, or with another dtype or shape; nothing was loaded.
        DamagedCheckpoint: a block is not what was written; tensors read before it are filled, the others are not.
        NotRestored: a tensor was not filled whole.
        StorageFailed: I/O error.
        RankFailed: one of these, on another rank only.
    """
    world.all_or_none(lambda: _require_fitting(name, index, tensors))
    is_shared = world.size > 1
    world.all_or_none(lambda: _fill(store, name, manifest, index, tensors, threads, is_shared=is_shared))


def _require_fitting(name: str, index: Index, tensors: Mapping[str, torch.Tensor]) -> None:
    missing = tuple(wanted for wanted in tensors if wanted not in index.tensors)
    changed = []
    for wanted, tensor in tensors.items():
        entry = index.tensors.get(wanted)
        if entry is not None and (entry.dtype, entry.shape) != (tensor.dtype, tuple(tensor.shape)):
            saved = f"{dtype_name(entry.dtype)} {list(entry.shape)}"
            changed.append(f"{wanted}: {saved} in the checkpoint, {dtype_name(tensor.dtype)} {list(tensor.shape)} here")
    if missing or changed:
        raise StateDiffers(checkpoint=name, missing=missing, changed=tuple(changed))


def _fill(
    store: Store,
    name: str,
    manifest: Manifest,
    index: Index,
    tensors: Mapping[str, torch.Tensor],
    threads: int,
    *,
    is_shared: bool,
) -> None:
    arrivals = _arrivals(index, tensors)
    with torch.no_grad():
        _bring_in(store, store.path(name), manifest, arrivals, threads, is_shared=is_shared)
    arrived: dict[str, int] = defaultdict(int)
    for arrival in arrivals:
        arrived[arrival.name] += arrival.arrived_elements
    # The boxes of an index do not overlap, so as many elements as there are means every single one.
    short = [each for each, tensor in tensors.items() if arrived[each] != _elements_here(tensor)]
    if short:
        raise NotRestored(checkpoint=name, names=tuple(short))


def _elements_here(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return 0
    return sum(local.numel() for local in local_tensors(tensor))


@dataclass(eq=False, slots=True)
class _Arrival:
    """A box that is to come from one stretch of a part into a live tensor."""

    name: str
    part: str
    start: int
    end: int
    # The box in the live tensor, and the strides of the same box in the elements of the stretch.
    target: torch.Tensor
    strides: tuple[int, ...]
    missing_bytes: int
    landing: torch.Tensor | None = None
    arrived_elements: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, block: torch.Tensor, block_start: int) -> None:
        """Take what a verified block holds of the stretch; the last one completes it."""
        low, high = max(self.start, block_start), min(self.end, block_start + block.numel())
        with self.lock:
            if self.landing is None:
                self.landing = self._direct() if self._is_direct else self._beside()
        self.landing[low - self.start : high - self.start].copy_(block[low - block_start : high - block_start])
        with self.lock:
            self.missing_bytes -= high - low
            is_whole = self.missing_bytes == 0
        if is_whole:
            self._land(self.landing)

    @property
    def _is_direct(self) -> bool:
        """Whether the stretch is byte for byte the target's own memory."""
        target = self.target
        is_dense = target.is_contiguous() and target.numel() * target.itemsize == self.end - self.start
        return is_dense and (target.is_cpu or target.is_cuda) and not target.is_conj() and not target.is_neg()

    def _direct(self) -> torch.Tensor:
        return as_bits(self.target).view(-1).view(torch.uint8)

    def _beside(self) -> torch.Tensor:
        return torch.empty(self.end - self.start, dtype=torch.uint8, device="cpu")

    def _land(self, landing: torch.Tensor) -> None:
        if not self._is_direct:
            found = landing.view(self.target.dtype).as_strided(self.target.shape, self.strides)
            target = self.target
            for dim in expanded_dims(target):
                # All along it are one element in memory; that all were saved equal, the fingerprint shows.
                target, found = target.narrow(dim, 0, 1), found.narrow(dim, 0, 1)
            if target.is_conj() or target.is_neg():
                target.copy_(found)
            else:
                as_bits(target).copy_(as_bits(found))
        self.arrived_elements = self.target.numel()
        self.landing = None


def _arrivals(index: Index, tensors: Mapping[str, torch.Tensor]) -> list[_Arrival]:
    """What has to come from where to fill this rank's share of the tensors."""
    found, others = list[_Arrival](), dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        chunks = index.tensors[name].chunks
        if is_plain(tensor) and len(chunks) == 1 and chunks[0].box.sizes == tensor.shape:
            # All of it lies in one piece and comes to one place: there is nothing to plan.
            if size_bytes := tensor.numel() * tensor.itemsize:
                (_, sizes), part, at = chunks[0]
                found.append(_Arrival(name, part, at, at + size_bytes, tensor.detach(), _strides(sizes), size_bytes))
        else:
            others[name] = tensor
    return found + _planned_arrivals(index, others)


@lru_cache(maxsize=1 << 14)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))


def _planned_arrivals(index: Index, tensors: Mapping[str, torch.Tensor]) -> list[_Arrival]:
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=index.tensors[name].dtype),
                size=torch.Size(index.tensors[name].shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.box.offsets), sizes=torch.Size(chunk.box.sizes))
                    for chunk in index.tensors[name].chunks
                ],
            )
            for name in tensors
        }
    )
    chunks = {
        (name, chunk.box.offsets): chunk
        for name in tensors
        for chunk in index.tensors[name].chunks
        if chunk.box.elements
    }
    live = dict(tensors)
    return [
        _arrival(item, chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())], live)
        for item in create_default_local_load_plan(live, metadata).items
    ]


def _arrival(item: ReadItem, chunk: Chunk, tensors: dict[str, torch.Tensor]) -> _Arrival:
    target: torch.Tensor = find_state_dict_object(tensors, item.dest_index).detach()
    for dimension, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        target = target.narrow(dimension, start, length)
    strides = _strides(chunk.box.sizes)
    first = sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True))
    start = chunk.at + first * target.itemsize
    end = chunk.at + (last + 1) * target.itemsize
    return _Arrival(item.dest_index.fqn, chunk.part, start, end, target, strides, end - start)


@dataclass(frozen=True)
class _Block:
    """A block of a part and what is to be taken from it."""

    part: str
    start: int
    end: int
    digest: bytes
    arrivals: tuple[_Arrival, ...]


def _bring_in(
    store: Store,
    directory: Path,
    manifest: Manifest,
    arrivals: Collection[_Arrival],
    threads: int,
    *,
    is_shared: bool,
) -> None:
    """Read every needed block once, verify it, and copy it to its tensors."""
    device = next((arrival.target.device for arrival in arrivals if arrival.target.is_cuda), None)
    buffers: list[Arena] = []

    def make_buffer(size_bytes: int) -> memoryview:
        buffer = Arena(size_bytes, device)
        buffer.make_ready()
        buffers.append(buffer)
        return memoryview(cast("bytes", buffer.tensor.numpy()))

    reader = BlockReader(store.files, manifest.block_bytes, make_buffer, is_shared=is_shared)

    def bring(block: _Block) -> None:
        data = reader.read(directory / block.part, block.start, block.end)
        require_block(directory, block.part, (block.start, block.end), data, block.digest)
        verified = torch.frombuffer(data, dtype=torch.uint8)
        # A thread has its own idea of whether gradients are recorded.
        with torch.no_grad():
            for arrival in block.arrivals:
                arrival.take(verified, block.start)

    for used in {arrival.target.device for arrival in arrivals if arrival.target.is_cuda}:
        # The threads copy on streams of their own: what was sent to the targets before must not come after it.
        torch.cuda.current_stream(used).synchronize()
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="unbroken-read") as pool:
            for _ in pool.map(bring, _needed_blocks(manifest, arrivals)):
                pass
    finally:
        for buffer in buffers:
            buffer.close()


def _needed_blocks(manifest: Manifest, arrivals: Iterable[_Arrival]) -> list[_Block]:
    parts: dict[str, Part] = {part.name: part for part in manifest.parts}
    wanted: dict[tuple[str, int], list[_Arrival]] = defaultdict(list)
    for arrival in arrivals:
        for number in range(arrival.start // manifest.block_bytes, -(-arrival.end // manifest.block_bytes)):
            wanted[arrival.part, number].append(arrival)
    return [
        _Block(
            name,
            number * manifest.block_bytes,
            min((number + 1) * manifest.block_bytes, parts[name].size_bytes),
            parts[name].digest.blocks[number],
            tuple(coming),
        )
        for (name, number), coming in sorted(wanted.items(), key=lambda found: found[0])
    ]


# ---- blocks that no tensor needs ----


def verify_unread(
    store: Store, name: str, manifest: Manifest, index: Index, wanted: Collection[str], world: World
) -> None:
    """Read and verify the blocks that hold nothing of the tensors that ranks are about to read. Collective.

    Args:
        store: where the checkpoint is.
        name: what it is called there.
        manifest: its manifest.
        index: its index.
        wanted: the tensors that this rank will read; together the ranks read each of them whole.
        world: the ranks, which share the blocks out.

    Raises:
        DamagedCheckpoint: a block is not what was written.
        StorageFailed: I/O error.
        RankFailed: one of these, on another rank only.
    """
    # All ranks must share out one list: what the first one reads, and what each reads for itself alone.
    requested = world.all_gather(tuple(each for each in wanted if world.is_first or each.startswith("ranks.")))
    read = _blocks_of(index, {each for names in requested for each in names}, manifest.block_bytes)
    unread = [
        (part.name, start, end, expected)
        for part in manifest.parts
        for (start, end), expected in zip(
            block_ranges(part.size_bytes, manifest.block_bytes), part.digest.blocks, strict=True
        )
        if (part.name, start // manifest.block_bytes) not in read
    ]
    reader = BlockReader(store.files, manifest.block_bytes)

    def check(block: tuple[str, int, int, bytes]) -> None:
        part, start, end, expected = block
        data = reader.read(store.path(name) / part, start, end)
        require_block(store.path(name), part, (start, end), data, expected)

    def prove_mine() -> None:
        with ThreadPoolExecutor(DEFAULT_THREADS, thread_name_prefix="unbroken-prove") as pool:
            for _ in pool.map(check, unread[world.rank :: world.size]):
                pass

    world.all_or_none(prove_mine)


def _blocks_of(index: Index, names: Collection[str], block_bytes: int) -> set[tuple[str, int]]:
    """The blocks in which some tensors lie, each as its part's name and its number there."""
    found: set[tuple[str, int]] = set()
    for entry in (index.tensors[name] for name in names if name in index.tensors):
        for chunk in entry.chunks:
            end = chunk.at + chunk.box.elements * entry.dtype.itemsize
            if end > chunk.at:
                found |= {(chunk.part, number) for number in range(chunk.at // block_bytes, -(-end // block_bytes))}
    return found
