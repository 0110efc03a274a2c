"""Errors of saving and resuming live objects."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import (
    DataError,
    ExactnessError,
    Help,
    PeerError,
    TrainingError,
    UnbrokenError,
    UsageError,
    quoted,
)
from unbroken.quoting.amounts import plural


@dataclass(eq=False, kw_only=True)
class RankFailed(PeerError):
    """Another rank failed; this one stops with it."""

    kind = "rank-failed"
    rank: int
    cause: UnbrokenError

    def headline(self) -> str:
        return f"rank {self.rank} failed: {self.cause.headline()}"

    def at(self) -> str | None:
        return self.cause.at()

    def so(self) -> str | None:
        return self.cause.so() or "all ranks stop together"

    def details(self) -> Iterator[str]:
        yield from self.cause.details()

    def help(self) -> tuple[Help, ...]:
        return self.cause.help()


@dataclass(eq=False, kw_only=True)
class RankRaised(PeerError):
    """Another rank failed first, and this one lost its connection to it.

    ``cause`` is the first failure in words; status, exit code and verdict are those of the rank that it happened on.
    """

    kind = "rank-raised"
    exit_code: int = 1  # type: ignore[misc]  # that of the first failure
    rank: int
    cause: str
    status: str
    verdict: str
    noticed_by: int
    said: str

    def headline(self) -> str:
        return f"rank {self.rank} failed first: {self.cause}"

    def at(self) -> str | None:
        return f"noticed by rank {self.noticed_by}: {self.said[:120]}"

    def so(self) -> str | None:
        return "this rank lost its connection because of it; the last commit is intact"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain rank-raised", "where to find the traceback"),)


@dataclass(eq=False, kw_only=True)
class PeerLost(PeerError):
    """Another rank is gone or does not answer; ``rank`` is the one that noticed, ``lost`` the one that is gone."""

    kind = "peer-lost"
    rank: int
    said: str
    lost: int | None = None

    def headline(self) -> str:
        if self.lost is not None:
            return f"rank {self.lost} is gone: it was killed or crashed without an error message"
        return "another rank is gone, or does not answer any more"

    def at(self) -> str | None:
        return f"noticed by rank {self.rank}: {self.said[:120]}"

    def so(self) -> str | None:
        return "the job ends; the last commit is intact, and the same command resumes from it"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain peer-lost", "how to find the rank that went first"),)


@dataclass(eq=False, kw_only=True)
class ItemsDiffer(UsageError):
    """The ranks did not hand over the same things; ``names`` are those of each rank."""

    kind = "items-differ"
    names: tuple[tuple[str, ...], ...]

    def headline(self) -> str:
        return "the ranks did not hand the same things to the run"

    def so(self) -> str | None:
        return "what only some ranks save, no resume could give back; the run is not started"

    def details(self) -> Iterator[str]:
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, names in enumerate(self.names):
            ranks.setdefault(names, []).append(rank)
        for names, having in list(ranks.items())[:4]:
            whose = f"rank {having[0]}" + (f" and {len(having) - 1} more" if len(having) > 1 else "")
            yield f"{whose}: {', '.join(names) or 'nothing'}"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain items-differ", "what belongs on every rank"),)


@dataclass(eq=False, kw_only=True)
class StateDiffers(ExactnessError):
    """The objects handed over do not fit the checkpoint; nothing was loaded."""

    kind = "state-differs"
    checkpoint: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def headline(self) -> str:
        return f"the objects handed over do not fit {self.checkpoint}"

    def so(self) -> str | None:
        return "nothing was loaded; the objects are as they were"

    def details(self) -> Iterator[str]:
        for label, names in (
            ("in the checkpoint only", self.unexpected),
            ("not in the checkpoint", self.missing),
            ("differs", self.changed),
        ):
            for name in names[:8]:
                yield f"{label}: {name}"
            if len(names) > 8:
                yield f"{label}: {len(names) - 8} more"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken show {self.checkpoint} --tensors", "what the checkpoint holds"),)


@dataclass(eq=False, kw_only=True)
class NotExact(ExactnessError):
    """A resume that would not give the same bits; a person may accept each difference by name."""

    kind = "not-exact"
    differences: tuple[tuple[str, str], ...]

    def headline(self) -> str:
        return "a resume would not give the same bits as one long job"

    def so(self) -> str | None:
        names = ", ".join(name for name, _ in self.differences)
        return f"it goes on only if each difference is accepted by name: {names}"

    def details(self) -> Iterator[str]:
        for name, what in self.differences:
            yield f"{name}: {what}"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain not-exact", "what each name means and how to accept it"),)


@dataclass(eq=False, kw_only=True)
class NeedsPickle(UsageError):
    """A value that only pickle could carry, and nobody allowed it."""

    kind = "needs-pickle"
    item: str
    path: str
    type_name: str

    def headline(self) -> str:
        return f"'{self.path}' is a {self.type_name}, which only pickle could store"

    def at(self) -> str | None:
        return f"the state of '{self.item}'"

    def so(self) -> str | None:
        if self.item == "counters":
            return "run.counters holds plain values: store a number with .item(), or hand the object over by keyword"
        return f"pickle is code; allow it by name with Settings(allow_pickle=('{self.item}',)) if you trust the files"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain needs-pickle", "what can be stored without it"),)


@dataclass(eq=False, kw_only=True)
class NotRestored(ExactnessError):
    """The live state after a load is not the state that was saved."""

    kind = "not-restored"
    checkpoint: str
    names: tuple[str, ...]

    def headline(self) -> str:
        return f"after loading {self.checkpoint}, {len(self.names)} of its tensors are not what was saved"

    def so(self) -> str | None:
        return "the objects handed over are no longer as they were; do not train on with them"

    def details(self) -> Iterator[str]:
        yield from self.names[:8]
        if len(self.names) > 8:
            yield f"and {len(self.names) - 8} more"


@dataclass(eq=False, kw_only=True)
class WrittenDuringSave(ExactnessError):
    """Tensors were written between the fingerprint at the step's edge and the end of their copy."""

    kind = "written-during-save"
    step: int
    names: tuple[str, ...]

    def headline(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.names[0]}{more} changed outside optimizer.step() while step {self.step:,} was being copied"

    def so(self) -> str | None:
        return (
            "a clamp_, an EMA or Lookahead copy_, a CUDA graph replay or another thread wrote to it; this save was "
            "given up, later saves of this job copy everything before training continues"
        )

    def details(self) -> Iterator[str]:
        yield from self.names[:8]
        if len(self.names) > 8:
            yield f"and {len(self.names) - 8} more"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what wrote to them, and how to avoid it"),)


@dataclass(eq=False, kw_only=True)
class NoProcessGroup(UsageError):
    """The launcher started several ranks and torch.distributed was not initialised."""

    kind = "no-process-group"
    world_size: int

    def headline(self) -> str:
        return f"WORLD_SIZE is {self.world_size} and torch.distributed is not initialised"

    def so(self) -> str | None:
        return "each rank would take the run for itself; call torch.distributed.init_process_group() before Run"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain no-process-group", "where the call belongs"),)


@dataclass(eq=False, kw_only=True)
class NotInGroup(UsageError):
    """A run was opened by a rank that is not in its process group."""

    kind = "not-in-group"
    rank: int

    def headline(self) -> str:
        return f"rank {self.rank} is not in the process group of this run"

    def so(self) -> str | None:
        return "only the ranks of `process_group` open the run; nothing was started"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain not-in-group", "how to train on a subset of the ranks"),)


@dataclass(eq=False, kw_only=True)
class NotAnItem(UsageError):
    """Something was handed to a run that it cannot save."""

    kind = "not-an-item"
    name: str
    type_name: str
    lacks: str

    def headline(self) -> str:
        return f"'{self.name}' cannot be saved: a {self.type_name} lacks {self.lacks}"

    def so(self) -> str | None:
        return "a resume would start it anew without a word, so the run is not started"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain not-an-item", "what can be handed to a run"),)


@dataclass(eq=False, kw_only=True)
class NonFiniteLoss(TrainingError):
    """The loss is no number any more."""

    kind = "non-finite-loss"
    step: int
    metric: str
    value: str
    resumable_step: int | None

    def headline(self) -> str:
        return f"{self.metric} is {self.value} at step {self.step:,}"

    def so(self) -> str | None:
        kept = "there is no checkpoint yet" if self.resumable_step is None else f"step {self.resumable_step:,} is kept"
        return f"this state is not saved; {kept}"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain non-finite-loss", "what to look at, and how to go on"),)


@dataclass(eq=False, kw_only=True)
class CheckpointsExist(UsageError):
    """A start from scratch where there are checkpoints."""

    kind = "checkpoints-exist"
    store: Path
    count: int
    newest: str

    def headline(self) -> str:
        are = "is" if self.count == 1 else "are"
        return f"a start from scratch was asked for, and there {are} {plural(self.count, 'checkpoint')}"

    def at(self) -> str | None:
        return f"{self.store}  (newest {self.newest})"

    def so(self) -> str | None:
        return (
            "nothing was touched; without that setting the run goes on from the newest; "
            "--force, or force=True in a script's Settings, sets them aside"
        )

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken ls {quoted(self.store)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class UnsavedState(UsageError):
    """Live state was found that was not handed over, and the run was told to refuse it."""

    kind = "unsaved-state"
    found: tuple[str, ...]

    def headline(self) -> str:
        return f"{len(self.found)} live objects with state were not handed to the run"

    def so(self) -> str | None:
        return "a resume would start them anew without a word"

    def details(self) -> Iterator[str]:
        yield from self.found

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain unsaved-state", "how to hand them over, or why not to"),)


@dataclass(eq=False, kw_only=True)
class NotShared(UsageError):
    """A rank does not see the directory that the others see."""

    kind = "not-shared"
    path: Path
    rank: int
    host: str

    def headline(self) -> str:
        return f"rank {self.rank} on {self.host} does not see the run directory of rank 0"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "its parts would be missing from every checkpoint; the directory must be on storage that all nodes share"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"df -h {quoted(self.path)}", "on each node: is it the same file system?"),)


@dataclass(eq=False, kw_only=True)
class Halted(DataError):
    """A run was halted at a step's edge, saved, for a person to decide."""

    kind = "halted"
    reason: str
    step: int
    run: Path

    def headline(self) -> str:
        return f"the run is halted at step {self.step:,}: {self.reason}"

    def at(self) -> str | None:
        return str(self.run)

    def so(self) -> str | None:
        return "its state is saved; a person decides how to go on, and nothing starts it again by itself"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken status {quoted(self.run)}", "see where it stands"),)


@dataclass(eq=False, kw_only=True)
class DataEnded(DataError):
    """A loader has fewer batches than it must have; ``found`` is how many came of those that were served before."""

    kind = "data-ended"
    epoch: int
    served: int
    found: int = 0

    def headline(self) -> str:
        if not self.served:
            return f"the loader gave no batch at all in epoch {self.epoch:,}"
        return f"the loader ended after {self.found:,} of the {self.served:,} batches it had served in this epoch"

    def so(self) -> str | None:
        if not self.served:
            return "there is nothing to train on; a one-way iterator has only one epoch"
        return "the data is not what the run was trained on; the objects handed over are no longer as they were"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain data-ended", "what a loader must be able to do"),)
