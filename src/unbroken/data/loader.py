"""One rank's batches of a stream, for any loop.

    stream = Stream(open_corpus(Path("data")), max_length=2048, seed=0)
    loader = Loader(stream, global_batch=64, lane=8, workers=4)
    for batch in loader:
        loss = model(batch.tokens, batch.labels)

A step is ``global_batch`` consecutive samples of the stream, cut into lanes; a batch is one lane. Where the loader
stands is one number, the samples of the whole steps it handed out: the same on every rank, whatever workers have
prefetched. So a state fits any world, any number of workers and any batch size.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from unbroken.data.continued import GROW, go_on, read_record, record_of
from unbroken.data.lanes import Lanes, cut_lanes
from unbroken.data.packing.assemble import Rows
from unbroken.data.served import Proof, Served
from unbroken.data.stream import Looked, Stream
from unbroken.errors import NoProcessGroup, StreamDiffers, UnbrokenError
from unbroken.store.fields import Malformed, Table

# ---- looking ahead ----

# What a look-up costs beside its samples is small at this size, and what it holds stays small too: windows are counted
# by tokens, so long sequences come in smaller blocks.
BLOCK_TOKENS: Final = 1 << 22
_GROWTH: Final = 8


@dataclass(frozen=True)
class _Block:
    """Turns ``first``, ``first + stride`` … as they were looked up."""

    first: int
    stride: int
    turns: int
    looked: Looked
    accounts: list[list[int]]

    def place(self, turn: int) -> int | None:
        """Which of the block's turns a turn is."""
        nth, rest = divmod(turn - self.first, self.stride)
        return nth if rest == 0 and 0 <= nth < self.turns else None


class LaneReader:
    """Reads the turns of some lanes; turn 0 is the first lane of the step that begins at sample ``start``.

    Args:
        stream: what is read.
        lanes: whose lanes.
        start: the first sample of the step that turn 0 belongs to.
        turns: how many turns there are; None: no end.
    """

    def __init__(self, stream: Stream, lanes: Lanes, start: int, turns: int | None) -> None:
        self.stream = stream
        self.lanes = lanes
        self.start = start
        self.turns = turns
        self._block: _Block | None = None

    def read(self, turn: int, *, stride: int = 1) -> tuple[Rows, int, int]:
        """One lane, and the two words of its account; ``stride`` says which turn is likely to be asked for next.

        Raises:
            IndexError: there is no such turn.
            SequenceDamaged, ShardDamaged: as ``Stream.rows`` does.
        """
        block, place = self._block, None
        if block is not None and block.stride == stride:
            place = block.place(turn)
        if block is None or place is None:
            block, place = self._next_block(turn, stride), 0
        first, last = place * self.lanes.size, (place + 1) * self.lanes.size
        low, high = block.accounts[place]
        return self.stream.rows(block.looked, first, last), low, high

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
        looked = self.stream.look_up(samples)
        accounts = looked.identities.reshape(turns, self.lanes.size, 2).sum(axis=1, dtype=np.uint64).tolist()
        self._block = _Block(turn, stride, turns, looked, accounts)
        return self._block


# ---- the loader ----

_TENSORS: Final = ("tokens", "labels", "doc_ids", "positions")


@dataclass(eq=False)
class Batch:
    """One lane: tensors of ``[lane, max_length]``, and which step, lane and samples of the run they are.

    ``labels`` are unshifted, -100 where nothing is to be learned; ``doc_ids`` number the documents of each row, -1 on
    padding; ``positions`` go on over the whole row. ``batch["tokens"]`` and ``model(**batch)`` work too.
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


_Lane = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]


class _Turns(Dataset["_Lane | UnbrokenError"]):
    """The lanes of a reader by turn, as a worker makes them: tensors over the arrays, and the account of them."""

    def __init__(self, reader: LaneReader) -> None:
        self._reader = reader

    def __getitem__(self, turn: int) -> "_Lane | UnbrokenError":
        worker = get_worker_info()
        try:
            return _as_tensors(*self._reader.read(turn, stride=worker.num_workers if worker else 1))
        except UnbrokenError as error:
            # Handed over as it is: torch would make a RuntimeError of it, without its fields.
            return error


def _as_tensors(rows: Rows, low: int, high: int) -> _Lane:
    return torch.from_numpy(rows.tokens), torch.from_numpy(rows.labels), torch.from_numpy(rows.doc_ids), low, high


def _as_it_is(lane: Any) -> Any:  # noqa: ANN401 - torch's word for a function that collates
    return lane


class _Counting(Sampler[int]):
    """Turn after turn, to the end if there is one."""

    def __init__(self, turns: int | None) -> None:
        self._turns = turns

    def __iter__(self) -> Iterator[int]:
        turn = 0
        while self._turns is None or turn < self._turns:
            yield turn
            turn += 1


class Loader(Iterable[Batch]):
    """One rank's batches, from where it stands to the end of the stream.

    Args:
        stream: what is read.
        global_batch: samples of a step, over all ranks.
        lane: samples of a batch; by default the global batch is shared evenly. With a size of its own, the cut of a
            step into batches is the same in every world.
        rank: which rank's batches; by default that of the process group.
        world: how many ranks; by default those of the process group.
        workers: processes that prepare batches; 0 does it here.
        prefetch: batches that each worker prepares ahead.
        pin_memory: batches in pinned memory; by default where there is a GPU.
        context: how workers are started; by default as torch does.

    Raises:
        LanesUnfit: the sizes do not divide each other, or a rank would have nothing to read.
        NoProcessGroup: the launcher says that there are several ranks and no process group was initialised.
        ValueError: of ``rank`` and ``world`` only one is given, or ``workers`` or ``prefetch`` cannot be.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        global_batch: int,
        lane: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        context: str | None = None,
    ) -> None:
        if rank is None and world is None:
            rank, world = _own_place()
        if rank is None or world is None:
            # The other one of a guessed pair would make ranks read the same lanes, in silence.
            raise ValueError(f"rank and world are given together, or neither: rank {rank}, world {world}")
        if workers < 0 or prefetch < 1:
            raise ValueError(f"workers is at least 0 and prefetch at least 1, not {workers} and {prefetch}")
        self.stream = stream
        self.lanes: Lanes = cut_lanes(global_batch, lane, rank, world)
        self.workers = workers
        self.prefetch = prefetch
        self.position = 0
        self.steps = 0
        self.notices: list[str] = []
        self._context = context
        self._pins = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._accepted: frozenset[str] = frozenset()
        self._settled = Served()
        self._share = Served()
        self._proof: Proof | None = None
        self._began_at = 0
        self._serving: object = None
        # Made once and shared by all batches: it never changes.
        positions = torch.arange(stream.max_length).expand(self.lanes.size, -1)
        self._positions = positions.contiguous().pin_memory() if self._pins else positions

    # ---- iterating ----

    def __iter__(self) -> Iterator[Batch]:
        """The batches from the last whole step on; workers start at once. An older iterator ends with an error."""
        steps = self._whole_steps()
        turns = None if steps is None else steps * self.lanes.mine
        reader = LaneReader(self.stream, self.lanes, self.position, turns)
        self._serving = serving = object()
        return self._batches(self._by_workers(reader) if self.workers else self._here(reader), serving)

    def _here(self, reader: LaneReader) -> Iterator[_Lane]:
        for turn in _Counting(reader.turns):
            tokens, labels, doc_ids, low, high = _as_tensors(*reader.read(turn))
            if self._pins:
                tokens, labels, doc_ids = tokens.pin_memory(), labels.pin_memory(), doc_ids.pin_memory()
            yield tokens, labels, doc_ids, low, high

    def _by_workers(self, reader: LaneReader) -> "Iterator[_Lane | UnbrokenError]":
        source = DataLoader(
            _Turns(reader),
            batch_size=None,
            sampler=_Counting(reader.turns),
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            multiprocessing_context=self._context,
            pin_memory=self._pins,
            collate_fn=_as_it_is,
            # Of its own: making an iterator draws a seed, which must not come from the generator that training uses.
            generator=torch.Generator(),
        )
        return iter(source)

    def _batches(self, lanes: "Iterator[_Lane | UnbrokenError]", serving: object) -> Iterator[Batch]:
        start, steps, size, mine = self.position, self.steps, self.lanes.size, self.lanes.mine
        low = high = 0
        for turn, made in enumerate(lanes):
            if serving is not self._serving:
                raise RuntimeError("this iterator was left behind: the loader was iterated anew, or a state was loaded")
            if isinstance(made, UnbrokenError):
                raise made
            tokens, labels, doc_ids, more_low, more_high = made
            step, lane = self.lanes.place(turn)
            first = start + step * self.lanes.global_batch + lane * size
            low, high = low + more_low, high + more_high
            if (turn + 1) % mine == 0:
                # Only now: a state taken between the lanes of a step stands at the start of the step.
                self.position = start + (step + 1) * self.lanes.global_batch
                self.steps = steps + step + 1
                self._share += Served(mine * size, low, high)
                low = high = 0
            yield Batch(tokens, labels, doc_ids, self._positions, steps + step, lane, range(first, first + size))

    def _whole_steps(self) -> int | None:
        """How many whole steps the stream still has."""
        return None if self.stream.end is None else (self.stream.end - self.position) // self.lanes.global_batch

    # ---- where it stands ----

    def state_dict(self) -> dict[str, Any]:
        """Where it stands: numbers, text and lists, the same on every rank once ``settle_served`` was called on all."""
        served = self._settled + self._share if self.lanes.world == 1 else self._settled
        return {
            "position": self.position,
            "steps": self.steps,
            "served": served.as_json(),
            "stream": record_of(self.stream),
        }

    def accept(self, names: Collection[str]) -> None:
        """Say, before a state is loaded, what a person agreed to: ``data.grow`` lets new shards join."""
        self._accepted = frozenset(names)

    def is_accepting(self, name: str) -> bool:
        """Whether an accepted name is looked at here."""
        return name == GROW

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand there, in any world, with any batch size; ``notices`` says what joined or changed.

        Raises:
            StreamDiffers: the state is not one of this stream.
            DataChanged: the data is not the data of the state.
        """
        try:
            table = Table(state, "the state of the loader")
            position, steps = table.whole("position"), table.whole("steps")
            record, served = read_record(table.table("stream")), Served.from_json(table.table("served"))
        except (Malformed, ValueError) as malformed:
            raise StreamDiffers(differences=(("state", str(malformed), "a loader of unbroken.data"),)) from None
        continued = go_on(record, self.stream, position, self._accepted)
        self.stream, self.notices = continued.stream, list(continued.notices)
        self.position, self.steps = position, steps
        self._settled, self._share = served, Served()
        self._proof, self._began_at = None, position
        self._serving = None

    # ---- what a run asks ----

    def ended(self) -> str | None:
        """Why no further whole step can be served; None if one can."""
        steps = self._whole_steps()
        if steps is None or steps > 0:
            return None
        left = (self.stream.end or 0) - self.position
        dry = [each for each in self.stream.dry if each.sample >= (self.stream.end or 0)]
        cause = ", ".join(f"bucket {name}" for name in sorted({each.bucket for each in dry})) or "the data"
        rest = f", {left:,} samples before a whole step" if left else ""
        return f"{cause} ran dry after step {self.steps:,}{rest}"

    def served_share(self) -> Served:
        """What this rank has handed out, in whole steps, since the last ``settle_served``."""
        return self._share

    def settle_served(self, total: Served) -> Callable[[], dict[str, Any]]:
        """Take the sum of all ranks' shares into the account that the state keeps.

        What is returned proves the account as it is now: it recomputes from the stream what was to be served and tells
        ``samples``, ``digest`` and whether the two agree. It may be called later and in another thread.
        """
        if self._proof is None:
            self._proof = Proof(self.stream.identities_apart(), self._began_at, self._settled)
        self._settled, self._share = self._settled + total, Served()
        return partial(_tell, self._proof, self._settled, self.position)

    def settled_state(self, state: dict[str, Any], shares: Sequence[Any]) -> dict[str, Any]:
        """A state with the shares of all ranks taken into its account, for ranks that could not add them up themselves.

        Raises:
            ValueError: a share is no account.
        """
        total = sum(map(Served.from_json, shares), Served.from_json(state.get("served")))
        return {**state, "served": total.as_json()}

    @property
    def served(self) -> Served:
        """The account that is settled: what all ranks have handed out since the run began."""
        return self._settled


def _tell(proof: Proof, served: Served, position: int) -> dict[str, Any]:
    return {**served.as_json(), "agrees": proof.holds(served, position)}


def _own_place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise NoProcessGroup(world_size=size)
    return 0, 1
