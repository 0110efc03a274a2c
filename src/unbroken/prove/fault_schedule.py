"""The schedule of faults: the planned jobs of a chain as a pure function of a seed.

A chain is one run made of short jobs. Each planned job may have trouble, is ended in some way, and its newest
checkpoint may be damaged afterwards; the last job is undisturbed and completes the run. The same seed, faults and chain
number give the same jobs on every machine, so that a failed chain can be repeated.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

ENDINGS: Final[Mapping[str, str]] = {
    "kill": "SIGKILL to every process of the job, at a random moment",
    "rank": "SIGKILL to one process that trains, at a random moment",
    "save": "SIGKILL at a phase of a save",
    "term": "SIGTERM, as schedulers send it",
    "stop": "`unbroken stop`",
}
DAMAGE: Final[Mapping[str, str]] = {
    "flip": "one bit of the newest checkpoint flipped",
    "truncate": "a file of the newest checkpoint cut short",
    "torn": "the newest checkpoint as a crash before its commit leaves it",
}
TROUBLE: Final[Mapping[str, str]] = {
    "full": "a full disk, on a small file system of its own; needs root",
    "error": "a write of a save refused, with EIO or ENOSPC",
    "slow": "slow storage",
}
RESIZE: Final = "resize"
FAULTS: Final[Mapping[str, str]] = {
    **ENDINGS,
    RESIZE: "the next job on another number of ranks",
    **DAMAGE,
    **TROUBLE,
}
# Where a save can be killed, and where a write of it can be refused.
KILLED_AT: Final = ("begin", "parts", "manifest", "rename", "committed", "latest", "sweep")
REFUSED_AT: Final = ("parts", "manifest", "rename", "latest")
PLANNED_JOBS: Final = 4

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedJob:
    """One job of a chain that is interrupted.

    Attributes:
        ranks: the number of ranks; None: as in the command.
        ending: one of ``ENDINGS``.
        at: where in the run it ends, as a fraction of all steps.
        pause: how long after that, as a fraction of a step's time.
        phase: the phase of a save at which it is killed, for the ending ``save``.
        rank: decides the rank that is killed or gets the I/O error.
        trouble: one of ``TROUBLE``.
        refused_at: the phase of a save with the I/O error, for the trouble ``error``.
        refusal: the error, ``eio`` or ``enospc``.
        damage: one of ``DAMAGE``, done after the job.
        where: the file of the checkpoint and the bit in it, as fractions.
    """

    ranks: int | None
    ending: str
    at: float
    pause: float
    phase: str
    rank: int
    trouble: str | None
    refused_at: str
    refusal: str
    damage: str | None
    where: tuple[float, float]

    @property
    def faults(self) -> tuple[str, ...]:
        """The names of all faults of this job."""
        return tuple(name for name in (self.trouble, self.ending, self.damage) if name is not None)


def plan_chain(seed: int, chain: int, faults: Sequence[str], ranks: Sequence[int]) -> tuple[PlannedJob, ...]:
    """The planned jobs of one chain.

    Over several chains all faults are equally frequent: each kind cycles in a shuffled order. The first job has the
    number of ranks of the uninterrupted run, since a config may derive its global batch size from it.

    Args:
        seed: the seed of the proof.
        chain: the number of the chain, from 1.
        faults: names from ``FAULTS``; without an ending among them, jobs are killed.
        ranks: the possible numbers of ranks, that of the uninterrupted run first; empty if they cannot be set.
    """
    draw = _generator(seed, f"chain {chain}")
    first = (chain - 1) * PLANNED_JOBS
    endings = [name for name in ENDINGS if name in faults] or ["kill"]
    damage = [name for name in DAMAGE if name in faults]
    trouble = [name for name in TROUBLE if name in faults]
    return tuple(
        PlannedJob(
            ranks=_ranks(seed, first + planned, planned, ranks, is_resized=RESIZE in faults),
            ending=_turn(seed, "ending", endings, first + planned),
            # Evenly spread, each within its own interval: a job resumes before the interval it ends in.
            at=(planned + draw.random()) / (PLANNED_JOBS + 1),
            pause=draw.random(),
            phase=_turn(seed, "phase", KILLED_AT, first + planned),
            rank=draw.randrange(1 << 16),
            trouble=_turn(seed, "trouble", [*trouble, None], first + planned) if trouble else None,
            refused_at=_turn(seed, "refused", REFUSED_AT, first + planned),
            refusal=draw.choice(("eio", "enospc")),
            # The first job has too few checkpoints to lose one.
            damage=_turn(seed, "damage", [*damage, None], first - chain + planned) if damage and planned else None,
            where=(draw.random(), draw.random()),
        )
        for planned in range(PLANNED_JOBS)
    )


def _ranks(seed: int, position: int, planned: int, ranks: Sequence[int], *, is_resized: bool) -> int | None:
    if not ranks:
        return None
    return _turn(seed, "ranks", ranks, position) if planned and is_resized else ranks[0]


def _turn(seed: int, purpose: str, choices: Sequence[T], position: int) -> T:
    """The choice at a position of an endless sequence that contains each choice once per round."""
    rounds, place = divmod(position, len(choices))
    order = list(choices)
    _generator(seed, f"{purpose} {rounds}").shuffle(order)
    return order[place]


def _generator(seed: int, purpose: str) -> random.Random:
    # Not `hash`: it differs from process to process.
    return random.Random(hashlib.sha256(f"{seed}/{purpose}".encode()).digest())  # noqa: S311 -- a schedule, no secret
