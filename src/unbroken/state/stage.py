"""Copies of what this rank will write, in host memory that is reused from save to save.

From the moment ``stage`` returns, the training loop may continue: a tensor on the CPU has been copied, one on a GPU is
being copied. What only an optimizer step changes is copied on a side stream beside the next forward and backward, and
the step waits on the device for what is left; everything else is copied in the order of the current stream, so the
next kernel already finds it done. There is exactly one set of buffers, so one save in flight at most.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Final, Protocol, cast

import numpy as np
import torch

from unbroken.errors import NoMemory, WrittenDuringSave
from unbroken.quoting import amounts
from unbroken.state.fingerprint import prints_of
from unbroken.state.host_copy import Bytes, Checksums, Source, copy_bits, copy_checked, cut
from unbroken.state.host_memory import Arena, asking_for_memory, available_bytes
from unbroken.state.index import ALIGNMENT_BYTES, DTYPES, Box
from unbroken.state.mixing import WORDS, HostPasses, Keys, Places, ShortRows, arithmetic, is_short
from unbroken.state.pieces import SavePlan, local_piece
from unbroken.state.planners import Piece
from unbroken.store.manifest import Tensor

# Small enough that the loop is held up for a few milliseconds while one is registered. The allocator of pinned memory,
# where it is needed, rounds up to a power of two; arenas of one lose nothing to it.
ARENA_BYTES: Final = 128 << 20
_SMALLEST_ARENA_BYTES: Final = 4096
# What is sent to the host before the next: as long as this takes, the loop's own copies wait.
_AT_A_TIME_BYTES: Final = 64 << 20
# How many times as long as it was at work a thread beside the loop rests.
_PAUSES: Final = 4


@dataclass(frozen=True)
class StagedPiece:
    """The host copy of one piece: its bytes, in one or more stretches of memory."""

    piece: Piece
    stretches: tuple[torch.Tensor, ...]

    @cached_property
    def parts(self) -> list[Bytes]:
        """The same memory in parts that are copied one after the other."""
        return cut(self.stretches)

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
        self._arenas: list[Arena] = []
        self._preparing: threading.Thread | None = None
        self._is_awaited = threading.Event()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: Mapping[torch.device, torch.cuda.Event] = {}
        self._guarded: weakref.WeakKeyDictionary[torch.optim.Optimizer, Handle] = weakref.WeakKeyDictionary()
        self._in_use = threading.Lock()
        # Where the pieces of the last save lie; the next has the same ones and the same memory.
        self._laid_out: tuple[StagedPiece, ...] = ()
        self._laid_out_for: tuple[Piece, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """The host memory that is held."""
        return sum(arena.size_bytes for arena in self._arenas)

    @property
    def addresses(self) -> list[int]:
        """Where the memory is."""
        return [arena.tensor.data_ptr() for arena in self._arenas]

    def prepare(self, size_bytes: int, device: torch.device | None) -> None:
        """Make memory for the first save ready in a thread beside the training loop, arena by arena.

        With pauses, since registering memory holds up what the loop sends to the GPU, and without a GPU the loop needs
        the core. A save that comes meanwhile makes the rest at once. At most half of the memory that is free is taken:
        the job's own needs come first.
        """
        if self._preparing is not None or self._arenas:
            return
        self._preparing = threading.Thread(
            target=self._prepare, args=(self._arena_sizes(size_bytes), device), name="unbroken-memory", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread to be had
            self._preparing.start()
            # Python ends a daemon thread inside a call of torch by aborting the process: at exit it is waited for.
            weakref.finalize(self, _end, self._preparing, self._is_awaited)

    def _prepare(self, wanted: Sequence[int], device: torch.device | None) -> None:
        if device is not None:
            # Its kernel is compiled now and not in the first save.
            arithmetic(device)
        room_bytes = (available_bytes() or 0) // 2
        with contextlib.suppress(NoMemory), asking_for_memory():
            for each in wanted:
                room_bytes -= each
                if room_bytes < 0:
                    return
                arena, began = Arena(each, device), time.thread_time()
                pinning_s = arena.make_ready()
                self._arenas.append(arena)
                if self._is_awaited.wait(_PAUSES * (pinning_s if device is not None else time.thread_time() - began)):
                    return

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            _end(self._preparing, self._is_awaited)

    def take(self, pieces: tuple[Piece, ...], device: torch.device | None) -> tuple[StagedPiece, ...]:
        """Memory for the pieces of one save; that of the last one where it fits. Give it back with ``give_back``.

        Raises:
            NoMemory: the host has not that much.
            RuntimeError: the last save still has it.
        """
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError("a save is still in flight; there is one set of staging buffers")
        try:
            self._end_preparing()
            if self._make_arenas(self._arena_sizes(room(pieces)), device) or pieces is not self._laid_out_for:
                stretches = _stretches(pieces, [arena.tensor for arena in self._arenas])
                self._laid_out = tuple(map(StagedPiece, pieces, stretches))
                self._laid_out_for = pieces
        except BaseException:
            # A later save may find more.
            self._in_use.release()
            raise
        return self._laid_out

    def _make_arenas(self, wanted: Sequence[int], device: torch.device | None) -> bool:
        """Have arenas of these sizes; whether any is another than before."""
        kept = 0
        while kept < min(len(wanted), len(self._arenas)) and self._fits(self._arenas[kept], wanted[kept], device):
            kept += 1
        # The old memory goes first: the two together may be more than the host has.
        are_dropped = self._drop_arenas(kept)
        missing = wanted[kept:]
        if not missing:
            return are_dropped
        available = available_bytes()
        if available is not None and sum(missing) > available:
            # To take what is not there would not fail: the kernel would kill the job.
            raise NoMemory(needed_bytes=sum(wanted), cause=f"{amounts.size(available)} are available on this host")
        # Pages are made ready by the kernel, on several cores at the same time.
        threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2, len(missing)))
        with asking_for_memory(sum(wanted)), ThreadPoolExecutor(threads, thread_name_prefix="unbroken-memory") as pool:
            made = [Arena(each, device) for each in missing]
            if device is not None:
                list(pool.map(Arena.make_ready, made))
            self._arenas += made
        return True

    def _drop_arenas(self, kept: int) -> bool:
        dropped = self._arenas[kept:]
        # Views of the memory would keep it.
        if dropped:
            self._laid_out, self._laid_out_for = (), None
        for arena in dropped:
            arena.close()
        del self._arenas[kept:]
        return bool(dropped)

    def give_back(self) -> None:
        """The bytes have been written; the next save may have the memory."""
        self._in_use.release()

    def _fits(self, arena: Arena, size_bytes: int, device: torch.device | None) -> bool:
        return arena.size_bytes == size_bytes and (arena.device is None) == (device is None)

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
        self._end_preparing()
        self._drop_arenas(0)
        self._streams.clear()
        self._pending = {}

    def _before_step(self, *_: object) -> None:
        # The device waits, the host does not. An event that has passed costs next to nothing, so it is left in place:
        # another optimizer may run on another stream.
        for device, event in self._pending.items():
            torch.cuda.current_stream(device).wait_event(event)


def _end(preparing: threading.Thread, is_awaited: threading.Event) -> None:
    # In a forked child it is not, and the event may have been left locked.
    if preparing.is_alive():
        is_awaited.set()
        preparing.join()


@dataclass
class Staged:
    """What one save writes on this rank: copied, being copied, or copied on its GPU and not yet to the host.

    ``pieces`` is complete after ``wait``.
    """

    planned: tuple[Piece, ...]
    buffers: Buffers
    # What is copied; kept until it is: memory that is given back could be reused while it is being read.
    sources: list[torch.Tensor] = field(repr=False)
    pieces: tuple[StagedPiece, ...] = ()
    events: tuple[torch.cuda.Event, ...] = ()
    # The GPUs that the copies come from.
    devices: tuple[torch.device, ...] = ()
    # Of the sources, where they were asked for.
    checksums: Checksums = field(default_factory=Checksums, repr=False)

    def wait(self) -> None:
        """Block until every copy has arrived.

        Raises:
            NoMemory: the host has no memory for the copies.
        """
        if self.sources and not self.pieces:
            self._bring()
        for event in self.events:
            event.synchronize()
        self.sources.clear()

    def _bring(self) -> None:
        """Copy to the host what was copied on the GPU, a little at a time: the loop's own copies come between."""
        sent_bytes = 0
        # From here on the buffers are this save's, whatever happens.
        self.pieces = self.buffers.take(self.planned, self.devices[0])
        for one, source in zip(self.pieces, self.sources, strict=True):
            stream = self.buffers.stream(source.device if source.is_cuda else self.devices[0])
            with torch.cuda.stream(stream):
                copy_bits(source, one.stretches)
            sent_bytes += source.nbytes
            if sent_bytes >= _AT_A_TIME_BYTES:
                stream.synchronize()
                sent_bytes = 0
        self.events = tuple(self.buffers.stream(device).record_event() for device in self.devices)

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Let the next step of these optimizers wait, on the device, for what has not been copied yet."""
        self.buffers.guard(optimizers)

    def release(self) -> None:
        """The bytes are written, or given up: the buffers are free for the next save. Call it exactly once."""
        if self.sources and not self.pieces:
            # Given up before it had any.
            self.sources.clear()
            return
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
    is_checked: bool = False,
) -> Staged:
    """Copy what this rank will write.

    On GPUs with room for it the copy is made there, which takes milliseconds, and ``Staged.wait`` brings it to the
    host: then neither the loop nor the memory of the host has to be waited for.

    Args:
        plan: Who writes what.
        tensors: The live tensors the plan was made for.
        buffers: Where the copies go.
        until_step: Names that nothing but an optimizer step changes. On a GPU they are copied beside the next forward
            and backward; ``Staged.guard`` must then know every optimizer that may change them.
        is_checked: Take checksums of the sources, which are all in host memory.

    Raises:
        NoMemory: the host has no memory for the copies.
        RuntimeError: the buffers are still in use by an earlier save.
    """
    sources = [local_piece(tensors, piece.name, piece.box) for piece in plan.pieces]
    devices = tuple({source.device for source in sources if source.is_cuda})
    if devices and all(_has_room(device, sources) for device in devices):
        # A GPU that has less room than it says leaves it to the way below.
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return _staged_there(plan, sources, buffers, devices)
    staged = buffers.take(plan.pieces, next(iter(devices), None))
    try:
        if is_checked:
            named = [
                Source(one.piece.name, source, one.stretches, one.parts)
                for one, source in zip(staged, sources, strict=True)
            ]
            with asking_for_memory():
                checksums = copy_checked(named)
            return Staged(plan.pieces, buffers, [], staged, checksums=checksums)
        for device in devices:
            # What the copies read was computed on the current stream.
            buffers.stream(device).wait_stream(torch.cuda.current_stream(device))
        for one, source in zip(staged, sources, strict=True):
            if source.is_cuda and one.piece.name in until_step:
                stream = buffers.stream(source.device)
                with torch.cuda.stream(stream):
                    copy_bits(source, one.stretches)
                source.record_stream(stream)
            else:
                copy_bits(source, one.stretches)
        beside = {device: buffers.stream(device).record_event() for device in devices}
        buffers.expect(beside)
        in_order = [torch.cuda.current_stream(device).record_event() for device in devices]
    except BaseException:
        buffers.give_back()
        raise
    on_gpus = [source for source in sources if source.is_cuda]
    return Staged(plan.pieces, buffers, on_gpus, staged, (*beside.values(), *in_order), devices)


def _staged_there(
    plan: SavePlan, sources: Sequence[torch.Tensor], buffers: Buffers, devices: tuple[torch.device, ...]
) -> Staged:
    copies = [source.clone() for source in sources]
    for device in devices:
        buffers.stream(device).wait_stream(torch.cuda.current_stream(device))
    for copy in copies:
        if copy.is_cuda:
            copy.record_stream(buffers.stream(copy.device))
    buffers.expect({})
    return Staged(plan.pieces, buffers, copies, devices=devices)


def _has_room(device: torch.device, sources: Iterable[torch.Tensor]) -> bool:
    """Whether a GPU could hold the sources twice more: once for the copy, and as much is left to the loop."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return free_bytes > 2 * sum(source.nbytes for source in sources if source.device == device)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def room(pieces: Iterable[Piece]) -> int:
    """The host memory that the copies of some pieces take."""
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


# ---- checking staged bytes against their fingerprints ----

# Larger than the chunks at an edge: fewer, longer operations leave Python's lock to the training thread.
_CHUNK_WORDS: Final = 1 << 17
_MOST_THREADS: Final = 8
# What goes back to a GPU at a time, to be added up there.
_RETURNED_BYTES: Final = 32 << 20


def staged_sums(staged: Staged, plan: SavePlan, *, with_tied: bool = False) -> torch.Tensor:
    """What the staged pieces add to the two sums of each tensor of the plan, from the bytes in host memory.

    One row a tensor, in the order of the plan: added up over the ranks they are the sums of the whole tensors. What
    came from a GPU goes back to it: a processor would take longer for the sums than the disk for the bytes.

    A tied tensor is staged under the first of its names only; ``with_tied`` counts it under the others too.
    """
    for device in staged.devices[:1]:
        # A GPU without room for it leaves it to the processor.
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            return _sums_on(device, staged, plan)
    pieces, names = staged.pieces, _names(plan, with_tied=with_tied)
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4, len(pieces)))
    with ThreadPoolExecutor(threads, thread_name_prefix="unbroken-verify") as pool:
        return sum(
            pool.map(lambda first: _sums_here(pieces[first::threads], plan, names), range(threads)),
            start=torch.zeros(len(plan.tensors), 2, dtype=torch.int64, device="cpu"),
        )


def _names(plan: SavePlan, *, with_tied: bool = False) -> dict[str, list[str]]:
    """The names of each tensor that is written, by the one that it is written under."""
    found: dict[str, list[str]] = {}
    for name, planned in plan.tensors.items():
        if with_tied or planned.same_as == name:
            found.setdefault(planned.same_as, []).append(name)
    return found


def _sums_here(pieces: Sequence[StagedPiece], plan: SavePlan, names: Mapping[str, Sequence[str]]) -> torch.Tensor:
    found = torch.zeros(len(plan.tensors), 2, dtype=torch.int64, device="cpu")
    add, short = HostPasses(_CHUNK_WORDS), ShortRows(plan.keys, found.numpy().view(np.uint64))
    for words, begin, places, row in _rows(pieces, plan, names):
        if is_short(words, places):
            short.add(words, places.start + begin, row)
        else:
            add(words, places, _keys(plan, row), found[row], begin=begin)
    short.flush()
    return found


def _keys(plan: SavePlan, row: int) -> Keys:
    first, second = plan.keys[row].tolist()
    return Keys(first, second)


def _sums_on(device: torch.device, staged: Staged, plan: SavePlan) -> torch.Tensor:
    stream, sent_bytes = staged.buffers.stream(device), 0
    with torch.cuda.stream(stream):
        found = torch.zeros(len(plan.tensors), 2, dtype=torch.int64, device=device)
        room, add = torch.empty(_RETURNED_BYTES, dtype=torch.uint8, device=device), arithmetic(device)
        for words, begin, places, row in _rows(staged.pieces, plan, _names(plan)):
            keys = _keys(plan, row)
            here = room.view(words.dtype)
            for first in range(0, words.numel(), here.numel()):
                part = words[first : first + here.numel()]
                returned = here[: part.numel()]
                returned.copy_(part, non_blocking=True)
                add(returned, places, keys, found[row], begin=begin + first)
                sent_bytes += part.nbytes
                if sent_bytes >= _RETURNED_BYTES:
                    # There is time until the bytes are on the disk: the training loop has the GPU and the lock.
                    began, sent_bytes = time.monotonic(), 0
                    stream.synchronize()
                    time.sleep(_PAUSES * (time.monotonic() - began))
        return found.cpu()


def _rows(
    pieces: Sequence[StagedPiece], plan: SavePlan, names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[torch.Tensor, int, Places, int]]:
    """The words of each stretch: which word of its piece is the first, their places, their tensor's row in the plan.

    Once for each name that is counted.
    """
    rows = {name: row for row, name in enumerate(plan.tensors)}
    for staged in pieces:
        name, dtype, box = staged.piece
        width = min(DTYPES[dtype].itemsize, 4)
        places = _places(plan.tensors[name].shape, box, DTYPES[dtype].itemsize // width)
        words = [stretch.view(WORDS[width]) for stretch in staged.stretches]
        for called in names[name]:
            begins = accumulate((row.numel() for row in words), initial=0)
            for row, begin in zip(words, begins, strict=False):
                yield row, begin, places, rows[called]


@lru_cache(maxsize=1 << 14)
def _places(whole: tuple[int, ...], box: Box, per_element: int) -> Places:
    return Places.of((*whole, per_element), (*box.offsets, 0), (*box.sizes, per_element))


def described_by(plan: SavePlan, sums: torch.Tensor) -> dict[str, Tensor]:
    """Every tensor of the plan with its fingerprint, from the sums of the copies under all names."""
    prints = _prints(plan, sums)
    return {
        name: Tensor(planned.dtype, planned.shape, found)
        for (name, planned), found in zip(plan.tensors.items(), prints, strict=True)
    }


def _prints(plan: SavePlan, sums: torch.Tensor) -> list[str]:
    return prints_of(sums.numpy().view(np.uint64) + plan.keys)


def require_as_copied(staged: Staged, step: int) -> None:
    """Pass if the copies still have the checksums that their sources had at the edge.

    Raises:
        WrittenDuringSave: some tensors were written while they were copied, or a copy was changed after it.
    """
    if written := staged.checksums.changed():
        raise WrittenDuringSave(step=step, names=written)


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
        for (name, planned), found in zip(plan.tensors.items(), _prints(plan, sums), strict=True)
        # A tied tensor is staged under the first of its names only.
        if planned.same_as == name and found != described[name].digest
    ]
    if written:
        raise WrittenDuringSave(step=step, names=tuple(sorted(written)))
