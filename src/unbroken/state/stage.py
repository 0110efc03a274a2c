"""Copies of what this rank will write, in host memory that is reused from save to save.

From the moment ``stage`` returns, the training loop may continue: a tensor on the CPU has been copied, one on a GPU is
being copied. What only an optimizer step changes is copied on a side stream beside the next forward and backward, and
the step waits on the device for what is left; everything else is copied in the order of the current stream, so the
next kernel already finds it done. There is exactly one set of buffers, so one save in flight at most.
"""

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Protocol, cast

import torch

from unbroken import torch_private
from unbroken.errors import WrittenDuringSave
from unbroken.state.fingerprint import keys_of, print_of
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.index import ALIGNMENT_BYTES, DTYPES
from unbroken.state.mixing import WORDS, Passes, Places
from unbroken.state.pieces import SavePlan, local_piece
from unbroken.state.planners import Piece
from unbroken.store.manifest import Tensor

# The allocator of pinned memory rounds up to a power of two; arenas of one lose nothing to it.
ARENA_BYTES: Final = 256 << 20
_SMALLEST_ARENA_BYTES: Final = 4096


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of their width, so that a copy moves bits and never looks at a number."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.itemsize])


@dataclass(frozen=True)
class StagedPiece:
    """The host copy of one piece: its bytes, in one or more stretches of memory."""

    piece: Piece
    stretches: tuple[torch.Tensor, ...]

    def views(self) -> list[memoryview]:
        """The bytes, without a copy."""
        return [memoryview(cast("bytes", stretch.numpy())) for stretch in self.stretches]


class Handle(Protocol):
    """What torch gives for a registered hook."""

    def remove(self) -> None:
        """Take the hook away."""


class Buffers:
    """The one set of host buffers, its side streams, and what the next optimizer step has to wait for."""

    def __init__(self, *, arena_bytes: int = ARENA_BYTES) -> None:
        if arena_bytes < _SMALLEST_ARENA_BYTES or arena_bytes & (arena_bytes - 1):
            raise ValueError(f"an arena has a power of two of bytes, at least {_SMALLEST_ARENA_BYTES}")
        self._arena_bytes = arena_bytes
        self._arenas: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: Mapping[torch.device, torch.cuda.Event] = {}
        self._guarded: weakref.WeakKeyDictionary[torch.optim.Optimizer, Handle] = weakref.WeakKeyDictionary()
        self._in_use = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """The host memory that is held."""
        return sum(arena.numel() for arena in self._arenas)

    @property
    def addresses(self) -> list[int]:
        """Where the memory is."""
        return [arena.data_ptr() for arena in self._arenas]

    def take(self, size_bytes: int, *, is_pinned: bool) -> Sequence[torch.Tensor]:
        """Memory for one save; that of the last one where it fits. Give it back with ``give_back``.

        Raises:
            NoMemory: the host has not that much.
            RuntimeError: the last save still has it.
        """
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("a save is still in flight; there is one set of staging buffers")
        try:
            self._make_arenas(self._arena_sizes(size_bytes), is_pinned)
        except BaseException:
            # A later save may find more.
            self._in_use.release()
            raise
        return self._arenas

    def _make_arenas(self, wanted: Sequence[int], is_pinned: bool) -> None:
        kept = 0
        while kept < min(len(wanted), len(self._arenas)) and self._fits(self._arenas[kept], wanted[kept], is_pinned):
            kept += 1
        # The old memory goes first: the two together may be more than the host has.
        del self._arenas[kept:]
        with asking_for_memory(sum(wanted)):
            self._arenas += [_host_memory(size, is_pinned) for size in wanted[kept:]]

    def give_back(self) -> None:
        """The bytes have been written; the next save may have the memory."""
        self._in_use.release()

    def _fits(self, arena: torch.Tensor, size_bytes: int, is_pinned: bool) -> bool:
        return arena.numel() == size_bytes and arena.is_pinned() == is_pinned

    def _arena_sizes(self, size_bytes: int) -> list[int]:
        full, rest = divmod(size_bytes, self._arena_bytes)
        last = max(_SMALLEST_ARENA_BYTES, 1 << (rest - 1).bit_length()) if rest else 0
        return [self._arena_bytes] * full + ([last] if last else [])

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def expect(self, events: Mapping[torch.device, torch.cuda.Event]) -> None:
        """The next optimizer step has to wait for these."""
        self._pending = events

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """From now on let every step of these wait for the copies of what it changes."""
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded[optimizer] = cast("Handle", optimizer.register_step_pre_hook(self._before_step))

    def close(self) -> None:
        """Give back memory, streams and hooks; the save that used them has ended."""
        for handle in self._guarded.values():
            handle.remove()
        self._guarded.clear()
        is_pinned = any(arena.is_pinned() for arena in self._arenas)
        self._arenas.clear()
        self._streams.clear()
        self._pending = {}
        if is_pinned:
            # torch keeps freed pinned memory for itself, and no later tensor of the script is as large as an arena.
            torch_private.empty_host_cache()

    def _before_step(self, *_: object) -> None:
        # The device waits, the host does not. An event that has passed costs next to nothing, so it is left in place:
        # another optimizer may run on another stream.
        for device, event in self._pending.items():
            torch.cuda.current_stream(device).wait_event(event)


@dataclass
class Staged:
    """What one save writes on this rank, copied or being copied."""

    pieces: tuple[StagedPiece, ...]
    buffers: Buffers
    events: tuple[torch.cuda.Event, ...] = ()
    # Kept until the copies are done: memory that is given back could be reused while it is being read.
    sources: list[torch.Tensor] = field(default_factory=list, repr=False)

    def wait(self) -> None:
        """Block until every copy has arrived."""
        for event in self.events:
            event.synchronize()
        self.sources.clear()

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let the next step of these optimizers wait, on the device, for what has not been copied yet."""
        self.buffers.guard(optimizers)

    def release(self) -> None:
        """The bytes are written, or given up: the buffers are free for the next save. Call it exactly once."""
        try:
            self.wait()
        finally:
            self.buffers.give_back()


def stage(
    plan: SavePlan,
    tensors: Mapping[str, torch.Tensor],
    buffers: Buffers,
    *,
    until_step: Collection[str] = (),
) -> Staged:
    """Copy what this rank will write.

    Args:
        plan: Who writes what.
        tensors: The live tensors the plan was made for.
        buffers: Where the copies go.
        until_step: Names that nothing but an optimizer step changes. On a GPU they are copied beside the next forward
            and backward; ``Staged.guard`` must then know every optimizer that may change them.

    Raises:
        NoMemory: the host has no memory for the copies.
        RuntimeError: the buffers are still in use by an earlier save.
    """
    sources = [local_piece(tensors, piece.name, piece.box) for piece in plan.pieces]
    devices = {source.device for source in sources if source.is_cuda}
    arenas = buffers.take(_room(plan.pieces), is_pinned=bool(devices))
    staged = [StagedPiece(p, s) for p, s in zip(plan.pieces, _stretches(plan.pieces, arenas), strict=True)]
    try:
        for device in devices:
            # What the copies read was computed on the current stream.
            buffers.stream(device).wait_stream(torch.cuda.current_stream(device))
        for one, source in zip(staged, sources, strict=True):
            if source.is_cuda and one.piece.name in until_step:
                stream = buffers.stream(source.device)
                with torch.cuda.stream(stream):
                    _copy(source, one.stretches)
                source.record_stream(stream)
            else:
                _copy(source, one.stretches)
        beside = {device: buffers.stream(device).record_event() for device in devices}
        buffers.expect(beside)
        in_order = [torch.cuda.current_stream(device).record_event() for device in devices]
    except BaseException:
        buffers.give_back()
        raise
    return Staged(
        tuple(staged), buffers, (*beside.values(), *in_order), [source for source in sources if source.is_cuda]
    )


def _host_memory(size_bytes: int, is_pinned: bool) -> torch.Tensor:
    # On the CPU whatever torch.set_default_device says.
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _room(pieces: Iterable[Piece]) -> int:
    return sum(_aligned(piece.size_bytes) for piece in pieces)


def _stretches(pieces: Iterable[Piece], arenas: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
    """Memory for one piece after the other; one that does not fit into the rest of an arena continues in the next."""
    number = position = 0
    for piece in pieces:
        found, left = [], piece.size_bytes
        while left:
            if position == arenas[number].numel():
                number, position = number + 1, 0
            taken = min(left, arenas[number].numel() - position)
            found.append(arenas[number][position : position + taken])
            position, left = position + _aligned(taken), left - taken
        yield tuple(found)


def _copy(source: torch.Tensor, stretches: Sequence[torch.Tensor]) -> None:
    if not stretches:
        return
    bits = as_bits(source)
    if len(stretches) == 1:
        stretches[0].view(bits.dtype).view(bits.shape).copy_(bits, non_blocking=True)
        return
    flat, position = bits.reshape(-1), 0
    for stretch in stretches:
        into = stretch.view(bits.dtype)
        into.copy_(flat[position : position + into.numel()], non_blocking=True)
        position += into.numel()


# ---- checking staged bytes against their fingerprints ----

# Larger than the chunks at an edge: fewer, longer operations leave Python's lock to the training thread.
_CHUNK_WORDS: Final = 1 << 17
_MOST_THREADS: Final = 4


def staged_sums(pieces: Sequence[StagedPiece], plan: SavePlan) -> torch.Tensor:
    """What the staged pieces add to the two sums of each tensor of the plan, from the bytes in host memory.

    One row a tensor, in the order of the plan: added up over the ranks they are the sums of the whole tensors.
    """
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4, len(pieces)))
    with ThreadPoolExecutor(threads, thread_name_prefix="unbroken-verify") as pool:
        return sum(
            pool.map(lambda first: _sums(pieces[first::threads], plan), range(threads)),
            start=torch.zeros(len(plan.tensors), 2, dtype=torch.int64, device="cpu"),
        )


def _sums(pieces: Sequence[StagedPiece], plan: SavePlan) -> torch.Tensor:
    rows = {name: row for row, name in enumerate(plan.tensors)}
    found = torch.zeros(len(rows), 2, dtype=torch.int64, device="cpu")
    cpu = torch.device("cpu")
    add = Passes(cpu, _CHUNK_WORDS)
    for staged in pieces:
        name, dtype, box = staged.piece
        whole, itemsize = plan.tensors[name].shape, DTYPES[dtype].itemsize
        width = min(itemsize, 4)
        per_element = itemsize // width
        places = Places.of((*whole, per_element), (*box.offsets, 0), (*box.sizes, per_element))
        words = [stretch.view(WORDS[width]) for stretch in staged.stretches]
        begins = accumulate((row.numel() for row in words), initial=0)
        for row, begin in zip(words, begins, strict=False):
            add(row, places, keys_of(name, DTYPES[dtype], whole), found[rows[name]], begin=begin)
    return found


def require_as_fingerprinted(
    plan: SavePlan,
    described: Mapping[str, Tensor],
    sums: torch.Tensor,
    step: int,
) -> None:
    """Pass if what all ranks staged has the fingerprints that were taken at the edge; ``sums`` are those of all ranks.

    Raises:
        WrittenDuringSave: some tensors were written in between.
    """
    written = [
        name
        for (name, planned), total in zip(plan.tensors.items(), sums.tolist(), strict=True)
        # A tied tensor is staged under the first of its names only.
        if planned.same_as == name
        and print_of(name, DTYPES[planned.dtype], planned.shape, [total]) != described[name].digest
    ]
    if written:
        raise WrittenDuringSave(step=step, names=tuple(sorted(written)))
