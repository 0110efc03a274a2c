"""Taking a run over: whether its holder is alive is found out by watching the lease.

A process on another machine, in another container or of another boot cannot be seen from here. A living holder renews
its lease four times within its time to live, so a lease that is watched for that long on this machine's own monotonic
clock and does not change has no holder any more. Clocks of two machines are never compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from unbroken.errors import RunHeld
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.records.lease import Holder, Lease, ProcessOf, Standing, acquire, read_current

LOOK_S: Final = 1.0


class LeaseWatch:
    """Looks at a run's lease again and again.

    Attributes:
        lease: the lease as it was last read; None where no job ever held the run.
        is_renewed: whether it changed while it was watched.
    """

    def __init__(
        self, run: Path, *, monotonic: Callable[[], float], process_of: ProcessOf | None = None, files: Files = LOCAL
    ) -> None:
        self._run = run
        self._monotonic = monotonic
        self._process_of = process_of
        self._files = files
        self._started_s = self._unchanged_since_s = monotonic()
        self._has_looked = False
        self.lease: Lease | None = None
        self.is_renewed = False

    @property
    def watched_s(self) -> float:
        """How long it has been watched."""
        return self._monotonic() - self._started_s

    def look(self) -> Standing:
        """What is known by now; where the process cannot be seen, known only after a change or a whole time to live.

        Raises:
            StorageFailed: an I/O error.
        """
        current = read_current(self._run, self._files)
        now_s = self._monotonic()
        if self._has_looked and current != self.lease:
            self.is_renewed, self._unchanged_since_s = True, now_s
        self._has_looked, self.lease = True, current
        if current is None:
            return Standing.GONE
        standing = current.standing(self._process_of)
        if standing is not Standing.UNKNOWN:
            return standing
        if now_s - self._unchanged_since_s >= current.ttl_s:
            return Standing.GONE
        return Standing.ALIVE if self.is_renewed else Standing.UNKNOWN

    def until_known(self, wait: Callable[[float], None], say: Callable[[str], None] | None = None) -> Standing:
        """Look until it is known; ``say`` is called once if this takes a while.

        Raises:
            StorageFailed: an I/O error.
        """
        standing = self.look()
        if standing is Standing.UNKNOWN and say is not None and self.lease is not None:
            say(
                f"watching the lease of {self.lease.describe()} for up to {amounts.duration(self.lease.ttl_s)}:"
                " its process is not visible from this machine"
            )
        while standing is Standing.UNKNOWN:
            wait(LOOK_S)
            standing = self.look()
        return standing

    def held(self) -> RunHeld:
        """The error to raise if its holder is alive."""
        holder = self.lease.describe() if self.lease else "another job"
        return RunHeld(
            path=self._run,
            holder=holder,
            proof="renewed" if self.is_renewed else "process",
            watched_s=self.watched_s,
        )


def take_over(
    run: Path,
    holder: Holder,
    *,
    token: str,
    clock: Callable[[], float],
    monotonic: Callable[[], float],
    wait: Callable[[float], None],
    process_of: ProcessOf | None = None,
    say: Callable[[str], None] | None = None,
    files: Files = LOCAL,
) -> Lease:
    """Take the run as soon as its holder is known to be gone.

    Raises:
        RunHeld: its holder is alive, or another contender was quicker.
        StorageFailed: an I/O error.
    """
    watch = LeaseWatch(run, monotonic=monotonic, process_of=process_of, files=files)
    if watch.until_known(wait, say) is Standing.ALIVE:
        raise watch.held()
    return acquire(run, holder, token=token, now_s=clock(), process_of=process_of, expired=watch.lease, files=files)
