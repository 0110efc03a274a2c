"""The ranks of a job: who I am, what the others say, and errors that reach everybody.

The only user of collectives outside ``exact/``. Everything that is exchanged is small and goes over a gloo group of its
own, so that it neither waits for nor disturbs the collectives of the training loop. A ``World`` of one rank needs no
process group at all. A background thread gets a world of its own (``beside``): a group is used by one thread only, and
the default group by none of ours. A rank that dies is noticed by the next exchange: ``PeerLost``.

The groups are made over the default group's store and not registered with torch: only the members take part, which a
run on a subset of the ranks needs, and ``close`` gives back their sockets and threads.
"""

import collections
import contextlib
import datetime
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from unbroken.errors import Bug, NoProcessGroup, NotInGroup, PeerLost, RankFailed, UnbrokenError

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 1800.0
# How many groups these ranks have made: all make them in the same order, so that each gets a name of its own.
_made: "collections.Counter[tuple[int, ...]]" = collections.Counter()


class Link:
    """A gloo group that one thread of each member exchanges over, until it is closed."""

    def __init__(self, group: Any, store: "torch._C._distributed_c10d.Store | None" = None) -> None:  # noqa: ANN401
        self._group = group
        self._store = store
        self._vote: dist.Work | None = None

    @classmethod
    def connect(cls, members: tuple[int, ...], rank: int, timeout_s: float) -> "Link":
        """Connect the members, each by its number in the default group; only they take part. Collective."""
        name = f"unbroken/{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}/{_made[members]}"
        _made[members] += 1
        store = torch._C._distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        return cls(dist.ProcessGroupGloo(store, rank, len(members), datetime.timedelta(seconds=timeout_s)), store)

    def gather(self, tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
        """The tensors of all members, by rank; all have the same shape."""
        found = [torch.empty_like(tensor) for _ in range(size)]
        self._open.allgather([found], [tensor]).wait()
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Take the tensor of rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._open.broadcast([tensor], options).wait()

    def reduce(self, tensor: torch.Tensor, how: "dist.ReduceOp.RedOpType") -> "dist.Work":
        """Begin to reduce a tensor in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(how)
        self._vote = cast("dist.Work", self._open.allreduce([tensor], options))
        return self._vote

    def leave_word(self, key: str, text: str) -> None:
        """Leave a word for the others in the store, unless somebody has left one under this key; waits for nobody."""
        if self._store is not None:
            # The store may have gone with the process that served it; then nobody is left to tell.
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(key, "", text)

    def word(self, key: str) -> str | None:
        """The word that was left under a key; None if there is none, or nobody to ask."""
        return _word_in(self._store, key)

    def launchers_word(self, key: str) -> str | None:
        """The word that a launcher, which knows nothing of our groups, left under a key of the store itself."""
        store: Any = self._store
        while isinstance(store, torch._C._distributed_c10d.PrefixStore):
            store = store.underlying_store
        return _word_in(store, key)

    def close(self) -> None:
        """Give back sockets and threads; a vote that a rank still has to answer is waited for by a thread."""
        group, self._group, self._store = self._group, None, None
        vote, self._vote = self._vote, None
        if group is not None and vote is not None and not vote.is_completed():
            # torch waits, holding the interpreter, until a group that goes away has nothing left to do: a rank that
            # hangs would hang this one.
            threading.Thread(target=_wait_and_drop, args=(group, vote), name="unbroken-unanswered", daemon=True).start()

    @property
    def _open(self) -> Any:  # noqa: ANN401
        if self._group is None:
            raise RuntimeError("the run was left: its ranks exchange nothing any more")
        return self._group


def _word_in(store: "torch._C._distributed_c10d.Store | None", key: str) -> str | None:
    if store is None:
        return None
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None


def _wait_and_drop(group: object, vote: "dist.Work") -> None:
    with contextlib.suppress(RuntimeError):
        vote.wait()
    del group


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
            NoProcessGroup: the launcher says that there are several ranks and no process group was initialised.
            NotInGroup: this process is not a member of the group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Each rank would take the run for itself and write the same checkpoint.
                raise NoProcessGroup(world_size=int(os.environ["WORLD_SIZE"]))
            return cls(0, 1)
        rank = _rank_in(process_group)
        members = tuple(dist.get_process_group_ranks(process_group))
        if len(members) == 1:
            return cls(0, 1)
        return cls(rank, len(members), Link.connect(members, rank, timeout_s), members)

    def beside(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "World":
        """The same ranks over another group, for a thread of its own. Collective."""
        if self.link is None:
            return self
        return World(self.rank, self.size, Link.connect(self.members, self.rank, timeout_s), self.members)

    def close(self) -> None:
        """Give back what the group holds: its sockets and threads. Nothing can be exchanged afterwards."""
        if self.link is not None:
            self.link.close()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and commits."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """What every rank says, by rank.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return [value]
        mine = _packed(value)
        with noticing_loss(self.rank):
            sizes = [int(size) for size in self.link.gather(torch.tensor([mine.numel()], device="cpu"), self.size)]
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
            padded[: mine.numel()] = mine
            said = self.link.gather(padded, self.size)
        return [cast("T", _unpacked(each[:size])) for each, size in zip(said, sizes, strict=True)]

    def broadcast(self, value: T) -> T:
        """What rank 0 says; the others' value is ignored.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.link is None:
            return value
        said = _packed(value if self.is_first else None)
        size = torch.tensor([said.numel()], device="cpu")
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
                self.link.reduce(numbers, dist.ReduceOp.SUM).wait()
        return numbers

    def start_vote(self, flags: Sequence[bool]) -> "Vote":
        """Begin to ask whether any rank says yes to each question; the answer is read later, at no cost meanwhile."""
        # On the CPU whatever torch.set_default_device says: gloo carries it.
        ballot = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device="cpu")
        if self.link is None:
            return Vote(ballot, None)
        with noticing_loss(self.rank):
            work = self.link.reduce(ballot, dist.ReduceOp.MAX)
        return Vote(ballot, work, self.rank)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails anywhere, it fails everywhere, with the first failing rank's error.

        One error for all, so that all decide alike what follows from it.

        Raises:
            UnbrokenError: this rank's own error, where it is the first that failed.
            RankFailed: another rank is.
        """
        result, mine = _attempt(action)
        for rank, error in enumerate(self.all_gather(_told(mine))):
            if error is not None:
                self._raise_first(rank, error, mine)
        return cast("T", result)

    def gather_or_none(self, action: Callable[[], T]) -> list[T]:
        """Do something on every rank and gather what it gave; fails as ``all_or_none`` does, in the same exchange.

        Raises:
            UnbrokenError: this rank's own error, where it is the first that failed.
            RankFailed: another rank is.
        """
        result, mine = _attempt(action)
        said = self.all_gather((result, _told(mine)))
        for rank, (_, error) in enumerate(said):
            if error is not None:
                self._raise_first(rank, error, mine)
        return cast("list[T]", [value for value, _ in said])

    def from_first(self, decide: Callable[[], T]) -> T:
        """Let rank 0 decide and tell the others; its error reaches everybody.

        Raises:
            UnbrokenError: rank 0's error, on rank 0.
            RankFailed: the same, on the others.
        """
        result, mine = _attempt(decide) if self.is_first else (None, None)
        value, error = self.broadcast((result, _told(mine)))
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


def _told(error: Exception | None) -> UnbrokenError | None:
    """An error as the other ranks hear of it; somebody's own exception may not travel."""
    if error is None or isinstance(error, UnbrokenError):
        return error
    return Bug(cause=f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Vote:
    """A question to all ranks that is being answered."""

    ballot: torch.Tensor
    work: "dist.Work | None"
    rank: int = 0

    def is_answered(self) -> bool:
        """Whether reading it would not wait."""
        return self.work is None or bool(self.work.is_completed())

    def read(self) -> list[bool]:
        """For each question, whether any rank said yes; waits only for what has not arrived yet.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.work is not None:
            with noticing_loss(self.rank):
                self.work.wait()
        return [bool(flag) for flag in self.ballot.tolist()]


@contextlib.contextmanager
def noticing_loss(rank: int) -> Iterator[None]:
    """Name what gloo only says in the words of sockets: somebody who should answer does not."""
    try:
        yield
    except RuntimeError as broken:
        said = str(broken).strip().splitlines() or [type(broken).__name__]
        raise PeerLost(rank=rank, said=said[0]) from broken


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


def _packed(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> object:
    # From a process of the same job, as torch's own exchange of objects.
    return pickle.loads(packed.numpy().tobytes())  # noqa: S301
