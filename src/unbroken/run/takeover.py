"""Taking a run whose last holder may just have died on another machine.

Agents of torchrun that lost a node start the ranks anew within seconds. If the lost node held the run, nobody here can
see that its process is gone: until its lease expires it counts as alive. A holder that lives renews its lease; so a
lease that is looked at until it either changes or expires tells the living from the dead, and nobody is robbed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from unbroken.errors import RunHeld
from unbroken.files import LOCAL, Files
from unbroken.run.lease import DEFAULT_TTL_S, Holder, Lease, acquire, read_current

ENVIRONMENT: Final = "UNBROKEN_AWAIT_LEASE"
_LOOK_S: Final = 1.0
# A lease may have been renewed in the instant before its holder died.
_PATIENCE_S: Final = DEFAULT_TTL_S + 5.0


def patience_s(environ: Mapping[str, str]) -> float:
    """How long this job looks at a lease that another one holds: not at all, unless its launcher says so."""
    return _PATIENCE_S if environ.get(ENVIRONMENT) == "1" else 0.0


def take_over(
    run: Path,
    holder: Holder,
    *,
    token: str,
    clock: Callable[[], float],
    wait: Callable[[float], None],
    patience_s: float,
    process_of: Callable[[str, int], str | None] | None = None,
    files: Files = LOCAL,
) -> Lease:
    """Take the run as soon as its holder is known to be gone, within ``patience_s``.

    Raises:
        RunHeld: its holder gave a sign of life, or the time is over.
        StorageFailed: the system refused.
    """
    seen: Lease | None = None
    end_s = clock() + patience_s
    while True:
        try:
            return acquire(run, holder, token=token, now_s=clock(), process_of=process_of, files=files)
        except RunHeld:
            current = read_current(run, files)
            is_alive = seen is not None and current is not None and current != seen and not current.is_released
            if is_alive or clock() >= end_s:
                raise
            seen = seen or current
        wait(_LOOK_S)
