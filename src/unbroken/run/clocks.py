"""Clocks that disagree: deadlines are told in seconds since 1970, so ranks should agree on the hour."""

from collections.abc import Sequence
from typing import Final

from unbroken import amounts

# A barrier lets ranks go within a second.
TOLERATED_S: Final = 5.0


def skew_sentence(now_s: Sequence[float], hosts: Sequence[str]) -> str | None:
    """What is said of the rank whose clock is farthest from that of the first; None where all agree.

    ``now_s`` is what each rank's clock showed at the same moment, ``hosts`` where it runs.
    """
    rank = max(range(len(now_s)), key=lambda each: abs(now_s[each] - now_s[0]))
    ahead_s = now_s[rank] - now_s[0]
    if abs(ahead_s) < TOLERATED_S:
        return None
    way = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"clocks differ: that of rank {rank} on {hosts[rank]} is {amounts.duration(abs(ahead_s))} {way} that of rank 0"
        f" on {hosts[0]}; deadlines follow the clock of rank 0"
    )
