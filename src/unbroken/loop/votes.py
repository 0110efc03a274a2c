"""How the ranks agree at the edges of steps without waiting for each other there. Owns the vote that is under way."""

from typing import NamedTuple

from unbroken.errors import PeerLost
from unbroken.loop.open_run import OpenRun
from unbroken.world import Vote


class Flags(NamedTuple):
    """What one rank asks for at an edge, and what any rank asked for once the vote is read.

    ``is_overdue`` says that a stop has waited long enough for an optimizer step; ``has_left`` and ``is_here`` tell
    whether ranks have left the loop or are still in it.
    """

    is_stop_asked: bool = False
    is_save_due: bool = False
    is_bad: bool = False
    is_lost: bool = False
    is_hurried: bool = False
    is_overdue: bool = False
    has_left: bool = False
    is_here: bool = True


# What a rank does by itself when the others do not answer.
_ALONE = Flags(is_stop_asked=True, is_hurried=True)


class Votes:
    """What any rank asks for, known to all at the same step."""

    def __init__(self) -> None:
        self._vote: Vote | None = None

    def agree(self, opened: OpenRun, flags: Flags) -> Flags:
        """What the ranks have agreed on by this edge.

        Alone, the answer is there at once. Among several, a vote goes out at every edge and is read at the next one, so
        that nobody waits for it. If they do not answer and a grace window is nearly over, a rank hangs: then what this
        one holds is saved without it.

        Raises:
            PeerLost: another rank is gone.
        """
        if opened.world.size == 1:
            return flags
        before, self._vote = self._vote, opened.world.start_vote(flags)
        if before is None:
            return Flags()
        told = opened.emergency.read(before)
        return _ALONE if told is None else Flags(*told)

    def leave(self, opened: OpenRun) -> bool:
        """Tell the others that this rank has left the loop; whether all of them have, too. Collective.

        Raises:
            PeerLost: another rank is gone.
        """
        if opened.world.size == 1:
            return True
        self.drain()
        told = Flags(*opened.world.start_vote(Flags(has_left=True, is_here=False)).read())
        return not told.is_here

    def has_anybody_left(self) -> bool:
        """Whether the vote under way is answered and says that a rank has left the loop; never waits."""
        if self._vote is None or not self._vote.is_answered():
            return False
        try:
            return Flags(*self._vote.read()).has_left
        except PeerLost:
            return False

    def drain(self) -> None:
        """Read the answer to the last vote, so that none is left when the loop goes on or ends.

        Raises:
            PeerLost: another rank is gone.
        """
        if self._vote is not None:
            self._vote.read()
            self._vote = None

    def forget(self) -> None:
        """Wait for no answer any more."""
        self._vote = None
