"""How the ranks agree at the edges of steps without waiting for each other there. Owns the vote that is under way."""

from unbroken.loop.opened import Opened
from unbroken.world import Vote

# Stop, and in a hurry: what a rank does alone when the others do not answer.
_ALONE = [True, False, False, False, True]


class Ballots:
    """What any rank asks for, known to all at the same step: stop, save, a bad loss, a lost run, no time for a save."""

    def __init__(self) -> None:
        self._vote: Vote | None = None

    def agree(self, opened: Opened, flags: list[bool]) -> list[bool]:
        """What the ranks have agreed on by this edge.

        Alone, the answer is there at once. Among several, a vote goes out at every edge and is read at the next one, so
        that nobody waits for it. If they do not answer and a grace window is nearly over, a rank hangs: then what this
        one holds is saved without it.

        Raises:
            PeerLost: another rank is gone.
        """
        vote = opened.world.start_vote(flags)
        if opened.world.size == 1:
            return vote.read()
        before, self._vote = self._vote, vote
        if before is None:
            return [False] * len(flags)
        told = opened.emergency.read(before)
        return _ALONE if told is None else told

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
