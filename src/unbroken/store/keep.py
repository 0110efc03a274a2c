"""Which checkpoints to keep, as pure functions: no disk, no clock.

A policy maps candidates to reasons for keeping some of them; a keep decision is the union of its policies. Whatever no
policy keeps is released, and only then may the sweep remove it. Three rules override every policy: the newest usable
checkpoint is always kept; only usable ones count, so that a damaged newcomer can never push out the last good one; and
without any policy nothing is released.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

NOT_YET_MIRRORED: Final = "not yet mirrored"


@dataclass(frozen=True)
class Candidate:
    """What a policy may know of one checkpoint."""

    name: str
    step: int
    saved_at_ns: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_usable: bool = True
    is_pinned: bool = False
    is_mirrored: bool | None = None


class Policy(Protocol):
    """One reason to keep."""

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""


def _one_per_step(newest_first: Sequence[Candidate]) -> list[Candidate]:
    """Of each step the last one committed; a step saved twice is one place in the history, not two."""
    current: dict[int, Candidate] = {}
    for candidate in newest_first:
        current.setdefault(candidate.step, candidate)
    return list(current.values())


@dataclass(frozen=True)
class LastK:
    """The checkpoints of the newest k steps, of each step the last one committed; None keeps all."""

    k: int | None

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        if self.k is None:
            return {c.name: "all are kept" for c in newest_first}
        return {c.name: f"last {self.k}" for c in _one_per_step(newest_first)[: self.k]}


@dataclass(frozen=True)
class EveryNSteps:
    """Milestones: every checkpoint whose step is a multiple of n; step 0 is none."""

    n: int

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        milestones = (c for c in _one_per_step(newest_first) if c.step and c.step % self.n == 0)
        return {c.name: f"every {self.n:,} steps" for c in milestones}


@dataclass(frozen=True)
class EveryT:
    """One checkpoint for each stretch of time: the first that was saved in it."""

    seconds: float

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        first_in: dict[int, Candidate] = {}
        for candidate in newest_first:
            # Stretches are counted from the epoch, so that removing one checkpoint never moves the others' borders.
            first_in[int(candidate.saved_at_ns // (self.seconds * 1e9))] = candidate
        return {c.name: f"every {self.seconds:,g} s" for c in first_in.values()}


@dataclass(frozen=True)
class BestBy:
    """The k best by a metric; one that was not measured, or is NaN, is never best."""

    metric: str
    mode: str = "min"
    k: int = 1

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        sign = 1 if self.mode == "min" else -1
        measured = [c for c in newest_first if math.isfinite(c.metrics.get(self.metric, math.nan))]
        # Of equals the newest is best; sorting is stable and the candidates come newest first.
        best = sorted(measured, key=lambda c: sign * c.metrics[self.metric])[: self.k]
        return {c.name: f"best {self.metric}" for c in best}


@dataclass(frozen=True)
class Pinned:
    """What the user pinned."""

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        return {c.name: "pinned" for c in newest_first if c.is_pinned}


@dataclass(frozen=True)
class NotYetMirrored:
    """What has no second copy where one is wanted; ``is_mirrored`` is None where there is no mirror."""

    def keeps(self, newest_first: Sequence[Candidate]) -> Mapping[str, str]:
        """The names it keeps, each with the reason."""
        return {c.name: NOT_YET_MIRRORED for c in newest_first if c.is_mirrored is False}


def best_by(text: str) -> BestBy:
    """``loss``, ``loss:min`` or ``accuracy:max`` as a policy.

    Raises:
        ValueError: it is none of these.
    """
    metric, _, mode = text.partition(":")
    if not metric or not metric.isprintable() or mode not in ("", "min", "max"):
        raise ValueError(f"'{text}' is not METRIC, METRIC:min or METRIC:max")
    return BestBy(metric, mode or "min")


def compose(
    last_k: int | None, every_n: int | None = None, every_s: float | None = None, best: str | None = None
) -> tuple[Policy, ...]:
    """The policies that a config, a command line or settings name.

    Raises:
        ValueError: ``best`` is not METRIC, METRIC:min or METRIC:max.
    """
    found: list[Policy] = [LastK(last_k)]
    if every_n is not None:
        found.append(EveryNSteps(every_n))
    if every_s is not None:
        found.append(EveryT(every_s))
    if best is not None:
        found.append(best_by(best))
    return tuple(found)


@dataclass(frozen=True)
class Decision:
    """What is kept, each with all its reasons, and what is released, oldest first; ``newest`` is the newest usable."""

    kept: Mapping[str, tuple[str, ...]]
    released: tuple[str, ...]
    newest: str | None = None

    @property
    def held(self) -> tuple[str, ...]:
        """What is kept for no other reason than that a mirror lacks it, oldest first."""
        return tuple(name for name, reasons in reversed(list(self.kept.items())) if reasons == (NOT_YET_MIRRORED,))


def keeps_everything(policies: Collection[Policy]) -> bool:
    """Whether no checkpoint can be released, so that ten thousand manifests need not be read."""
    return not policies or LastK(None) in policies


def decide(
    candidates: Collection[Candidate], policies: Sequence[Policy], *, resume_target: str | None = None
) -> Decision:
    """Split candidates into kept and released.

    Pins and missing mirror copies are kept with any policy. A checkpoint that is not usable is
    neither counted nor released: it is for the quarantine, not for the sweep.
    """
    newest_first = sorted(candidates, key=lambda c: (c.step, c.saved_at_ns, c.name), reverse=True)
    usable = [c for c in newest_first if c.is_usable]
    reasons: dict[str, list[str]] = {}
    if usable:
        reasons.setdefault(usable[0].name, []).append("newest usable")
    if resume_target is not None:
        reasons.setdefault(resume_target, []).append("this job resumed from it")
    for policy in (*(policies or (LastK(None),)), Pinned(), NotYetMirrored()):
        for name, reason in policy.keeps(usable).items():
            reasons.setdefault(name, []).append(reason)
    for candidate in newest_first:
        if not candidate.is_usable:
            reasons.setdefault(candidate.name, []).append("not usable: for the quarantine")
    kept = {c.name: tuple(dict.fromkeys(reasons[c.name])) for c in newest_first if c.name in reasons}
    released = tuple(c.name for c in reversed(newest_first) if c.name not in kept)
    return Decision(kept, released, usable[0].name if usable else None)
