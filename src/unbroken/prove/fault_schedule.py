"""What goes wrong when: the legs of a chain of jobs as a pure function of a seed.

A chain is one run made of short jobs. Each leg of it is a job that meets trouble, is ended in some way, and may find
its newest checkpoint damaged afterwards; the last job is left alone and completes the run. The same seed, faults and
number of chain give the same legs on every machine, so that a chain that failed can be made again.
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
LEGS: Final = 4

T = TypeVar("T")


@dataclass(frozen=True)
class Leg:
    """One job of a chain that does not reach the end.

    Attributes:
        ranks: how many processes train; None for as many as the command says.
        ending: one of ``ENDINGS``.
        at: where in the run it ends, as a share of all steps.
        pause: how long after that, as a share of a step's time.
        phase: the phase of a save it is killed at, for the ending ``save``.
        rank: a number from which the rank is taken that is killed or refused.
        trouble: one of ``TROUBLE``.
        refused_at: the phase of a save at which the disk refuses, for the trouble ``error``.
        refusal: how it does: ``eio`` or ``enospc``.
        damage: one of ``DAMAGE``, done when the job is over.
        where: which file of the checkpoint, and which bit of it, as shares.
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
        """The names of all that is done in this leg."""
        return tuple(name for name in (self.trouble, self.ending, self.damage) if name is not None)


def plan_chain(seed: int, chain: int, faults: Sequence[str], ranks: Sequence[int]) -> tuple[Leg, ...]:
    """The legs of one chain.

    Over several chains every fault comes up as often as every other: each kind goes round in a shuffled order. The
    first job has the number of ranks of the uninterrupted run, since a config may take its global batch from it.

    Args:
        seed: what all chains of one proof follow from.
        chain: which of them, from 1.
        faults: names from ``FAULTS``; without an ending among them, jobs are killed.
        ranks: the numbers of ranks there may be, that of the uninterrupted run first; none if they are not ours to set.
    """
    draw = _generator(seed, f"chain {chain}")
    first = (chain - 1) * LEGS
    endings = [name for name in ENDINGS if name in faults] or ["kill"]
    damage = [name for name in DAMAGE if name in faults]
    trouble = [name for name in TROUBLE if name in faults]
    return tuple(
        Leg(
            ranks=_ranks(seed, first + leg, leg, ranks, is_resized=RESIZE in faults),
            ending=_turn(seed, "ending", endings, first + leg),
            # Evenly spread, each within its own stretch: a job resumes before the stretch it ends in.
            at=(leg + draw.random()) / (LEGS + 1),
            pause=draw.random(),
            phase=_turn(seed, "phase", KILLED_AT, first + leg),
            rank=draw.randrange(1 << 16),
            trouble=_turn(seed, "trouble", [*trouble, None], first + leg) if trouble else None,
            refused_at=_turn(seed, "refused", REFUSED_AT, first + leg),
            refusal=draw.choice(("eio", "enospc")),
            # The first job leaves too few checkpoints to lose one.
            damage=_turn(seed, "damage", [*damage, None], first - chain + leg) if damage and leg else None,
            where=(draw.random(), draw.random()),
        )
        for leg in range(LEGS)
    )


def _ranks(seed: int, position: int, leg: int, ranks: Sequence[int], *, is_resized: bool) -> int | None:
    if not ranks:
        return None
    return _turn(seed, "ranks", ranks, position) if leg and is_resized else ranks[0]


def _turn(seed: int, purpose: str, choices: Sequence[T], position: int) -> T:
    """The choice at a position of an endless sequence that holds each choice once in every round."""
    rounds, place = divmod(position, len(choices))
    order = list(choices)
    _generator(seed, f"{purpose} {rounds}").shuffle(order)
    return order[place]


def _generator(seed: int, purpose: str) -> random.Random:
    # Not `hash`: it differs from process to process.
    return random.Random(hashlib.sha256(f"{seed}/{purpose}".encode()).digest())  # noqa: S311 -- a schedule, no secret
