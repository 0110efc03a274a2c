"""Which rank failed first, as opposed to what the others then see of it: a closed connection.

A rank that leaves with an error of its own posts it in the store of torch.distributed, where the first post stays. A
rank whose connection broke, in our exchanges or in the script's own collectives, reads it before it ends: it ends with
the first failure where there is one, else with ``PeerLost``. A rank that was killed posts nothing: the ranks of its own
machine and its launcher see that it is gone, and post it for the others. Nothing here waits for another rank to take
part, and nothing is written to disk.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from unbroken.errors import PeerLost, RankFailed, RankRaised, UnbrokenError
from unbroken.launch.agent import KILLED
from unbroken.records.lease import Holder
from unbroken.records.outcome import Outcome, conclude
from unbroken.records.process import process_of
from unbroken.world import World

# A rank that fails posts that before its connections close; networks may be slow to show it.
PATIENCE_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.05
_FIRST: Final = "first-failure"
_GONE: Final = "gone"
# What gloo and NCCL say of a peer that is gone or does not answer; both also fail for reasons of their own.
_LOST: Final = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection timed out",
    "connectfullmesh failed",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "timed out",
    "timeout",
    "failed to pass monitoredbarrier",
    "ncclremoteerror",
    "remote process exited",
    "network error",
    "communicator was aborted",
)


def lost_connection(error: BaseException) -> str | None:
    """What torch said of a lost peer, where an error or what it was raised from is about one; else None."""
    for each in _chain(error):
        said = each.message if isinstance(each, UnbrokenError) else str(each).strip()
        first = next(iter(said.splitlines()), type(each).__name__)
        cause = each.cause if isinstance(each, RankFailed) else each
        if isinstance(cause, PeerLost):
            return cause.symptom
        if isinstance(each, dist.DistNetworkError | dist.DistStoreError):
            return first
        is_torchs = isinstance(each, dist.DistBackendError) or (isinstance(each, RuntimeError) and "gloo" in said)
        if is_torchs and any(words in said.lower() for words in _LOST):
            return first
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__


@dataclass
class Peers:
    """The other ranks of a job, as far as one of them needs to know how they ended; ``holders`` are by rank."""

    world: World
    holders: Sequence[Holder] = ()
    patience_s: float = PATIENCE_S
    is_first_to_fail: bool = False

    def settle(self, error: BaseException) -> BaseException:
        """What really ended this rank: its own error, posted for the others, or the failure that it follows from."""
        link = self.world.link
        if link is None:
            return error
        said = lost_connection(error)
        if said is None:
            self.report(conclude(error))
            # The other ranks may wait for this one inside the script's own collectives, and notice only when it ends.
            self.is_first_to_fail = not isinstance(error, UnbrokenError)
            return error
        first = self._first_failure(said)
        link.post(_left(self.world.rank), "1")
        first.__cause__ = error
        return first

    def report(self, outcome: Outcome) -> None:
        """Post how this rank ended, unless another one ended first."""
        if self.world.link is not None:
            self.world.link.post(_FIRST, _encoded(self.world.rank, outcome))

    def _first_failure(self, said: str) -> RankRaised | PeerLost:
        here = self.world.rank
        until_s = time.monotonic() + self.patience_s
        while True:
            # In this order: a rank posts before it ends.
            gone = self._gone()
            first = self._posted_failure(said)
            if first is not None:
                return first
            gone = self._agreed(gone)
            if gone is not None or time.monotonic() >= until_s:
                return PeerLost(rank=here, symptom=said, lost=gone)
            time.sleep(_LOOK_EVERY_S)

    def _posted_failure(self, said: str) -> RankRaised | None:
        assert self.world.link is not None
        found = _decoded(self.world.link.posted(_FIRST))
        if found is None or found[0] == self.world.rank:
            return None
        rank, outcome = found
        return RankRaised(
            rank=rank,
            cause=outcome.reason,
            status=outcome.status,
            verdict=outcome.verdict,
            exit_code=outcome.exit_code,
            noticed_by=self.world.rank,
            symptom=said,
        )

    def _gone(self) -> int | None:
        """A rank of this machine whose process ended without a post; one that posted only followed another."""
        assert self.world.link is not None
        for rank, holder in enumerate(self.holders):
            is_gone = process_of(holder) not in (None, holder.process_started)
            if rank != self.world.rank and is_gone and self.world.link.posted(_left(rank)) is None:
                return rank
        return None

    def _agreed(self, seen: int | None) -> int | None:
        """The rank that is gone, as somebody on its machine has seen it: this rank, another one, or its launcher."""
        link = self.world.link
        assert link is not None
        if seen is not None:
            link.post(_GONE, str(seen))
            return seen
        if (posted := link.posted(_GONE)) is not None:
            return int(posted)
        killed = link.posted_by_launcher(KILLED)
        # A launcher counts all ranks; this run may be trained by some of them.
        if killed is None or int(killed) not in self.world.members:
            return None
        return self.world.members.index(int(killed))


def _left(rank: int) -> str:
    return f"left-{rank}"


def _encoded(rank: int, outcome: Outcome) -> str:
    return json.dumps([rank, outcome.status, outcome.exit_code, outcome.verdict, outcome.reason])


def _decoded(text: str | None) -> tuple[int, Outcome] | None:
    if text is None:
        return None
    found: Any = json.loads(text)
    rank, status, code, verdict, reason = found
    return rank, Outcome(status, code, verdict, reason)
