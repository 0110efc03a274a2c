"""The ranks of a job: who I am, what the others say, and errors that reach everybody.

The only user of collectives outside ``exact/``. Everything that is exchanged is small and goes over a gloo group of its
own, made once, so that it neither waits for nor disturbs the collectives of the training loop. A ``World`` of one rank
needs no process group at all. A background thread gets a world of its own (``beside``): a group is used by one thread
only, and the default group by none of ours. A rank that dies is noticed by the next exchange: ``PeerLost``.
"""

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist

from unbroken.errors import Bug, NoProcessGroup, PeerLost, RankFailed, UnbrokenError

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True)
class World:
    """The ranks that train together; ``group`` is None in a world of one."""

    rank: int
    size: int
    group: "dist.ProcessGroup | None" = None

    @classmethod
    def current(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "World":
        """The world of this process: that of the initialised process group, else a world of one.

        Collective where there is a group: every rank calls it at the same place.

        Raises:
            NoProcessGroup: the launcher says that there are several ranks and no process group was initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Each rank would take the run for itself and write the same checkpoint.
                raise NoProcessGroup(world_size=int(os.environ["WORLD_SIZE"]))
            return cls(0, 1)
        if dist.get_world_size() == 1:
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size(), _gloo_group(timeout_s))

    def beside(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "World":
        """The same ranks over another group, for a thread of its own. Collective."""
        return self if self.group is None else World(self.rank, self.size, _gloo_group(timeout_s))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides and commits."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """What every rank says, by rank.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.group is None:
            return [value]
        said: list[T | None] = [None] * self.size
        with noticing_loss(self.rank):
            dist.all_gather_object(said, value, group=self.group)
        return cast("list[T]", said)

    def broadcast(self, value: T) -> T:
        """What rank 0 says; the others' value is ignored.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.group is None:
            return value
        box: list[T] = [value]
        with noticing_loss(self.rank):
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def add_up(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a tensor of integers on the CPU, in place; wraps around as integers do.

        Raises:
            PeerLost: a rank is gone or does not answer.
        """
        if self.group is not None:
            with noticing_loss(self.rank):
                dist.all_reduce(numbers, group=self.group)
        return numbers

    def start_vote(self, flags: Sequence[bool]) -> "Vote":
        """Begin to ask whether any rank says yes to each question; the answer is read later, at no cost meanwhile."""
        # On the CPU whatever torch.set_default_device says: gloo carries it.
        ballot = torch.tensor([int(flag) for flag in flags], dtype=torch.int32, device="cpu")
        if self.group is None:
            return Vote(ballot, None)
        with noticing_loss(self.rank):
            work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
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


def is_first_process() -> bool:
    """Whether this process is rank 0, before there is a ``World``."""
    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


def _gloo_group(timeout_s: float) -> "dist.ProcessGroup":
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
    return cast("dist.ProcessGroup", group)
