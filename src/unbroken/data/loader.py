"""One rank's batches of a stream, for any loop.

    stream = Stream(open_corpus(Path("data")), max_length=2048, seed=0)
    loader = Loader(stream, global_batch_size=64, per_device_batch_size=8, num_workers=4)
    for batch in loader:
        loss = model(batch.tokens, batch.labels)

A step is ``global_batch_size`` consecutive samples of the stream, cut into lanes; a batch is one lane. The position of
a loader is one number, the samples of the whole steps it has yielded: the same on every rank, whatever workers have
prefetched. So a state can be loaded on any world size, with any number of workers and any batch size.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from numbers import Integral
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from unbroken.data.exactly_once import Served, ServedCheck
from unbroken.data.lanes import LaneSamples, cut_lanes
from unbroken.data.packing.rows import Rows
from unbroken.data.stream import Lookup, Stream
from unbroken.data.stream_record import GROW, read_stream_record, resume_stream, stream_record
from unbroken.errors import NoProcessGroup, StreamDiffers, UnbrokenError
from unbroken.store.fields import Malformed, Table

# ---- looking ahead ----

# At this size the fixed cost of a look-up is small, and so is its memory; counted in tokens, so that long sequences
# come in smaller blocks.
BLOCK_TOKENS: Final = 1 << 22
_GROWTH: Final = 8
# In the training process a few batches are made at a time, which costs a sixth less; more at once are slower: they
# leave the caches of the processor. A batch that is kept keeps those made with it: the bound on their tokens is 1.3 MB.
_MOST_AHEAD: Final = 4
_TOKENS_AHEAD: Final = 1 << 16


@dataclass(frozen=True)
class _Block:
    """The look-up of the turns ``first``, ``first + stride``, ..."""

    first: int
    stride: int
    turns: int
    lookup: Lookup
    accounts: list[list[int]]

    def place(self, turn: int) -> int | None:
        """The index of a turn in the block."""
        nth, rest = divmod(turn - self.first, self.stride)
        return nth if rest == 0 and 0 <= nth < self.turns else None


class LaneReader:
    """Reads one rank's lanes by turn; turn 0 is its first lane of the step that starts at sample ``start``.

    Args:
        stream: the stream to read.
        lanes: the lanes of the rank.
        start: the first sample of the step of turn 0.
        turns: the number of turns; None: no end.
    """

    def __init__(self, stream: Stream, lanes: LaneSamples, start: int, turns: int | None) -> None:
        self.stream = stream
        self.lanes = lanes
        self.start = start
        self.turns = turns
        self._block: _Block | None = None

    def read(self, turn: int, *, stride: int = 1) -> tuple[Rows, list[int]]:
        """One lane, and the two words of its served sum; ``turn + stride`` is likely to be read next.

        Raises:
            IndexError: the turn is out of range.
            SequenceDamaged, ShardDamaged: as ``Stream.rows`` does.
        """
        block, place = self._find(turn, stride)
        return self._rows(block, place, 1), block.accounts[place]

    def read_ahead(self, turn: int) -> tuple[Rows, list[list[int]]]:
        """One lane and the few after it that are cheaper to make together, and the served sum of each.

        Only the first one where a row of the others is damaged, so that the error is raised when it is its turn.

        Raises:
            IndexError: the turn is out of range.
            SequenceDamaged, ShardDamaged: as ``Stream.rows`` does, for the first lane.
        """
        block, place = self._find(turn, 1)
        count = min(_MOST_AHEAD, _TOKENS_AHEAD // (self.lanes.size * self.stream.max_length), block.turns - place)
        if count > 1:
            with contextlib.suppress(UnbrokenError):
                return self._rows(block, place, count), block.accounts[place : place + count]
        return self._rows(block, place, 1), block.accounts[place : place + 1]

    def _find(self, turn: int, stride: int) -> tuple[_Block, int]:
        """The block of a turn, and its place in it."""
        block = self._block
        if block is not None and block.stride == stride:
            place = block.place(turn)
            if place is not None:
                return block, place
        return self._next_block(turn, stride), 0

    def _rows(self, block: _Block, place: int, count: int) -> Rows:
        size = self.lanes.size
        return self.stream.rows(block.lookup, place * size, (place + count) * size)

    def _next_block(self, turn: int, stride: int) -> _Block:
        before = self._block
        follows = before is not None and before.stride == stride and turn == before.first + before.turns * stride
        wanted = before.turns * _GROWTH if before is not None and follows else 1
        largest = BLOCK_TOKENS // (self.lanes.size * self.stream.max_length)
        turns = max(min(wanted, largest), 1)
        if self.turns is not None:
            if not 0 <= turn < self.turns:
                raise IndexError(f"turns are 0 to {self.turns - 1}, not {turn}")
            turns = min(turns, -(-(self.turns - turn) // stride))
        samples = self.lanes.samples(turn + stride * np.arange(turns, dtype=np.int64), self.start)
        lookup = self.stream.look_up(samples)
        accounts = lookup.identities.reshape(turns, self.lanes.size, 2).sum(axis=1, dtype=np.uint64).tolist()
        self._block = _Block(turn, stride, turns, lookup, accounts)
        return self._block


# ---- the loader ----

_TENSORS: Final = ("tokens", "labels", "doc_ids", "positions")


@dataclass(eq=False)
class Batch:
    """One lane: tensors of ``[lane, max_length]``, with their step, lane and sample numbers.

    ``labels`` are unshifted, -100 where ignored; ``doc_ids`` number the documents of each row, -1 on padding;
    ``positions`` count over the whole row. ``batch["tokens"]`` and ``model(**batch)`` work too.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    doc_ids: torch.Tensor
    positions: torch.Tensor
    step: int
    lane: int
    samples: range

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The same batch on a device."""
        tokens, labels, doc_ids, positions = (self[name].to(device, non_blocking=non_blocking) for name in _TENSORS)
        return replace(self, tokens=tokens, labels=labels, doc_ids=doc_ids, positions=positions)

    def keys(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return _TENSORS

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in _TENSORS:
            raise KeyError(name)
        tensor: torch.Tensor = getattr(self, name)
        return tensor


# Tokens, labels, document ids, and the two words of the served sum.
_Lane = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]


class _Turns(Dataset["_Lane | UnbrokenError"]):
    """The lanes of a reader by turn, as a worker returns them: tensors over the arrays, and their served sum."""

    def __init__(self, reader: LaneReader) -> None:
        self._reader = reader

    def __getitem__(self, turn: int) -> "_Lane | UnbrokenError":
        worker = get_worker_info()
        try:
            return _as_tensors(*self._reader.read(turn, stride=worker.num_workers if worker else 1))
        except UnbrokenError as error:
            # Returned, not raised: torch would re-raise it as a RuntimeError without its fields.
            return error


def _as_tensors(rows: Rows, account: list[int]) -> _Lane:
    return torch.from_numpy(rows.tokens), torch.from_numpy(rows.labels), torch.from_numpy(rows.doc_ids), account


def _alone(made: "_Lane | UnbrokenError") -> tuple[_Lane]:
    if isinstance(made, UnbrokenError):
        raise made
    return (made,)


def _pinned(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def _as_it_is(lane: Any) -> Any:  # noqa: ANN401 - the signature of collate_fn
    return lane


class _Counting(Sampler[int]):
    """The turns 0, 1, 2, ... in order."""

    def __init__(self, turns: int | None) -> None:
        self._turns = turns

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while self._turns is None or turn < self._turns:
            yield turn
            turn += 1


class _Ending(Iterator[Batch]):
    """What follows the batches: nothing, or again the error that ended them.

    A generator that has raised only ends when it is asked again, which a loop that catches errors takes for the end.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __next__(self) -> Batch:
        raise StopIteration if self.error is None else copy(self.error)


class Loader(Iterable[Batch]):
    """One rank's batches, from its position to the end of the stream.

    Args:
        stream: the stream to read.
        global_batch_size: samples of a step, over all ranks.
        per_device_batch_size: samples of a batch, which is one lane; by default the global batch divided by the number
            of ranks. If given, a step is cut into the same batches on any world size.
        rank: this rank; by default that of the process group.
        world_size: the number of ranks; by default that of the process group.
        num_workers: processes that prepare batches; 0: in this process.
        prefetch_factor: batches that each worker prepares ahead.
        pin_memory: return batches in pinned memory; by default if there is a GPU.
        multiprocessing_context: the start method of worker processes; by default torch's.

    Raises:
        LanesUnfit: the sizes do not divide each other, or a rank would have nothing to read.
        NoProcessGroup: the launcher says that there are several ranks and no process group was initialised.
        TypeError: a number is not a whole number.
        ValueError: only one of ``rank`` and ``world_size`` is given, or ``num_workers`` or ``prefetch_factor`` is out
            of range.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        global_batch_size: int,
        per_device_batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if rank is None and world_size is None:
            rank, world_size = _rank_and_world()
        if rank is None or world_size is None:
            # A guess for the other one could silently make ranks read the same lanes.
            raise ValueError(f"give both rank and world_size, or neither: rank is {rank}, world_size is {world_size}")
        _require_whole(
            global_batch_size=global_batch_size,
            per_device_batch_size=1 if per_device_batch_size is None else per_device_batch_size,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
        )
        if num_workers < 0 or prefetch_factor < 1:
            given = f"are {num_workers} and {prefetch_factor}"
            raise ValueError(f"num_workers must be at least 0 and prefetch_factor at least 1, {given}")
        self.stream = stream
        self.lanes: LaneSamples = cut_lanes(global_batch_size, per_device_batch_size, rank, world_size)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.position = 0
        self.steps = 0
        self.notices: list[str] = []
        self._multiprocessing_context = multiprocessing_context
        self._pins = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._accepted: frozenset[str] = frozenset()
        self._settled = Served()
        # This rank's whole steps since it was settled, as numbers: a sum of ``Served`` at every step would cost more.
        self._count = self._low = self._high = 0
        self._proof: ServedCheck | None = None
        self._began_at = 0
        self._serving: object = None

    # ---- iterating ----

    def __iter__(self) -> Iterator[Batch]:
        """The batches after the last whole step; workers start at once. An older iterator raises an error.

        After an error the iterator raises the same one each time: it does not end as if the data were exhausted.
        """
        steps = self._whole_steps()
        turns = None if steps is None else steps * self.lanes.per_step
        reader = LaneReader(self.stream, self.lanes, self.position, turns)
        self._serving = serving = object()
        groups = self._by_workers(reader) if self.num_workers else self._here(reader)
        ending = _Ending()
        return chain(self._batches(groups, serving, ending), ending)

    def _here(self, reader: LaneReader) -> Iterator[Iterable[_Lane]]:
        turn, size, made = 0, self.lanes.size, _pinned if self._pins else torch.from_numpy
        while reader.turns is None or turn < reader.turns:
            rows, accounts = reader.read_ahead(turn)
            turn += len(accounts)
            # Cut by numpy, each as it is used: views of one tensor cost more, and would have the storage of all.
            shape = len(accounts), size, self.stream.max_length
            tokens, labels, doc_ids = (
                map(made, each.reshape(shape)) for each in (rows.tokens, rows.labels, rows.doc_ids)
            )
            yield zip(tokens, labels, doc_ids, accounts, strict=True)

    def _by_workers(self, reader: LaneReader) -> Iterator[Iterable[_Lane]]:
        source = DataLoader(
            _Turns(reader),
            batch_size=None,
            sampler=_Counting(reader.turns),
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context=self._multiprocessing_context,
            pin_memory=self._pins,
            collate_fn=_as_it_is,
            # Its own: creating an iterator draws a seed, which must not advance the global RNG that training uses.
            generator=torch.Generator(),
        )
        return map(_alone, iter(source))

    def _batches(self, groups: Iterator[Iterable[_Lane]], serving: object, ending: "_Ending") -> Iterator[Batch]:
        try:
            yield from self._each_batch(groups, serving)
        except (UnbrokenError, OSError, RuntimeError) as error:
            # A copy, without the traceback: that leads to this frame and would keep the workers.
            ending.error = copy(error)
            raise

    def _each_batch(self, groups: Iterator[Iterable[_Lane]], serving: object) -> Iterator[Batch]:
        start, steps, size, per_step = self.position, self.steps, self.lanes.size, self.lanes.per_step
        whole, of_rank = self.lanes.global_batch, self.lanes.of_rank
        counted = torch.arange(self.stream.max_length).repeat(size, 1)
        # Copied for each batch: a loop may write into what it is given. Not pinned itself, so that pinning copies.
        positions = counted.pin_memory if self._pins else counted.clone
        low = high = 0
        for turn, (tokens, labels, doc_ids, (more_low, more_high)) in enumerate(chain.from_iterable(groups)):
            if serving is not self._serving:
                raise RuntimeError("this iterator is invalid: the loader was iterated again, or a state was loaded")
            step, nth = divmod(turn, per_step)
            lane = of_rank.nth(nth)
            first = start + step * whole + lane * size
            low, high = low + more_low, high + more_high
            if (turn + 1) % per_step == 0:
                # Only now: a state taken between the lanes of a step has the position of the start of the step.
                self.position = start + (step + 1) * whole
                self.steps = steps + step + 1
                self._count, self._low, self._high = self._count + per_step * size, self._low + low, self._high + high
                low = high = 0
            yield Batch(tokens, labels, doc_ids, positions(), steps + step, lane, range(first, first + size))

    def _whole_steps(self) -> int | None:
        """Whole steps left in the stream."""
        return None if self.stream.end is None else (self.stream.end - self.position) // self.lanes.global_batch

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Its position and record as plain JSON; the same on every rank after ``settle_served`` on all ranks."""
        served = self._settled + self.served_share() if self.lanes.of_rank.world == 1 else self._settled
        return {
            "position": self.position,
            "steps": self.steps,
            "served": served.as_json(),
            "stream": stream_record(self.stream),
        }

    def accept(self, names: Collection[str]) -> None:
        """Names the user accepted, before a state is loaded: ``data.grow`` lets new shards join."""
        self._accepted = frozenset(names)

    def is_accepting(self, name: str) -> bool:
        """Whether the loader checks for this accepted name."""
        return name == GROW

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, on any world size and with any batch size; ``notices`` lists what joined or changed.

        Raises:
            StreamDiffers: the state is of another stream.
            DataChanged: the data changed since.
        """
        try:
            table = Table(state, "the state of the loader")
            position, steps = table.whole("position"), table.whole("steps")
            record, served = read_stream_record(table.table("stream")), Served.from_json(table.table("served"))
        except (Malformed, ValueError) as malformed:
            raise StreamDiffers(differences=(("state", str(malformed), "a loader of unbroken.data"),)) from None
        resumed = resume_stream(record, self.stream, position, self._accepted)
        self.stream, self.notices = resumed.stream, list(resumed.notices)
        self.position, self.steps = position, steps
        self._settled, self._count, self._low, self._high = served, 0, 0, 0
        self._proof, self._began_at = None, position
        self._serving = None

    # ---- called by Run ----

    def ended(self) -> str | None:
        """Why no further whole step can be served; None if one can."""
        steps = self._whole_steps()
        if steps is None or steps > 0:
            return None
        left = (self.stream.end or 0) - self.position
        exhausted = [each for each in self.stream.exhausted if each.sample >= (self.stream.end or 0)]
        cause = ", ".join(f"bucket {name}" for name in sorted({each.bucket for each in exhausted})) or "the data"
        rest = f", {left:,} samples short of a whole step" if left else ""
        return f"{cause} exhausted after step {self.steps:,}{rest}"

    def served_share(self) -> Served:
        """The served sum of this rank's whole steps since the last ``settle_served``."""
        return Served() + Served(self._count, self._low, self._high)

    def settle_served(self, total: Served) -> Callable[[], dict[str, Any]]:
        """Add the sum of all ranks' shares to the served sum of the state.

        Returns a function that checks the sum as it is now against one recomputed from the stream; it returns
        ``samples``, ``digest`` and whether the two agree, and may be called later and in another thread.
        """
        if self._proof is None:
            self._proof = ServedCheck(self.stream.identities_apart(), self._began_at, self._settled)
        self._settled, self._count, self._low, self._high = self._settled + total, 0, 0, 0
        return partial(_check_served, self._proof, self._settled, self.position)

    def settled_state(self, state: dict[str, Any], shares: Sequence[Any]) -> dict[str, Any]:
        """A state with the shares of all ranks added to its served sum, if the ranks could not settle themselves.

        Raises:
            ValueError: a share is not a served sum.
        """
        total = sum(map(Served.from_json, shares), Served.from_json(state.get("served")))
        return {**state, "served": total.as_json()}

    @property
    def served(self) -> Served:
        """The settled sum over all ranks since the run started."""
        return self._settled


def _check_served(proof: ServedCheck, served: Served, position: int) -> dict[str, Any]:
    return {**served.as_json(), "agrees": proof.holds(served, position)}


def _require_whole(**given: object) -> None:
    for name, value in given.items():
        if not isinstance(value, Integral):
            raise TypeError(f"{name} must be a whole number, is {value!r}")


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise NoProcessGroup(world_size=size)
    return 0, 1
