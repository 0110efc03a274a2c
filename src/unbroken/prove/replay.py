"""A replay: recompute the steps from checkpoint A to checkpoint B, and compare metrics and state.

The run is only read. A verified copy of A is placed in a separate directory; the command that made the run resumes from
it, as a drill that stops at the step of B. Its metrics must equal those of the run, and its final state that of B.
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
from unbroken.prove.drilled_command import PROGRAM, RANKS, Relocation, config_of_jobs, recorded_config, understood
from unbroken.prove.job_process import POLL_S, JobEnd, JobProcess
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
    """Copy one checkpoint with its name and manifest; ``job`` owns the draft until it is complete.

    Raises:
        DamagedCheckpoint: it is damaged; the target gets no such checkpoint.
        StorageFailed: an I/O error.
    """
    draft = begin(target, step=manifest.step, job=job)
    for part in manifest.parts:
        with contextlib.closing(read_part(source.files, source.path(name), manifest, part)) as blocks:
            # crash here: a draft with some of the parts, which readers ignore.
            written = draft.write_part(part.name, blocks)
        if written.digest.size_bytes != part.size_bytes:
            raise DamagedCheckpoint(path=source.path(name), findings=(f"{part.name}: it became shorter",))
    for directory in sorted({(draft.path / part.name).parent for part in manifest.parts} - {draft.path}):
        target.files.sync_directory(directory)
    # crash here: a complete checkpoint under a draft's name: still torn.
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
class ReplayEnd:
    """One end of a replay."""

    name: str
    manifest: Manifest

    @property
    def step(self) -> int:
        """Its step."""
        return self.manifest.step


@dataclass(frozen=True)
class ReplaySpan:
    """The part of a history that is recomputed."""

    store: Store
    a: ReplayEnd
    b: ReplayEnd

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
class ReplayOptions:
    """How it is recomputed: with what command, on how many ranks, with which data."""

    words: tuple[str, ...] = ()
    ranks: int | None = None
    data_path: Path | None = None


@dataclass(frozen=True)
class ReplayFolder:
    """The directory of a replay and its contents."""

    root: Path

    @property
    def run(self) -> Path:
        """Where the recomputation writes, as a run of its own."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """The log of its job."""
        return self.root / LOG


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay; ``metrics`` is None if the run has none for these steps."""

    span: ReplaySpan
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
        losses = "the run has no metrics for them" if self.metrics is None else "all loss bits"
        tensors = f"all {amounts.plural(self.state.tensors, 'tensor')} of {span.b.name} equal"
        return f"{done}; {losses}{',' if self.metrics is None else ' and'} {tensors}"

    def lines(self) -> list[str]:
        """What was found, in words."""
        said = ["the run has no metrics for these steps"]
        if self.metrics is not None:
            said = self.metrics.lines("the run", "the recomputation")
        return said + self.state.lines()

    def json_fields(self) -> dict[str, Any]:
        """The same as JSON."""
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


def span_of(store: Store, a: str, b: str) -> ReplaySpan:
    """The two ends of a replay, by step or name.

    Raises:
        CheckpointUnknown: the run has no such checkpoint.
        BadUsage: B is not after A.
        CheckpointError: a manifest is damaged or of another version.
    """
    first, second = (ReplayEnd(name, store.read_manifest(name)) for name in (named_in(store, a), named_in(store, b)))
    if first.step == second.step:
        same = f"A and B are both at step {first.step:,}: nothing to recompute"
        raise BadUsage(command=PROGRAM, complaint=same)
    if first.step > second.step:
        complaint = f"A is at step {first.step:,}, B at step {second.step:,}; give the earlier one first"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return ReplaySpan(store, first, second)


def require_sound(span: ReplaySpan, advance: Advance | None = None) -> None:
    """Verify all checksums of both checkpoints.

    Raises:
        DamagedCheckpoint: one is damaged; all findings are listed.
    """
    for end in (span.a, span.b):
        verdict = verify(span.store, end.name, Level.FULL, progress=advance)
        if not verdict.is_sound:
            raise verdict.error(span.store)


def replayed_command(span: ReplaySpan, means: ReplayOptions, place: ReplayFolder, *, python: str) -> list[str]:
    """The command that recomputes; for a run of ``unbroken train`` its config is written into the replay's directory.

    Raises:
        BadUsage: the command of the run is unknown, or its number of ranks cannot be set.
        RunRecordDamaged: the run's record of its config is damaged.
        StorageFailed: an I/O error.
    """
    if means.words:
        return _spoken(means, place, python)
    layout = span.layout
    started = recorded_config(layout)
    if started is None:
        complaint = (
            f"{layout.run} was not started by `unbroken train`, so its command is unknown; "
            f"give it last: unbroken replay {layout.run} {span.a.step} {span.b.step} -- python train.py"
        )
        raise BadUsage(command=PROGRAM, complaint=complaint)
    jobs = {row.job for step, row in read_metrics(layout).kept.items() if span.a.step < step <= span.b.step}
    config = with_values(config_of_jobs(layout, started, jobs), Relocation(place.run, means.data_path).changes())
    path = place.root / CONFIG
    LOCAL.replace(path, config.to_json().encode(), scratch=scratch("replay", CONFIG), durable=False)
    ranks = [] if means.ranks is None else ["--nproc-per-node", str(means.ranks)]
    return [python, "-m", "unbroken", "train", str(path), *ranks]


def _spoken(means: ReplayOptions, place: ReplayFolder, python: str) -> list[str]:
    """The given command: a bare script or module is launched, anything else is started as it is."""
    if means.data_path is not None:
        raise BadUsage(command=PROGRAM, complaint="--data-path is for runs of `unbroken train`, which need no command")
    is_bare = means.words[0] == "-m" or means.words[0].endswith(".py")
    launched = [python, "-m", "unbroken", "run", "--"] if is_bare else []
    command = understood([*launched, *means.words], python=python)
    if means.ranks is not None and not command.sets_ranks:
        complaint = f"{means.words[0]} starts its own processes; put {RANKS} in place of their number"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return command.words_for(place.run, means.ranks)


def replay(
    span: ReplaySpan, command: Sequence[str], place: ReplayFolder, *, environ: Mapping[str, str], advance: Advance
) -> ReplayResult:
    """Recompute and compare; ``advance`` is called with completed steps.

    Raises:
        ReplayUnfinished: the job ended before the step of B.
        PathMissing: the program does not exist.
        DamagedCheckpoint: a checkpoint is damaged.
        StorageFailed: an I/O error.
    """
    again = Layout(place.run)
    target = Store(again.checkpoints)
    copy_checkpoint(span.store, span.a.name, span.a.manifest, target, job=JOB)
    if LOCAL.find(place.root / CONFIG) is not None:
        # A run of `unbroken train` with checkpoints also has a record of its config.
        config = LOCAL.read_bytes(place.root / CONFIG, limit_bytes=1 << 24)
        LOCAL.replace(again.config, config, scratch=scratch("replay", CONFIG), durable=False)
    # Named as in the run: B may be a periodic save, without a shutdown.
    stops_as = SHUTDOWN if span.b.manifest.kind == SHUTDOWN else PERIODIC
    drill = Drill(directory=place.run.absolute(), stop_at=span.b.step, stops_as=stops_as)
    write_drill(place.root / DRILL, drill)
    ended, said = _run(span, command, place, {**environ, ENVIRONMENT: str((place.root / DRILL).absolute())}, advance)
    try:
        name = named_in(target, str(span.b.step))
    except CheckpointUnknown:
        raise _unfinished(span, place, ended, said) from None
    kept, recomputed = read_metrics(span.layout), read_metrics(again)
    return ReplayResult(
        span=span,
        world=_world(target.read_manifest(name)),
        metrics=_metrics(span, kept, recomputed),
        state=compare_checkpoints(span.store, span.b.name, target, name),
    )


def _metrics(span: ReplaySpan, kept: Stitched, recomputed: Stitched) -> MetricsComparison | None:
    after, until = span.a.step, span.b.step
    if not any(after < step <= until for step in kept.kept):
        return None
    return compare_metrics(kept, recomputed, after=after, until=until)


def _world(manifest: Manifest) -> int:
    world = manifest.metadata.get("world_size")
    return world if type(world) is int else 1


def _run(
    span: ReplaySpan, command: Sequence[str], place: ReplayFolder, environ: Mapping[str, str], advance: Advance
) -> tuple[JobEnd, tuple[str, ...]]:
    done = span.a.step
    try:
        job = JobProcess.started(command, env=environ, log=place.log, run=place.run)
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


def _unfinished(span: ReplaySpan, place: ReplayFolder, ended: JobEnd, said: tuple[str, ...]) -> ReplayUnfinished:
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
        log_tail=said,
        exit_code=code or ReplayUnfinished.exit_code,
    )


def require_fresh(directory: Path) -> None:
    """Raise unless a path is free or an empty directory.

    Raises:
        BadUsage: it is not; a replay never overwrites anything.
    """
    if directory.exists() and (not directory.is_dir() or any(os.scandir(directory))):
        complaint = f"{directory} exists and is not empty; a replay needs a directory of its own"
        raise BadUsage(command=PROGRAM, complaint=complaint)
