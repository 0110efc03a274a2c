"""One chain: a run of jobs with injected faults, then an undisturbed job, compared with the uninterrupted run.

After each job the prover determines itself from which step the next one must resume, and checks it: a job that started
over would reach the same bits without proving anything.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from unbroken.errors import UnbrokenError
from unbroken.prove import small_disk
from unbroken.prove.baseline import Baseline
from unbroken.prove.damage import do_damage
from unbroken.prove.fault_schedule import PlannedJob
from unbroken.prove.job_process import POLL_S, JobEnd, JobProcess
from unbroken.prove.proof_setup import LOG_LINES, ProofSetup
from unbroken.quoting import amounts
from unbroken.records.drill import Drill, Fault
from unbroken.records.journal import History, read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.store.capacity import RESERVE_BYTES
from unbroken.store.check import Level, verify
from unbroken.store.choose import choose
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, scan
from unbroken.testing.exactness import Comparison, compare_runs

# ---- drills ----

# A script with very fast steps would end before it can be interrupted: it is slowed down from the planned end on.
_STEP_S: Final = 0.05
# Stop requests are polled once a second.
_STEP_TO_STOP_S: Final = 0.3
_SLOW_WRITE_S: Final = 0.05
# If a fault does not occur (a sweep with nothing to sweep), the job must still not complete the run.
_SAVES_TO_WAIT: Final = 4


def step_of(planned: PlannedJob, baseline: Baseline, begin: int) -> int:
    """The step at which a planned job ends: after the one it resumes from, before the last."""
    return min(max(int(planned.at * baseline.steps), begin + 1), baseline.steps - 1)


def drill_for(planned: PlannedJob, baseline: Baseline, *, begin: int, ranks: int) -> Drill:
    """The drill of one job: its faults, and the delays that let it be interrupted from outside in time."""
    every, at = baseline.save_steps, step_of(planned, baseline, begin)
    saves = max(1, at // every - begin // every)
    edges = max(1, at - begin)
    faults = list(_trouble(planned, ranks, saves))
    stop_at: int | None = None
    if planned.ending == "save":
        when = 1 if planned.phase == "sweep" else saves
        faults.append(Fault(planned.phase, "kill", when, planned.rank % ranks if planned.phase == "parts" else 0))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    elif planned.ending == "rank":
        faults.append(Fault("edge", "kill", edges, planned.rank % ranks, planned.pause * max(baseline.step_s, _STEP_S)))
        faults.append(_held_up(edges, _STEP_S))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    else:
        pace_s = _STEP_TO_STOP_S if planned.ending == "stop" else _STEP_S
        if baseline.step_s < pace_s:
            faults.append(_held_up(1 if planned.trouble == "full" else edges, pace_s))
    if stop_at is not None and stop_at <= begin:
        stop_at = None
    return Drill(save_steps=every, stop_at=stop_at, faults=tuple(faults))


def _held_up(edge: int, seconds: float) -> Fault:
    return Fault("edge", "delay", edge, None, seconds)


def _trouble(planned: PlannedJob, ranks: int, saves: int) -> list[Fault]:
    if planned.trouble == "slow":
        return [Fault("parts", "delay", 1, None, _SLOW_WRITE_S)]
    if planned.trouble == "error":
        # An earlier save than the one it is killed in, where there is one.
        rank = planned.rank % ranks if planned.refused_at == "parts" else 0
        return [Fault(planned.refused_at, planned.refusal, max(1, saves - 1), rank)]
    return []


def in_words(fault: Fault) -> str | None:
    """The effect of a fault, for messages; None for a delay that only helps other faults."""
    match fault.do, fault.at:
        case "delay", "edge":
            return None
        case "delay", _:
            return "slow storage"
        case "kill", "edge":
            return "one rank killed"
        case "kill", _:
            return f"killed in a save, at {fault.at}"
    return f"{fault.do.upper()} at {fault.at}"


# ---- the chain ----

_ROOM_FOR_RECORDS_BYTES: Final = 32 << 20
_CHECKPOINTS_OF_ROOM: Final = 8
_LONGEST_FULL_S: Final = 5.0
# Endings that the drill itself causes inside the job.
_INSIDE: Final = ("rank", "save")


@dataclass(frozen=True)
class JobReport:
    """The faults of one job, and how it ended.

    Attributes:
        ranks: the number of ranks, if the prover set it.
        went_on_from: the step it resumed from; None if it ended before that.
        last_step: the last step in its records.
        injected: the faults that occurred.
        missed: planned faults that did not occur.
        ended: how it ended.
        exit_code: as a shell reports it; None if it hung and was killed.
        skipped: checkpoints it skipped, each with the reason.
        damage: the damage to its newest checkpoint afterwards, or why there was none.
    """

    ranks: int | None
    went_on_from: int | None
    last_step: int | None
    injected: tuple[str, ...]
    ended: str
    exit_code: int | None = None
    skipped: tuple[str, ...] = ()
    damage: str | None = None
    missed: tuple[str, ...] = ()


@dataclass
class ChainReport:
    """A chain: its jobs, its comparison and its cost; ``problem`` says why it did not complete, if so.

    ``unsaved`` is live state that the script does not register with its run, as found by the run's audit.
    """

    number: int
    run: Path
    jobs: list[JobReport] = field(default_factory=list)
    comparison: Comparison | None = None
    seconds: float = 0.0
    computed_again: int = 0
    problem: str | None = None
    log: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether it completed and equals the uninterrupted run bit for bit."""
        return self.problem is None and self.comparison is not None and self.comparison.is_equal


class _Stuck(Exception):
    """A job behaved in a way that is never correct."""


class Chain:
    """One chain in progress."""

    def __init__(self, setup: ProofSetup, baseline: Baseline, number: int, say: Callable[[str], None]) -> None:
        self._setup, self._baseline, self._say = setup, baseline, say
        self._run = setup.run(f"chain-{number:04}")
        self._ranks: int | None = None
        self._layout = Layout(self._run)
        self.report = ChainReport(number, self._run)

    @property
    def _store(self) -> Store:
        # Where the checkpoints stand is known once the first job has started.
        return Store(self._layout.checkpoints)

    def make(self, planned_jobs: Sequence[PlannedJob]) -> ChainReport:
        """Run the chain and compare it.

        Raises:
            StorageFailed: the folder could not be written.
            OSError: the program does not exist, or the small file system could not be mounted.
        """
        began_s = time.monotonic()
        self._ranks = planned_jobs[0].ranks
        with self._place(planned_jobs):
            try:
                self._to_the_end(planned_jobs)
                self.report.comparison = compare_runs(self._baseline.run, self._run, idle=self._baseline.idle)
            except _Stuck as stuck:
                self.report.problem = str(stuck)
            except UnbrokenError as refused:
                self.report.problem = f"the run cannot be read: {refused.message}"
            self.report.computed_again = len(read_metrics(self._layout).lost)
            self.report.unsaved = _unsaved(read_history(self._layout))
        self.report.seconds = time.monotonic() - began_s
        return self.report

    @contextlib.contextmanager
    def _place(self, planned_jobs: Sequence[PlannedJob]) -> Iterator[None]:
        """The place of the run: a small file system, if the disk is to be full."""
        if not any(planned.trouble == "full" for planned in planned_jobs):
            yield
            return
        room = RESERVE_BYTES + _ROOM_FOR_RECORDS_BYTES + _CHECKPOINTS_OF_ROOM * self._baseline.checkpoint_bytes
        self._run.mkdir()
        with small_disk.mounted(self._run, room):
            yield
            if not self.report.is_proven:
                # Its content is the evidence and would be lost with it.
                self.report.run = self._run.with_name(f"{self._run.name}-kept")
                small_disk.keep(self._run, self.report.run)

    def _to_the_end(self, planned_jobs: Sequence[PlannedJob]) -> None:
        for planned in planned_jobs:
            if self._is_completed():
                return
            self._do(planned)
        if not self._is_completed():
            self._do(None)
        if not self._is_completed():
            raise _Stuck(f"the last, undisturbed job did not complete the run: {self.report.jobs[-1].ended}")

    def _is_completed(self) -> bool:
        end = read_history(self._layout).last("job-end")
        return end is not None and end.text("status") == "completed"

    # ---- one job ----

    def _do(self, planned: PlannedJob | None) -> None:
        """Run one job, and damage its checkpoint afterwards; without a plan it is undisturbed."""
        expected = self._expected()
        # Before the first commit a config may still derive its global batch size from the number of ranks.
        ranks = self._ranks if planned is None or expected == 0 else planned.ranks
        drill = Drill(save_steps=self._baseline.save_steps)
        if planned is not None:
            drill = drill_for(planned, self._baseline, begin=expected, ranks=ranks or self._baseline.ranks)
        before = set(read_history(self._layout).jobs)
        with self._setup.start(self._run, drill, ranks) as job:
            outside = self._interrupt(job, planned, drill, expected) if planned is not None else []
            ended = self._setup.wait(job)
        small_disk.empty(self._run)
        history = read_history(self._layout)
        mine = [number for number in history.jobs if number not in before]
        report = self._reported(history, mine, ended, ranks)
        report = self._with_faults(report, drill, outside, is_over=ended is not None and _is_completed(ended))
        if planned is not None and planned.damage is not None and not self._is_completed():
            done = do_damage(self._store, planned.damage, planned.where, job=max(mine, default=0))
            injected = [*report.injected, *([f"then {planned.damage}"] if done.name is not None else [])]
            report = replace(report, injected=tuple(injected), damage=done.words)
        self.report.jobs.append(report)
        self._say(_line(self.report.number, len(self.report.jobs), report))
        self._require_sound(job, ended, report, expected, planned)

    def _with_faults(self, report: JobReport, drill: Drill, outside: Sequence[str], *, is_over: bool) -> JobReport:
        """The faults that occurred, by the marks they leave, and those that did not."""
        before = self.report.jobs[-1].ranks if self.report.jobs else report.ranks
        resized = [] if report.ranks == before else [f"{before} to {report.ranks} ranks"]
        struck = self._setup.struck(self._run, drill)
        inside = [words for fault in struck if (words := in_words(fault)) is not None]
        missed = [words for fault in drill.faults if fault not in struck and (words := in_words(fault)) is not None]
        if is_over:
            # It ended before the signal from outside arrived.
            outside, missed = (), [*missed, *outside]
        return replace(report, injected=(*resized, *inside, *outside), missed=tuple(missed))

    def _expected(self) -> int:
        """The least step the next job must resume from: that of the newest checkpoint with correct bytes."""
        names = newest_first(self._store, scan(self._store).committed)
        found = choose(names, lambda name: verify(self._store, name, Level.FULL)).chosen
        return found.manifest.step if found is not None and found.manifest is not None else 0

    def _interrupt(self, job: JobProcess, planned: PlannedJob, drill: Drill, begin: int) -> list[str]:
        """Interrupt the job from outside as planned, and report it; the drill does the rest inside."""
        at = step_of(planned, self._baseline, begin)
        done: list[str] = []
        step_s = max(self._baseline.step_s, *(fault.seconds for fault in drill.faults if fault.at == "edge"), 0.0)
        if planned.trouble == "full":
            self._wait_for_step(job, begin + 1)
            if job.is_running and job.number() is not None:
                done.append(f"disk full, {amounts.size(small_disk.fill(self._run))} taken")
            # Nothing can be written any more, so the step is unknown: wait by time.
            time.sleep(min(_LONGEST_FULL_S, max(0, at - begin) * step_s))
        else:
            self._wait_for_step(job, at, is_inside=planned.ending in _INSIDE)
        if planned.ending in _INSIDE:
            return done
        time.sleep(planned.pause * step_s)
        if not job.is_running:
            return done
        return [*done, self._end(job, planned)]

    def _end(self, job: JobProcess, planned: PlannedJob) -> str:
        if planned.ending == "kill":
            job.kill()
            return "killed, every process"
        # On a full disk no stop request can be written.
        if planned.ending == "stop" and planned.trouble != "full":
            return "stop request" if job.stop(self._setup.limit_s) else "ended before the stop request"
        job.terminate(signal.SIGTERM)
        return "SIGTERM"

    def _wait_for_step(self, job: JobProcess, step: int, *, is_inside: bool = False) -> None:
        """Wait until a job has reached a step or ended; faults inside the job need no action."""
        deadline_s = time.monotonic() + self._setup.limit_s
        while not is_inside and job.is_running and self._reached(job) < step and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _reached(self, job: JobProcess) -> int:
        """The last known step of a job: from its metrics, or from its last save if it logs none."""
        number = job.number()
        if number is None:
            return -1
        saved = read_history(self._layout).last("save", job=number)
        return max(job.step() or 0, (saved.whole("step") if saved else None) or 0)

    # ---- how it ended ----

    def _reported(self, history: History, mine: Sequence[int], ended: JobEnd | None, ranks: int | None) -> JobReport:
        start = history.last("job-start", job=max(mine)) if mine else None
        resumed = next((history.last("resume", job=number) for number in mine), None)
        passed = [event for event in history.of_kind("checkpoint-skipped") if event.job in mine]
        rows = [row.step for row in read_metrics(self._layout).kept.values() if row.job in mine]
        end = history.last("job-end", job=max(mine)) if mine else None
        return JobReport(
            # As many as there really were, where that was ours to set.
            ranks=(start.whole("world_size") if start else None) or ranks if ranks is not None else None,
            went_on_from=resumed.whole("step") if resumed else None,
            last_step=max([*rows, *([end.whole("step") or 0] if end else [])], default=None),
            injected=(),
            ended=_words(ended),
            exit_code=ended.code if ended is not None else None,
            skipped=tuple(f"{event.text('name')}: {event.text('reason')}" for event in passed),
        )

    def _require_sound(
        self, job: JobProcess, ended: JobEnd | None, report: JobReport, expected: int, planned: PlannedJob | None
    ) -> None:
        """Raise if a job behaved in a way that no fault justifies."""
        number = len(self.report.jobs)
        if report.went_on_from is not None and report.went_on_from < expected:
            self._fail(job, f"job {number} resumed from step {report.went_on_from}, though {expected} was usable")
        if report.went_on_from is not None and report.went_on_from > expected:
            self._fail(job, f"job {number} resumed from step {report.went_on_from}, a damaged checkpoint")
        if ended is None:
            self._fail(job, f"job {number} did not end within {amounts.duration(self._setup.limit_s)}, and was killed")
            return
        outcome = ended.outcome
        if outcome is None:
            is_ours = planned is not None and planned.ending in ("kill", "term", "stop")
            if not is_ours:
                self._fail(job, f"job {number} exited with code {ended.code} without taking the run's lease")
        elif outcome.status not in ("stopped", "completed", "crashed") and outcome.verdict != "again":
            self._fail(job, f"job {number} ended as {outcome.status}: {outcome.reason}")

    def _fail(self, job: JobProcess, problem: str) -> None:
        self.report.log = job.said(LOG_LINES)
        raise _Stuck(problem)


def _is_completed(ended: JobEnd) -> bool:
    return ended.outcome is not None and ended.outcome.status == "completed"


def _unsaved(history: History) -> tuple[str, ...]:
    found = history.last("audit")
    names = found.values.get("unsaved") if found is not None else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _words(ended: JobEnd | None) -> str:
    if ended is None:
        return "hangs"
    if ended.outcome is None:
        return f"ended before the run started (exit code {ended.code})"
    status, code = ended.outcome.status, ended.outcome.exit_code
    return f"{status}, exit code {code}" if status in ("error", "halted") else status


def _line(chain: int, job: int, report: JobReport) -> str:
    began = "" if report.went_on_from is None else f" from step {amounts.count(report.went_on_from)}"
    done = "; ".join(report.injected) or "left alone"
    return f"chain {chain}, job {job}{began}: {done}; {report.ended}"
