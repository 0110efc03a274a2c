"""The ranks of a job: rank and size, exchanges between them, and errors that reach every rank.

The only user of collectives outside ``exact/``. Everything that is exchanged is small and goes over a gloo group of its
own, so that it neither waits for nor disturbs the collectives of the training loop. A ``World`` of one rank needs no
process group at all. A background thread gets a world of its own (``beside``): a group is used by one thread only, and
the default group by none of ours. A rank that dies is noticed by the next exchange: ``PeerLost``.

The groups are made over the default group's store and not registered with torch: only the members take part, which a
run on a subset of the ranks needs, and ``close`` gives back their sockets and threads.
"""

import atexit
import collections
import contextlib
import hashlib
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from unbroken import torch_private
from unbroken.connection import connected_group, noticing_loss
from unbroken.errors import Bug, NoProcessGroup, NotInGroup, RankFailed, UnbrokenError

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 1800.0
# How many groups these ranks have made: all make them in the same order, so that each gets a name of its own.
_made: "collections.Counter[tuple[int, ...]]" = collections.Counter()
# How often a group that is to be dropped is looked at.
_LOOK_S: Final = 0.01
# Held while a group is dropped, and by the end of Python for good: then no thread is in torch's code any more.
_dropping = threading.Lock()
# Not for ever: in a child that was forked meanwhile nobody gives it back.
atexit.register(_dropping.acquire, timeout=10.0)


class Link:
    """A gloo group that one thread of each member exchanges over, until it is closed."""

    def __init__(self, group: Any, store: torch_private.Store | None = None) -> None:  # noqa: ANN401
        self._group = group
        self._store = store
        self._vote: dist.Work | None = None

    @classmethod
    def connect(cls, members: tuple[int, ...], rank: int, timeout_s: float) -> "Link":
        """Connect the members, each by its number in the default group; only they take part. Collective.

        Raises:
            PeerLost: a member did not come, or is gone.
            NoConnection: the members are there and cannot connect.
        """
        name = f"unbroken/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}/{_made[members]}"
        _made[members] += 1
        store = torch_private.PrefixStore(name, torch_private.default_store())
        return cls(connected_group(store, rank, len(members), timeout_s), store)

    def all_gather(self, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The tensors of all members, by rank; all have the same shape."""
        found = [torch.empty_like(tensor) for _ in range(size)]
        self._open.allgather([found], [tensor]).wait()
        return found

    def gather(self, tensor: torch.Tensor, size: int, *, is_root: bool) -> list[torch.Tensor]:
        """The tensors of all members, by rank, on rank 0; nothing elsewhere. All have the same shape."""
        found = [torch.empty_like(tensor) for _ in range(size)] if is_root else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._open.gather([found] if is_root else [], [tensor], options).wait()
        return found

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to one member, which receives it."""
        if tensor.numel():
            self._open.send([tensor], to, 0).wait()

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Fill a tensor with what one member sends."""
        if tensor.numel():
            self._open.recv([tensor], sender, 0).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Take the tensor of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._open.broadcast([tensor], options).wait()

    def reduce(self, tensor: torch.Tensor, how: "dist.ReduceOp.RedOpType") -> None:
        """Reduce a tensor in place, on all members."""
        self._start_reduce(tensor, how).wait()

    def start_vote(self, ballot: torch.Tensor) -> "dist.Work":
        """Start to take the maximum of all members' ballots, in place."""
        self._vote = self._start_reduce(ballot, dist.ReduceOp.MAX)
        return self._vote

    def _start_reduce(self, tensor: torch.Tensor, how: "dist.ReduceOp.RedOpType") -> "dist.Work":
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(how)
        return cast("dist.Work", self._open.allreduce([tensor], options))

    def post(self, key: str, text: str) -> None:
        """Post a text for the others in the store, unless there is one under this key; waits for no rank."""
        if self._store is not None:
            # The store may have gone with the process that served it; then there is nobody to read it.
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(key, "", text)

    def posted(self, key: str) -> str | None:
        """The text that was posted under a key; None if there is none, or the store is gone."""
        return _posted_in(self._store, key)

    def posted_by_launcher(self, key: str) -> str | None:
        """The text that a launcher, which does not know our groups, posted under a key of the store itself."""
        store: Any = self._store
        while isinstance(store, torch_private.PrefixStore):
            store = store.underlying_store
        return _posted_in(store, key)

    def close(self) -> None:
        """Close sockets and threads; a vote that a rank still has to answer is waited for by a thread."""
        group, self._group, self._store = self._group, None, None
        vote, self._vote = self._vote, None
        if group is not None and vote is not None and not vote.is_completed():
            # torch waits, holding the interpreter, until a group that goes away has nothing left to do: a rank that
            # hangs would hang this one.
            held = [(group, vote)]
            threading.Thread(target=_drop_when_answered, args=(held,), name="unbroken-unanswered", daemon=True).start()

    @property
    def _open(self) -> Any:  # noqa: ANN401
        if self._group is None:
            raise RuntimeError("the run was closed: its ranks exchange nothing any more")
        return self._group


def _posted_in(store: torch_private.Store | None, key: str) -> str | None:
    if store is None:
        return None
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def _drop_when_answered(held: "list[tuple[Any, dist.Work]]") -> None:
    """Drop a group once its last vote is answered; if that is never, the group stays until the process ends."""
    # Not by vote.wait(): a thread that comes back from torch's code while Python ends aborts the process.
    while held:
        with _dropping:
            if held[0][1].is_completed():
                held.clear()
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class World:
    """The ranks that train together; ``link`` is None in a world of one.

    ``members`` are the ranks' numbers in the default group, in the order of their ranks here.
    """

    rank: int
    size: int
    link: Link | None = None
    members: tuple[int, ...] = ()

    @classmethod
    def current(
        cls, process_group: "dist.ProcessGroup | None" = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "World":
        """The world of this process: that of a process group, the default one if none is named, else a world of one.

        Collective among the members where there is a group: each calls it at the same place.

        Raises:
            NoProcessGroup: the launcher started several ranks and no process group was initialised.
            NotInGroup: this process is not a member of the group.
            PeerLost: a member did not come, or is gone.
            NoConnection: the members cannot connect.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Each rank would take the run for itself and write the same checkpoint.
                raise NoProcessGroup(world_size=int(os.environ["WORLD_SIZE"]))
            return cls(0, 1)
        rank = _rank_in(process_group)
        # Named, because torch before 2.7 knows the default group by no other name than its own.
        members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        if len(members) == 1:
            return cls(0, 1)
        return cls(rank, len(members), Link.connect(members, rank, timeout_s), members)

    def beside(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "World":
        """The same ranks over another group, for a thread of its own. Collective."""
        if self.link is None:
            return self
        return World(self.rank, self.size, Link.connect(self.members, self.rank, timeout_s), self.members)

    def close(self) -> None:
        """Close the group's sockets and threads. Nothing can be exchanged afterwards."""
        if self.link is not None:
            self.link.close()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and commits."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank, by rank.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return [value]
        mine = packed(value)
        with noticing_loss(self.rank):
            sizes = [int(size) for size in self.link.all_gather(_number(mine.numel()), self.size)]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: mine.numel()] = mine
            said = self.link.all_gather(padded, self.size)
        return [cast("T", _unpacked(each[:size])) for each, size in zip(said, sizes, strict=True)]

    def gather(self, value: T) -> list[T]:
        """What every rank sends to rank 0, by rank; an empty list on the others. Each sends its own bytes only.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return [value]
        mine = packed(value)
        with noticing_loss(self.rank):
            sizes = self.link.gather(_number(mine.numel()), self.size, is_root=self.is_first)
            if not self.is_first:
                self.link.send(mine, 0)
                return []
            # One after the other: rank 0 holds one packed message at a time, however many ranks there are.
            others = [self._receive(rank, int(sizes[rank])) for rank in range(1, self.size)]
        return [value, *cast("list[T]", others)]

    def scatter(self, values: Sequence[T]) -> T:
        """The value that rank 0 has for this rank; the others' ``values`` are ignored.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return values[0]
        with noticing_loss(self.rank):
            if self.is_first:
                for rank in range(1, self.size):
                    message = packed(values[rank])
                    self.link.send(_number(message.numel()), rank)
                    self.link.send(message, rank)
                return values[0]
            size = _number(0)
            self.link.receive(size, 0)
            return cast("T", self._receive(0, int(size)))

    def _receive(self, sender: int, size: int) -> object:
        assert self.link is not None
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.link.receive(message, sender)
        return _unpacked(message)

    def broadcast(self, value: T) -> T:
        """The value of rank 0; the others' value is ignored.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return value
        said = packed(value if self.is_first else None)
        size = _number(said.numel())
        with noticing_loss(self.rank):
            self.link.broadcast(size)
            said = said if self.is_first else torch.empty(int(size), dtype=torch.uint8, device="cpu")
            self.link.broadcast(said)
        return value if self.is_first else cast("T", _unpacked(said))

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor of integers on the CPU, in place; wraps around as integers do.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is not None:
            with noticing_loss(self.rank):
                self.link.reduce(numbers, dist.ReduceOp.SUM)
        return numbers

    def differing(self, digests: Sequence[bytes]) -> list[bool]:
        """For each digest of 16 bytes, whether the ranks have different ones; every rank passes equally many.

        What a rank sends does not grow with the number of ranks.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None or not digests:
            return [False] * len(digests)
        words = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64)
        # The maximum of the complement is the complement of the minimum: equal words have both alike.
        both = torch.stack([words, ~words])
        with noticing_loss(self.rank):
            self.link.reduce(both, dist.ReduceOp.MAX)
        return (both[0] != ~both[1]).view(len(digests), -1).any(dim=1).tolist()

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank sets the flag.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        return self.start_vote([flag]).read()[0]

    def start_vote(self, flags: Sequence[bool]) -> "Vote":
        """Start a vote: for each flag, whether any rank sets it; the answer is read later, at no cost meanwhile."""
        # On the CPU whatever torch.set_default_device says: gloo carries it.
        ballot = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device="cpu")
        if self.link is None:
            return Vote(ballot, None)
        with noticing_loss(self.rank):
            work = self.link.start_vote(ballot)
        return Vote(ballot, work, self.rank)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails anywhere, it fails everywhere, with the first failing rank's error.

        One error for all, so that all decide alike what follows from it.

        Raises:
            UnbrokenError: this rank's own error, where it is the first that failed.
            RankFailed: another rank is.
        """
        result, mine = _attempt(action)
        first = self._first_failed(mine)
        if first is not None:
            self._raise_first(*first, mine)
        return cast("T", result)

    def _first_failed(self, mine: Exception | None) -> tuple[int, UnbrokenError] | None:
        """The first rank that failed, and its error; None where none did, which takes one number to find out."""
        failed = _number(self.size if mine is None else self.rank)
        if self.link is not None:
            with noticing_loss(self.rank):
                self.link.reduce(failed, dist.ReduceOp.MIN)
        if int(failed) == self.size:
            return None
        return next((rank, error) for rank, error in enumerate(self.all_gather(_as_sent(mine))) if error is not None)

    def gather_or_none(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and gather what it gave; fails as ``all_or_none`` does, in the same exchange.

        Raises:
            UnbrokenError: this rank's own error, where it is the first that failed.
            RankFailed: another rank is.
        """
        result, mine = _attempt(action)
        said = self.all_gather((result, _as_sent(mine)))
        for rank, (_, error) in enumerate(said):
            if error is not None:
                self._raise_first(rank, error, mine)
        return cast("list[T]", [value for value, _ in said])

    def gather_to_first(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and gather what it gave on rank 0; the list is empty on the others.

        Fails on every rank if it fails on one, as ``all_or_none`` does.

        Raises:
            UnbrokenError: this rank's own error, where it is the first that failed.
            RankFailed: another rank is.
        """
        result, mine = _attempt(action)
        said = self.gather((result, _as_sent(mine)))
        failed = [(rank, error) for rank, (_, error) in enumerate(said) if error is not None]
        first = self.broadcast(failed[0] if failed else None)
        if first is not None:
            self._raise_first(*first, mine)
        return cast("list[T]", [value for value, _ in said])

    def from_first(self, decide: Callable[[], T]) -> T:
        """Let rank 0 decide and send the result to the others; its error reaches every rank.

        Raises:
            UnbrokenError: rank 0's error, on rank 0.
            RankFailed: the same, on the others.
        """
        result, mine = _attempt(decide) if self.is_first else (None, None)
        value, error = self.broadcast((result, _as_sent(mine)))
        if error is not None:
            self._raise_first(0, error, mine)
        return cast("T", value)

    def _raise_first(self, rank: int, error: UnbrokenError, mine: Exception | None) -> None:
        if rank == self.rank and mine is not None:
            raise mine
        raise RankFailed(rank=rank, cause=error) from mine


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as refused:  # noqa: BLE001 - whatever it is, the others wait to hear of it; it is raised again
        return None, refused


def _as_sent(error: Exception | None) -> UnbrokenError | None:
    """An error as it is sent to the other ranks; an exception of the script may not be picklable."""
    if error is None or isinstance(error, UnbrokenError):
        return error
    return Bug(cause=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Vote:
    """A vote of all ranks in flight."""

    ballot: torch.Tensor
    work: "dist.Work | None"
    rank: int = 0

    def is_answered(self) -> bool:
        """Whether reading it would not wait."""
        return self.work is None or bool(self.work.is_completed())

    def read(self) -> list[bool]:
        """For each flag, whether any rank set it; waits only for what has not arrived yet.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.work is not None:
            with noticing_loss(self.rank):
                self.work.wait()
        return [bool(flag) for flag in self.ballot.tolist()]


def is_first_process(process_group: "dist.ProcessGroup | None" = None) -> bool:
    """Whether this process is rank 0 of the group, before there is a ``World``."""
    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank(process_group) == 0)
    return os.environ.get("RANK", "0") == "0"


def _rank_in(process_group: "dist.ProcessGroup | None") -> int:
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise NotInGroup(rank=dist.get_rank())
    return rank


# Smaller messages do not pay for the time.
_COMPRESSED_FROM_BYTES: Final = 4096


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def packed(value: object) -> torch.Tensor:
    """A value as bytes; long ones, such as ten thousand names and boxes, are compressed to a tenth."""
    data = pickle.dumps(value)
    data = b"z" + zlib.compress(data, 1) if len(data) >= _COMPRESSED_FROM_BYTES else b"p" + data
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(message: torch.Tensor) -> object:
    data = message.numpy().tobytes()
    # From a process of the same job, as torch's own exchange of objects.
    return pickle.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:])  # noqa: S301
