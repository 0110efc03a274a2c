"""Errors of a run: who holds it, what it saves and resumes, and the ranks that train it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from unbroken.errors.checkpoint import nearest_folder
from unbroken.errors.tree import (
    BusyError,
    CheckpointError,
    DataError,
    Each,
    ExactnessError,
    Help,
    PeerError,
    TrainingError,
    UnbrokenError,
    UsageError,
    each_line,
    quoted,
)
from unbroken.quoting import amounts

# ---- the run directory and the job that holds it ----


class BadRunPath(UsageError):
    """A path that cannot be a run directory; ``obstacle`` is the part of it that is wrong, ``target`` of a symlink."""

    kind = "bad-run-path"
    path: str
    problem: Literal["empty", "nul", "address", "long-name", "too-long", "dangling", "circular", "forbidden"]
    obstacle: str = ""
    target: str = ""

    def headline(self) -> str:
        below = "" if self.obstacle == self.path else f" {self.obstacle}"
        size_bytes = len(os.fsencode(self.obstacle))
        return {
            "empty": "the run path is empty",
            "nul": "the run path contains a NUL character",
            "address": "the run path is an address, and a run directory is on a disk",
            "long-name": f"the run path is too long: a name in it has {size_bytes:,} bytes",
            "too-long": f"the run path is too long: it has {size_bytes:,} bytes",
            "dangling": f"the run path {'goes through the' if below else 'is a'} dangling symlink{below}: "
            f"its target {self.target} does not exist",
            "circular": "the run path contains a symlink loop",
            "forbidden": f"the run path cannot be read: permission denied in {self.obstacle}",
        }[self.problem]

    def at(self) -> str | None:
        shown = self.path.replace("\0", "\\0")
        return (shown if len(shown) <= 200 else f"{shown[:200]}…") or None

    def so(self) -> str | None:
        if self.problem == "empty":
            return "it would be the working directory; give the run a directory of its own, such as runs/a"
        if self.problem == "address":
            rest = self.path.removeprefix(f"{self.obstacle}/")
            if not rest.startswith("/"):
                return (
                    f"it would be a local directory called {self.obstacle}; the address of an object store has two "
                    f"slashes ({self.obstacle}//{rest}), and a run takes it as Settings(checkpoints=...) or "
                    "Settings(mirror=...)"
                )
            return (
                f"it would be a local directory called {self.obstacle}; give the run a local directory, and the "
                "address of an object store as Settings(checkpoints=...) or Settings(mirror=...)"
            )
        if self.problem == "dangling":
            return "nothing is created at the target: its disk may not be mounted"
        return "nothing was written"

    def help(self) -> tuple[Help, ...]:
        if self.problem == "forbidden":
            return (Help(f"ls -ld {quoted(self.obstacle)}", "check the permissions"),)
        if self.problem in ("dangling", "circular"):
            return (Help(f"ls -l {quoted(self.obstacle or self.path)}", "show the target"),)
        return ()


class RunHeld(BusyError):
    """Another live job holds the run."""

    kind = "run-held"
    path: Path
    holder: str
    # How that is known: its process runs here, it renewed its lease while it was watched, it was faster just now, or
    # not at all.
    proof: Literal["process", "renewed", "contest", "unknown"]
    watched_s: float = 0.0

    def headline(self) -> str:
        return f"another {'' if self.proof == 'unknown' else 'live '}job holds this run: {self.holder}"

    def so(self) -> str | None:
        known = {
            "process": "its process is running on this machine",
            "renewed": f"it renewed its lease within {amounts.duration(self.watched_s)}",
            "contest": "it took the run at the same moment",
            "unknown": "this machine cannot see whether it is alive",
        }[self.proof]
        return f"{known}; two jobs on one run would overwrite each other"

    def help(self) -> tuple[Help, ...]:
        shown = Help(f"unbroken status {quoted(self.path)}", "show what it is doing")
        if self.proof != "unknown":
            return (shown,)
        return shown, Help(f"unbroken release {quoted(self.path)}", "watch its lease, release it if it is not renewed")


class LeaseLost(BusyError):
    """This job was considered dead and another one holds the run now."""

    kind = "lease-lost"
    path: Path
    mine: int
    current: int
    HEADLINE = "job {mine} no longer holds this run; job {current} does"
    SO = "this job commits nothing more, so the two cannot mix"
    HELP = (Help("unbroken status {path:sh}", "show the job that holds it"),)


class Superseded(BusyError):
    """Another job has opened a run that saves straight to an object store."""

    kind = "superseded"
    store: str
    mine: str
    other: str
    HEADLINE = "another job ({other}) has opened this run"
    AT = "{store}"
    SO = "this job ({mine}) commits nothing more, so the two cannot mix"
    HELP = (Help("unbroken ls {store:sh}", "list what is committed"),)


class CheckpointsElsewhere(UsageError):
    """The checkpoints of a run are in another place than its settings name."""

    kind = "checkpoints-elsewhere"
    run: Path
    found: str
    named: str
    remedy: Help | None = None
    HEADLINE = "the checkpoints of this run are in {found}, and its settings name {named}"
    AT = "{run}"
    SO = "the job would not start from the newest checkpoint; nothing was changed"

    def help(self) -> tuple[Help, ...]:
        return (self.remedy,) if self.remedy else ()


class RunGone(CheckpointError):
    """The run directory was moved or deleted while a job was training."""

    kind = "run-gone"
    exit_code = 5
    path: Path
    job: int
    # Whether the path still exists: then only the job's lease is missing.
    is_there: bool = False

    def headline(self) -> str:
        if self.is_there:
            return f"the lease of job {self.job} was removed from the run directory during training"
        return f"the run directory was moved or deleted while job {self.job} was training"

    def so(self) -> str | None:
        if self.is_there:
            return "nothing more is saved: another job may be using this directory"
        return "nothing more can be saved; if it was moved, move it back, or the next job starts at step 0"

    def help(self) -> tuple[Help, ...]:
        place = self.path if self.is_there else nearest_folder(self.path)
        return (Help(f"ls -la {quoted(place)}", "list what is there"),)


class RunsElsewhere(BusyError):
    """A job to be killed whose process is not on this machine."""

    kind = "runs-elsewhere"
    path: Path
    holder: str
    reason: str
    HEADLINE = "the job cannot be killed from here: {reason}"
    AT = "{path}  ({holder})"
    SO = "no process was killed; without --force, stop works from any machine through the run directory"
    HELP = (Help("unbroken stop {path:sh}", "save and stop at the next step"),)


class StillRunning(BusyError):
    """A job that was requested to stop and has not ended in time."""

    kind = "still-running"
    path: Path
    holder: str
    waited_s: float
    HEADLINE = "the job has not ended within {waited_s:duration}"
    AT = "{path}  ({holder})"
    SO = "the stop request stays active: the job stops at its next step, after the save in progress"
    HELP = (
        Help("unbroken status {path:sh}", "show what it is doing"),
        Help("unbroken stop {path:sh} --force", "kill it; everything after the last commit is lost"),
    )


class NoOutcome(UsageError):
    """A run in which no job has run yet."""

    kind = "no-outcome"
    path: Path
    HEADLINE = "no job of this run has started yet"
    SO = "there is no outcome to show"
    HELP = (Help("unbroken status {path:sh}", "show what is there"),)


class BadDeadline(UsageError):
    """A time limit that is not valid."""

    kind = "bad-deadline"
    source: str
    value: str
    complaint: str
    HEADLINE = "invalid deadline in {source}: {complaint}"
    AT = "{source}={value}"
    SO = "the job does not start: it would end without a save"
    HELP = (Help("unbroken explain {kind}", "where a deadline comes from and what each form means"),)


# ---- what Run saves and resumes ----


class CheckpointsExist(UsageError):
    """A start from scratch where there are checkpoints."""

    kind = "checkpoints-exist"
    store: Path
    count: int
    newest: str
    HEADLINE = "resume is 'scratch', but the run already has {count:n checkpoint}"
    AT = "{store}  (newest {newest})"
    SO = (
        "nothing was changed; remove that setting to resume from the newest, "
        "or abandon them with --force (force=True in Settings)"
    )
    HELP = (Help("unbroken ls {store:sh}", "list the checkpoints"),)


class NotAnItem(UsageError):
    """Something was passed to Run that it cannot save."""

    kind = "not-an-item"
    name: str
    type_name: str
    lacks: str
    HEADLINE = "'{name}' cannot be saved: {type_name} lacks {lacks}"
    SO = "the run is not started: a resume would silently reset it"
    HELP = (Help("unbroken explain {kind}", "what can be passed to Run"),)


class NeedsPickle(UsageError):
    """A value that needs pickle, which is off by default."""

    kind = "needs-pickle"
    item: str
    path: str
    type_name: str
    HEADLINE = "'{path}' has type {type_name}, which can only be saved with pickle"
    AT = "the state of '{item}'"
    HELP = (Help("unbroken explain {kind}", "what can be saved without it"),)

    def so(self) -> str | None:
        if self.item == "counters":
            return "run.counters holds plain values: store a number with .item(), or pass the object to Run by keyword"
        return f"unpickling runs code; if you trust the files, allow it with Settings(allow_pickle=('{self.item}',))"


class UnsavedState(UsageError):
    """Live state was found that is not registered with the run, and the audit is set to raise."""

    kind = "unsaved-state"
    found: tuple[str, ...]
    HEADLINE = "not passed to Run: {found:n stateful object}"
    SO = "a resume would silently reset them"
    DETAILS = Each("found")
    HELP = (Help("unbroken explain {kind}", "how to register them, or why not to"),)


class StateDiffers(ExactnessError):
    """The objects passed to ``Run`` or ``load`` do not match the checkpoint; nothing was loaded."""

    kind = "state-differs"
    checkpoint: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    # Of a checkpoint of another tool: the command that imports it under other names, if that can help.
    importing: str | None = None
    # Of a checkpoint of another tool: what to do instead.
    remedy: str | None = None
    # Whether `dcp.load` was called with a state dict of the script's own.
    is_dcp: bool = False
    HEADLINE = "the objects do not match {checkpoint}"
    SO = "nothing was loaded; the objects were not changed"

    def so(self) -> str | None:
        return self.SO if self.remedy is None else f"{self.SO}; {self.remedy}"

    def help(self) -> tuple[Help, ...]:
        if self.remedy is not None:
            return (self.explained("what is compared, and how to accept a difference"),)
        if self.importing is not None:
            return (Help(self.importing, "make a run of it, with --item, --prefix or --tie"),)
        if self.is_dcp:
            return (
                Help("get_optimizer_state_dict(...)", "an optimizer without state: use this, or make one step first"),
                Help("reader(partial=True)", "leave the rest of the checkpoint out"),
            )
        return (Help(f"unbroken show {quoted(self.checkpoint)} --tensors", "list what the checkpoint contains"),)

    def details(self) -> Iterator[str]:
        yield from each_line(self.unexpected, "only in the checkpoint: {0}", 8)
        yield from each_line(self.missing, "not in the checkpoint: {0}", 8)
        yield from each_line(self.changed, "differs: {0}", 8)


class NotExact(ExactnessError):
    """A resume that would not give the same bits; each difference can be accepted by name."""

    kind = "not-exact"
    differences: tuple[tuple[str, str], ...]
    HEADLINE = "the resume would not be exact: the bits would differ from one long job"
    DETAILS = Each("differences", "{0}: {1}")
    HELP = (Help("unbroken explain {kind}", "what each name means and how to accept it"),)

    def so(self) -> str | None:
        return f"to continue anyway, accept each difference by name: {', '.join(name for name, _ in self.differences)}"


class NotRestored(ExactnessError):
    """The live state after a load is not the state that was saved."""

    kind = "not-restored"
    checkpoint: str
    names: tuple[str, ...]
    HEADLINE = "after loading {checkpoint}, {names:n tensor} did not match what was saved"
    SO = "your objects were overwritten: do not continue training with them"
    DETAILS = Each("names", most=8)


class WrittenDuringSave(ExactnessError):
    """Tensors were written between the fingerprint at the end of the step and the end of their copy."""

    kind = "written-during-save"
    step: int
    names: tuple[str, ...]
    SO = (
        "a clamp_, an EMA or Lookahead copy_, a CUDA graph replay or another thread wrote to it; this save was "
        "abandoned, later saves of this job copy everything before training continues"
    )
    DETAILS = Each("names", most=8)
    HELP = (Help("unbroken explain {kind}", "what wrote to them, and how to avoid it"),)

    def headline(self) -> str:
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{self.names[0]}{more} changed outside optimizer.step() while step {self.step:,} was being copied"


# ---- the loop ----


class LeftMidStep(ExactnessError):
    """The loop ended where its state is neither that of the last step nor that of the next."""

    kind = "left-mid-step"
    run: Path
    step: int
    resumable_step: int | None
    HEADLINE = "the loop ended in the middle of step {step:,}, so its state could not be saved"
    AT = "{run}"
    HELP = (Help("unbroken explain {kind}", "how to end a loop early without losing a step"),)

    def so(self) -> str | None:
        saved = "no step is saved" if self.resumable_step is None else f"step {self.resumable_step:,} is saved"
        return f"{saved}; a resume recomputes the steps after it"


class LoopsDisagree(UsageError):
    """Some ranks left the loop while others were still in it."""

    kind = "loops-disagree"
    run: Path
    step: int
    HEADLINE = "some ranks left the loop at step {step:,}, others did not"
    AT = "{run}"
    SO = "the ranks have no common state to save; the last commit is intact"
    HELP = (Help("unbroken explain {kind}", "how to end the loop on all ranks when one rank decides"),)


class NonFiniteLoss(TrainingError):
    """The loss is NaN or Inf."""

    kind = "non-finite-loss"
    step: int
    metric: str
    value: str
    resumable_step: int | None

    def headline(self) -> str:
        value = {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}.get(self.value, self.value)
        return f"{self.metric} is {value} at step {self.step:,}"

    def so(self) -> str | None:
        kept = "there is no checkpoint yet" if self.resumable_step is None else f"step {self.resumable_step:,} is kept"
        return f"this state is not saved; {kept}"

    def help(self) -> tuple[Help, ...]:
        return (self.explained("what to check, and how to continue"),)


class Halted(DataError):
    """A run was halted and saved; you decide how to continue."""

    kind = "halted"
    reason: str
    step: int
    run: Path
    HEADLINE = "the run is halted at step {step:,}: {reason}"
    AT = "{run}"
    SO = "its state is saved; it is not restarted automatically"
    HELP = (Help("unbroken status {run:sh}", "show its state"),)


class DataEnded(DataError):
    """A loader has fewer batches than it had; ``found`` counts those that came of the ``served`` ones."""

    kind = "data-ended"
    epoch: int
    served: int
    found: int = 0
    HELP = (Help("unbroken explain {kind}", "what a loader must be able to do"),)

    def headline(self) -> str:
        if not self.served:
            return f"the loader is empty in epoch {self.epoch:,}"
        return f"the loader ended after {self.found:,} of the {self.served:,} batches it had served in this epoch"

    def so(self) -> str | None:
        if not self.served:
            return "there is nothing to train on; an iterator that cannot be restarted has only one epoch"
        return "the data has changed since the checkpoint; your objects were partly overwritten"


# ---- ranks ----


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
    symptom: str
    HEADLINE = "rank {rank} failed first: {cause}"
    AT = "noticed by rank {noticed_by}: {symptom:.120}"
    SO = "this rank lost its connection because of it; the last commit is intact"
    HELP = (Help("unbroken explain {kind}", "where to find the traceback"),)


class PeerLost(PeerError):
    """Another rank is gone or does not respond; ``rank`` is the one that noticed, ``lost`` the one that is gone."""

    kind = "peer-lost"
    rank: int
    symptom: str
    lost: int | None = None
    AT = "noticed by rank {rank}: {symptom:.120}"
    SO = "the job ends; the last commit is intact, and the same command resumes from it"
    HELP = (Help("unbroken explain {kind}", "how to find the rank that failed first"),)

    def headline(self) -> str:
        if self.lost is not None:
            return f"rank {self.lost} is gone: it was killed or crashed without an error message"
        return "another rank is gone or does not respond"


class NoConnection(PeerError):
    """Every rank is there, and they cannot connect; ``rank`` reports it, ``symptom`` is what one of them got."""

    kind = "no-connection"
    rank: int
    symptom: str
    attempts: int
    HEADLINE = "the ranks could not connect to each other over gloo ({attempts} attempts)"
    AT = "{symptom:.160}"
    SO = "the run is not started; set GLOO_SOCKET_IFNAME to a network interface that all nodes share"
    HELP = (Help("unbroken explain {kind}", "how to find the interface or the firewall"),)


class ItemsDiffer(UsageError):
    """The ranks did not pass the same items to Run; ``names`` are those of each rank."""

    kind = "items-differ"
    names: tuple[tuple[str, ...], ...]
    HEADLINE = "the ranks did not pass the same items to Run"
    SO = "the run is not started: items of only some ranks cannot be resumed"
    HELP = (Help("unbroken explain {kind}", "what every rank must pass"),)

    def details(self) -> Iterator[str]:
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, names in enumerate(self.names):
            ranks.setdefault(names, []).append(rank)
        for names, having in list(ranks.items())[:4]:
            whose = f"rank {having[0]}" + (f" and {len(having) - 1} more" if len(having) > 1 else "")
            yield f"{whose}: {', '.join(names) or 'nothing'}"


class NoProcessGroup(UsageError):
    """The launcher started several ranks and torch.distributed was not initialised."""

    kind = "no-process-group"
    world_size: int
    HEADLINE = "WORLD_SIZE is {world_size}, but torch.distributed is not initialised"
    SO = "each rank would open the run alone; call torch.distributed.init_process_group() before Run"
    HELP = (Help("unbroken explain {kind}", "where to call it"),)


class NotInGroup(UsageError):
    """A run was opened by a rank that is not in its process group."""

    kind = "not-in-group"
    rank: int
    HEADLINE = "rank {rank} is not in the process group of this run"
    SO = "only the ranks of `process_group` open the run; nothing was started"
    HELP = (Help("unbroken explain {kind}", "how to train on a subset of the ranks"),)


class NotShared(UsageError):
    """A rank does not see the directory that the others see."""

    kind = "not-shared"
    path: Path
    rank: int
    host: str
    HEADLINE = "rank {rank} on {host} does not see the run directory of rank 0"
    SO = (
        "its parts would be missing from every checkpoint; the directory must be on storage that all nodes share, or "
        "the checkpoints in an object store (checkpoints: s3://…)"
    )
    HELP = (Help("df -h {path:sh}", "on each node: is it the same file system?"),)
