"""How the ranks agree at steps' edges without waiting for each other there. Owns the vote in flight."""

from typing import Final, NamedTuple

from unbroken.errors import PeerLost
from unbroken.loop.opened_run import OpenRun
from unbroken.world import Vote


class Flags(NamedTuple):
    """What one rank votes for at an edge; once the vote is read, what any rank voted for.

    ``is_overdue``: a stop has waited long enough for an optimizer step. ``has_left``, ``is_here``: a rank has left the
    loop, a rank is still in it.
    """

    is_stop_asked: bool = False
    is_save_due: bool = False
    is_bad: bool = False
    is_lost: bool = False
    is_hurried: bool = False
    is_overdue: bool = False
    has_left: bool = False
    is_here: bool = True


NOTHING_DUE: Final = Flags()
# What a rank does alone when the others do not answer.
_ALONE = Flags(is_stop_asked=True, is_hurried=True)


class Votes:
    """What any rank voted for, known to all at the same step."""

    def __init__(self) -> None:
        self._vote: Vote | None = None

    def agree(self, opened: OpenRun, flags: Flags) -> Flags:
        """What the ranks have agreed on by this edge.

        For several ranks: one has its answer at once. A vote is started at every edge and read at the next one, so
        that no rank waits for it. If there is no answer and little of the grace window is left, a rank hangs: then this
        rank dumps its state alone.

        Raises:
            PeerLost: another rank is gone.
        """
        before, self._vote = self._vote, opened.world.start_vote(flags)
        if before is None:
            return Flags()
        votes = opened.emergency.read(before)
        return _ALONE if votes is None else Flags(*votes)

    def leave(self, opened: OpenRun) -> bool:
        """Vote that this rank has left the loop; whether all of them have. Collective.

        Raises:
            PeerLost: another rank is gone.
        """
        if opened.world.size == 1:
            return True
        self.drain()
        votes = Flags(*opened.world.start_vote(Flags(has_left=True, is_here=False)).read())
        return not votes.is_here

    def has_anybody_left(self) -> bool:
        """Whether the vote in flight is answered and a rank has left the loop; never waits."""
        if self._vote is None or not self._vote.is_answered():
            return False
        try:
            return Flags(*self._vote.read()).has_left
        except PeerLost:
            return False

    def drain(self) -> None:
        """Read the last vote, so that none is in flight when the loop continues or ends.

        Raises:
            PeerLost: another rank is gone.
        """
        if self._vote is not None:
            self._vote.read()
            self._vote = None

    def forget(self) -> None:
        """Drop the vote in flight without reading it."""
        self._vote = None
