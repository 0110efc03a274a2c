"""Where a save goes: into the store of the run directory, or straight to an object store (``mirror/direct.py``).

A save is begun on rank 0, written by every rank, and committed and settled on rank 0. ``Begun`` is all that the ranks
tell each other about the place.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from unbroken.errors import Bug
from unbroken.store.capacity import require_room
from unbroken.store.commit import Draft, PartWriter, Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.keep import Policy
from unbroken.store.manifest import Part
from unbroken.store.names import Begun, DraftName, parse_draft
from unbroken.store.sweep import settle


class Destination(Protocol):
    """A place for the saves of one job, on one rank."""

    def begin(self, step: int, kind: str, *, coming_bytes: int, coming_files: int) -> Begun:
        """Start a checkpoint if this job still holds the run and there is room for it; rank 0 only."""

    def draft(self, begun: Begun, *, coming_bytes: int) -> PartWriter:
        """Where this rank writes its parts; no part is larger than ``coming_bytes``."""

    def commit(self, begun: Begun, *, plan: Collection[str], parts: Collection[Part], record: Record) -> str:
        """Commit it if the evidence is complete and this job still holds the run; rank 0 only. Returns its name."""

    def settle(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What follows a commit, on rank 0: keep and sweep. Returns what was removed, and what a mirror still needs."""


@dataclass(frozen=True)
class LocalDestination:
    """The store of the run directory, which all ranks see."""

    store: Store
    job: str
    policies: tuple[Policy, ...] = ()
    resume_target: str | None = None
    fence: Callable[[], None] | None = None
    is_live: Callable[[DraftName], bool] = lambda draft: True
    away: Callable[[], Collection[str]] = tuple

    def begin(self, step: int, kind: str, *, coming_bytes: int, coming_files: int) -> Begun:
        """Start a draft, if there is room.

        Raises:
            NoRoom: there is none.
            UnbrokenError: this job no longer holds the run, or the storage refused.
        """
        del kind
        if self.fence is not None:
            # Checked again before the commit; here so that a run that was moved or deleted is not recreated.
            self.fence()
        require_room(
            self.store,
            coming_bytes=coming_bytes,
            coming_files=coming_files,
            policies=self.policies,
            is_live=self.is_live,
        )
        return Begun(step, str(begin(self.store, step=step, job=self.job).name))

    def draft(self, begun: Begun, *, coming_bytes: int = 0) -> Draft:
        """The draft of that name."""
        del coming_bytes
        name = parse_draft(begun.place)
        if name is None:
            raise Bug(cause=f"{begun.place} is no draft")
        return Draft(self.store, name)

    def commit(self, begun: Begun, *, plan: Collection[str], parts: Collection[Part], record: Record) -> str:
        """Commit the draft.

        Raises:
            UnbrokenError: as ``store.commit.commit`` raises it.
        """
        return commit(self.draft(begun), plan=plan, parts=parts, record=record, fence=self.fence)

    def settle(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Point ``latest`` at it, then keep and sweep.

        Raises:
            StorageFailed: I/O error; the checkpoint is committed all the same.
        """
        decision, swept = settle(
            self.store,
            name,
            self.policies,
            job=self.job,
            is_live=self.is_live,
            resume_target=self.resume_target,
            away=self.away(),
        )
        return swept.names, decision.held
