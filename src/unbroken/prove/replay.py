"""A replay: from checkpoint A recompute the steps up to checkpoint B, and compare all that both histories say.

The run is only read. A copy of A, every byte proven, stands in a directory of its own; the command that made the run
goes on from it as a drill that stops at the step of B. What it logs on the way must be what the run logged, and what
it saves must be what B holds: then A leads to B, and anybody who has the two can check it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.config.changes import with_values
from unbroken.errors import BadUsage, CheckpointUnknown, DamagedCheckpoint, PathMissing, ReplayUnfinished
from unbroken.files import LOCAL
from unbroken.prove.command import PROGRAM, RANKS, Elsewhere, config_of_jobs, recorded_config, understood
from unbroken.prove.watched_job import POLL_S, Ended, Job
from unbroken.quoting import amounts
from unbroken.records.drill import ENVIRONMENT, Drill, write_drill
from unbroken.records.layout import Layout, run_of
from unbroken.records.metrics import Stitched, read_metrics
from unbroken.store.check import Level, verify
from unbroken.store.commit import begin
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, encode
from unbroken.store.names import MANIFEST, PERIODIC, SHUTDOWN, scratch
from unbroken.store.parts import read_part
from unbroken.store.references import named_in
from unbroken.testing.exactness import MetricsComparison, StateComparison, compare_checkpoints, compare_metrics


def copy_checkpoint(source: Store, name: str, manifest: Manifest, target: Store, *, job: str) -> None:
    """Copy one checkpoint under its own name, with its own manifest; ``job`` is whose draft it is until it is whole.

    Raises:
        DamagedCheckpoint: its bytes are not what was written; the target has no such checkpoint.
        StorageFailed: the system refused.
    """
    draft = begin(target, step=manifest.step, job=job)
    for part in manifest.parts:
        with contextlib.closing(read_part(source.files, source.path(name), manifest, part)) as blocks:
            # crash here: a draft with some of the parts, which no reader takes for a checkpoint.
            written = draft.write_part(part.name, blocks)
        if written.digest.size_bytes != part.size_bytes:
            raise DamagedCheckpoint(path=source.path(name), findings=(f"{part.name}: it is shorter than it was",))
    for directory in sorted({(draft.path / part.name).parent for part in manifest.parts} - {draft.path}):
        target.files.sync_directory(directory)
    # crash here: a whole checkpoint under a draft's name: torn all the same.
    target.files.write_new(draft.path / MANIFEST, [encode(manifest)])
    target.files.sync_directory(draft.path)
    # crash here: the draft's name or the checkpoint's own, and nothing between.
    target.files.publish(draft.path, target.path(name))


JOB: Final = "replay"
LOG: Final = "replay.log"
DRILL: Final = "drill.json"
CONFIG: Final = "config.json"
_LAST_LINES: Final = 12

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Checkpoint:
    """One end of a replay."""

    name: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Its step."""
        return self.manifest.step


@dataclass(frozen=True)
class Span:
    """The part of a history that is recomputed."""

    store: Store
    a: Checkpoint
    b: Checkpoint

    @property
    def layout(self) -> Layout:
        """The run."""
        return run_of(self.store)

    @property
    def steps(self) -> int:
        """How many steps lie between."""
        return self.b.step - self.a.step

    @property
    def size_bytes(self) -> int:
        """The bytes of both checkpoints."""
        return self.a.manifest.size_bytes + self.b.manifest.size_bytes


@dataclass(frozen=True)
class Means:
    """How it is recomputed: with what command, on how many ranks, with which data."""

    words: tuple[str, ...] = ()
    ranks: int | None = None
    data_path: Path | None = None


@dataclass(frozen=True)
class Place:
    """The directory of a replay and what stands in it."""

    root: Path

    @property
    def run(self) -> Path:
        """Where the recomputation writes, as a run of its own."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """What its job says."""
        return self.root / LOG


@dataclass(frozen=True)
class Replayed:
    """What a replay has shown; ``metrics`` is None where the run kept none of these steps."""

    span: Span
    world: int
    metrics: MetricsComparison | None
    state: StateComparison

    @property
    def is_equal(self) -> bool:
        """Whether A leads to B."""
        return self.state.is_equal and (self.metrics is None or self.metrics.first is None)

    def headline(self) -> str:
        """The verdict in one line."""
        span = self.span
        done = f"{amounts.plural(span.steps, 'step')} recomputed on {amounts.plural(self.world, 'rank')}"
        if not self.is_equal:
            return f"{done}; they do not lead from {span.a.name} to {span.b.name}"
        losses = "no metrics of them are kept" if self.metrics is None else "all loss bits"
        tensors = f"all {amounts.plural(self.state.tensors, 'tensor')} of {span.b.name} equal"
        return f"{done}; {losses}{',' if self.metrics is None else ' and'} {tensors}"

    def lines(self) -> list[str]:
        """What was found, in words."""
        said = ["the run kept no metrics of these steps"]
        if self.metrics is not None:
            said = self.metrics.lines("the run", "the recomputation")
        return said + self.state.lines()

    def facts(self) -> dict[str, Any]:
        """The same for a document."""
        return {
            "run": str(self.span.layout.run),
            "a": {"name": self.span.a.name, "step": self.span.a.step, "id": self.span.a.manifest.id},
            "b": {"name": self.span.b.name, "step": self.span.b.step, "id": self.span.b.manifest.id},
            "steps": self.span.steps,
            "world_size": self.world,
            "is_equal": self.is_equal,
            "metrics": None if self.metrics is None else asdict(self.metrics),
            "state": asdict(self.state),
        }


def span_of(store: Store, a: str, b: str) -> Span:
    """The two ends of a replay, by what a person calls them.

    Raises:
        CheckpointUnknown: the run has no such checkpoint.
        BadUsage: B is not after A.
        CheckpointError: a manifest is damaged or of another version.
    """
    first, second = (Checkpoint(name, store.read_manifest(name)) for name in (named_in(store, a), named_in(store, b)))
    if first.step == second.step:
        same = f"A and B are both of step {first.step:,}; there is nothing to recompute between them"
        raise BadUsage(command=PROGRAM, complaint=same)
    if first.step > second.step:
        complaint = f"A is of step {first.step:,} and B of step {second.step:,}; the earlier one stands first"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return Span(store, first, second)


def require_sound(span: Span, advance: Advance | None = None) -> None:
    """Pass if every byte of both checkpoints is what was written.

    Raises:
        DamagedCheckpoint: it is not; every bad place is named.
    """
    for end in (span.a, span.b):
        verdict = verify(span.store, end.name, Level.FULL, progress=advance)
        if not verdict.is_sound:
            raise verdict.error(span.store)


def command_of(span: Span, means: Means, place: Place, *, python: str) -> list[str]:
    """The command that recomputes; for a run of ``unbroken train`` its config is written into the replay's directory.

    Raises:
        BadUsage: nothing says what made the run, or the number of ranks cannot be told to the command.
        RunRecordDamaged: the run's record of its config is damaged.
        StorageFailed: the system refused.
    """
    if means.words:
        return _spoken(means, place, python)
    layout = span.layout
    started = recorded_config(layout)
    if started is None:
        complaint = (
            f"no `unbroken train` started {layout.run}, so its command is not known; "
            f"it stands last: unbroken replay {layout.run} {span.a.step} {span.b.step} -- python train.py"
        )
        raise BadUsage(command=PROGRAM, complaint=complaint)
    jobs = {row.job for step, row in read_metrics(layout).kept.items() if span.a.step < step <= span.b.step}
    config = with_values(config_of_jobs(layout, started, jobs), Elsewhere(place.run, means.data_path).changes())
    path = place.root / CONFIG
    LOCAL.replace(path, config.to_json().encode(), scratch=scratch("replay", CONFIG), durable=False)
    ranks = [] if means.ranks is None else ["--nproc-per-node", str(means.ranks)]
    return [python, "-m", "unbroken", "train", str(path), *ranks]


def _spoken(means: Means, place: Place, python: str) -> list[str]:
    """The command as it was said: a bare script or module is launched, everything else is started as it is."""
    if means.data_path is not None:
        raise BadUsage(command=PROGRAM, complaint="--data-path is for runs of `unbroken train`, which need no command")
    is_bare = means.words[0] == "-m" or means.words[0].endswith(".py")
    launched = [python, "-m", "unbroken", "run", "--"] if is_bare else []
    command = understood([*launched, *means.words], python=python)
    if means.ranks is not None and not command.sets_ranks:
        complaint = f"{means.words[0]} starts its own processes; put {RANKS} where it is told how many"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return command.words_for(place.run, means.ranks)


def replay(
    span: Span, command: Sequence[str], place: Place, *, environ: Mapping[str, str], advance: Advance
) -> Replayed:
    """Recompute and compare; ``advance`` hears of steps as they are done.

    Raises:
        ReplayUnfinished: the job ended before the step of B.
        PathMissing: there is no such program.
        DamagedCheckpoint: a checkpoint is not what was written.
        StorageFailed: the system refused.
    """
    again = Layout(place.run)
    target = Store(again.checkpoints)
    copy_checkpoint(span.store, span.a.name, span.a.manifest, target, job=JOB)
    if LOCAL.find(place.root / CONFIG) is not None:
        # A run of `unbroken train` that has checkpoints has the record of its config, too.
        config = LOCAL.read_bytes(place.root / CONFIG, limit_bytes=1 << 24)
        LOCAL.replace(again.config, config, scratch=scratch("replay", CONFIG), durable=False)
    # Called as the run calls it: nothing was shut down where B is one save among others.
    stops_as = SHUTDOWN if span.b.manifest.kind == SHUTDOWN else PERIODIC
    drill = Drill(directory=place.run.absolute(), stop_at=span.b.step, stops_as=stops_as)
    write_drill(place.root / DRILL, drill)
    ended, said = _run(span, command, place, {**environ, ENVIRONMENT: str((place.root / DRILL).absolute())}, advance)
    try:
        name = named_in(target, str(span.b.step))
    except CheckpointUnknown:
        raise _unfinished(span, place, ended, said) from None
    kept, recomputed = read_metrics(span.layout), read_metrics(again)
    return Replayed(
        span=span,
        world=_world(target.read_manifest(name)),
        metrics=_metrics(span, kept, recomputed),
        state=compare_checkpoints(span.store, span.b.name, target, name),
    )


def _metrics(span: Span, kept: Stitched, recomputed: Stitched) -> MetricsComparison | None:
    after, until = span.a.step, span.b.step
    if not any(after < step <= until for step in kept.kept):
        return None
    return compare_metrics(kept, recomputed, after=after, until=until)


def _world(manifest: Manifest) -> int:
    world = manifest.metadata.get("world_size")
    return world if type(world) is int else 1


def _run(
    span: Span, command: Sequence[str], place: Place, environ: Mapping[str, str], advance: Advance
) -> tuple[Ended, tuple[str, ...]]:
    done = span.a.step
    try:
        job = Job.started(command, env=environ, log=place.log, run=place.run)
    except OSError as refused:
        if isinstance(refused, FileNotFoundError | PermissionError | NotADirectoryError):
            raise PathMissing(path=Path(command[0]), purpose="program") from refused
        raise
    with job:
        while job.is_running:
            time.sleep(POLL_S)
            step = min(job.step() or done, span.b.step)
            if step > done:
                advance(step - done)
                done = step
        return job.wait(), job.said(_LAST_LINES)


def _unfinished(span: Span, place: Place, ended: Ended, said: tuple[str, ...]) -> ReplayUnfinished:
    outcome = ended.outcome
    reason = f"its command ended with exit code {ended.code} and never entered a Run"
    if outcome is not None:
        at = "" if outcome.step is None else f" at step {outcome.step:,}"
        reason = f"its job is {outcome.status}{at}{f': {outcome.reason}' if outcome.reason else ''}"
    code = outcome.exit_code if outcome is not None else ended.code
    return ReplayUnfinished(
        run=span.layout.run,
        checkpoint=span.b.name,
        step=span.b.step,
        reason=reason,
        log=place.log,
        said=said,
        exit_code=code or ReplayUnfinished.exit_code,
    )


def require_fresh(directory: Path) -> None:
    """Pass if nothing stands at a path, or an empty directory.

    Raises:
        BadUsage: something does; a replay never writes over anything.
    """
    if directory.exists() and (not directory.is_dir() or any(os.scandir(directory))):
        complaint = f"{directory} is there already and not empty; a replay is made in a directory of its own"
        raise BadUsage(command=PROGRAM, complaint=complaint)
