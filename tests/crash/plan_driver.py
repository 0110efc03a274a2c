"""A builder of plans as a process of its own: ``python -m tests.crash.plan_driver CACHE [NTH]``.

With ``NTH`` it is killed, by the real signal, before its NTH operation that changes the disk. It says what the plan is.
"""

import os
import signal
import sys
from pathlib import Path

from tests.unit.data.counted import CountedShard, index_of, web_like
from unbroken.data.packing import groups
from unbroken.data.packing.bucket_plan import BucketPlan, open_plan
from unbroken.disk import LocalDisk
from unbroken.files import Files
from unbroken.testing import Fault, FaultyDisk, Operation

GROUP_ENTRIES = 90
SHARDS = [CountedShard("a", web_like(100, seed=1, median=60))]


class Deadly:
    """A plan of faults that kills the process for good."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __call__(self, operation: Operation) -> Fault | None:
        if operation.is_mutating:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return None


def build(cache: Path, files: Files, token: str | None = None) -> BucketPlan:
    """The plan of a few documents."""
    return open_plan(
        SHARDS, max_length=64, overlap=8, packing=True, cache=cache, files=files, index_of=index_of(SHARDS), token=token
    )


def main(cache: str, nth: str = "0") -> None:
    """Build a few groups, or be killed on the way."""
    setattr(groups, "GROUP_ENTRIES", GROUP_ENTRIES)  # noqa: B010 - a constant to everybody else
    plan = build(Path(cache), Files(FaultyDisk(LocalDisk(), Deadly(int(nth)))))
    print(plan.groups, plan.total_sequences, plan.fill)


if __name__ == "__main__":
    main(*sys.argv[1:])
