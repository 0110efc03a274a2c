"""One chain: a run made of jobs that meet trouble, then one that is left alone, held against the uninterrupted run.

After each job the prover looks for itself what the next one must go on from, and holds it to that: a job that began
anew would reach the same bits, and would be no proof of anything.
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
from unbroken.prove.fault_schedule import Leg
from unbroken.prove.watched_job import POLL_S, Ended, Job
from unbroken.prove.workplace import LOG_LINES, Bench
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

# ---- legs ----

# A script whose steps take no time is over before anybody can interrupt it: from where it is to end, it is held up.
_STEP_S: Final = 0.05
# A request to stop is looked for once a second.
_STEP_TO_STOP_S: Final = 0.3
_SLOW_WRITE_S: Final = 0.05
# A fault that is not met, a sweep with nothing to sweep, must not let the job complete the run.
_SAVES_TO_WAIT: Final = 4


def step_of(leg: Leg, baseline: Baseline, begin: int) -> int:
    """The step at which a leg ends: behind the one it goes on from, before the last."""
    return min(max(int(leg.at * baseline.steps), begin + 1), baseline.steps - 1)


def drill_for(leg: Leg, baseline: Baseline, *, begin: int, ranks: int) -> Drill:
    """The drill of one job: what strikes inside it, and what lets it be struck from outside in time."""
    every, at = baseline.save_steps, step_of(leg, baseline, begin)
    saves = max(1, at // every - begin // every)
    edges = max(1, at - begin)
    faults = list(_trouble(leg, ranks, saves))
    stop_at: int | None = None
    if leg.ending == "save":
        when = 1 if leg.phase == "sweep" else saves
        faults.append(Fault(leg.phase, "kill", when, leg.rank % ranks if leg.phase == "parts" else 0))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    elif leg.ending == "rank":
        faults.append(Fault("edge", "kill", edges, leg.rank % ranks, leg.pause * max(baseline.step_s, _STEP_S)))
        faults.append(_held_up(edges, _STEP_S))
        stop_at = min(baseline.steps - 1, at + _SAVES_TO_WAIT * every)
    else:
        pace_s = _STEP_TO_STOP_S if leg.ending == "stop" else _STEP_S
        if baseline.step_s < pace_s:
            faults.append(_held_up(1 if leg.trouble == "full" else edges, pace_s))
    if stop_at is not None and stop_at <= begin:
        stop_at = None
    return Drill(save_steps=every, stop_at=stop_at, faults=tuple(faults))


def _held_up(edge: int, seconds: float) -> Fault:
    return Fault("edge", "delay", edge, None, seconds)


def _trouble(leg: Leg, ranks: int, saves: int) -> list[Fault]:
    if leg.trouble == "slow":
        return [Fault("parts", "delay", 1, None, _SLOW_WRITE_S)]
    if leg.trouble == "error":
        # An earlier save than the one it is killed in, where there is one.
        rank = leg.rank % ranks if leg.refused_at == "parts" else 0
        return [Fault(leg.refused_at, leg.refusal, max(1, saves - 1), rank)]
    return []


def in_words(fault: Fault) -> str | None:
    """What a fault of a drill does to a job; None for one that only gives others the time to strike."""
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
# Endings that the drill brings about by itself.
_INSIDE: Final = ("rank", "save")


@dataclass(frozen=True)
class JobReport:
    """What was done to one job, and what became of it.

    Attributes:
        ranks: how many processes trained, where that was ours to set.
        went_on_from: the step it resumed from; None where it was gone before that.
        last_step: the last one it computed, as far as its records say.
        injected: what was done to it, as it happened.
        missed: what was to be done to it, and never came to be.
        ended: how it ended.
        exit_code: as a shell says it; None where it hung and was killed.
        passed_over: checkpoints it did not take, each with the reason.
        damage: what was done to its newest checkpoint afterwards, or why nothing was.
    """

    ranks: int | None
    went_on_from: int | None
    last_step: int | None
    injected: tuple[str, ...]
    ended: str
    exit_code: int | None = None
    passed_over: tuple[str, ...] = ()
    damage: str | None = None
    missed: tuple[str, ...] = ()


@dataclass
class ChainReport:
    """A chain: its jobs, how it compares, what it cost; ``problem`` says why it is no run at all, if it is none.

    ``unsaved`` is the live state that the script does not hand to its run, as far as the run's audit knows it.
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
        """Whether it was completed, and equals the uninterrupted run in every bit."""
        return self.problem is None and self.comparison is not None and self.comparison.is_equal


class _Stuck(Exception):
    """A job that did what no job may do; says what."""


class Chain:
    """One chain while it is made."""

    def __init__(self, bench: Bench, baseline: Baseline, number: int, say: Callable[[str], None]) -> None:
        self._bench, self._baseline, self._say = bench, baseline, say
        self._run = bench.run(f"chain-{number:04}")
        self._ranks: int | None = None
        self._layout = Layout(self._run)
        self._store = Store(self._layout.checkpoints)
        self.report = ChainReport(number, self._run)

    def make(self, legs: Sequence[Leg]) -> ChainReport:
        """Make the chain and compare it.

        Raises:
            StorageFailed: the folder could not be written.
            OSError: the program is gone, or the small file system could not be made.
        """
        began_s = time.monotonic()
        self._ranks = legs[0].ranks
        with self._place(legs):
            try:
                self._to_the_end(legs)
                self.report.comparison = compare_runs(self._baseline.run, self._run, idle=self._baseline.idle)
            except _Stuck as stuck:
                self.report.problem = str(stuck)
            except UnbrokenError as refused:
                self.report.problem = f"the run cannot be read: {refused}"
            self.report.computed_again = len(read_metrics(self._layout).lost)
            self.report.unsaved = _unsaved(read_history(self._layout))
        self.report.seconds = time.monotonic() - began_s
        return self.report

    @contextlib.contextmanager
    def _place(self, legs: Sequence[Leg]) -> Iterator[None]:
        """Where the run is made: on a small file system, if it is to be full."""
        if not any(leg.trouble == "full" for leg in legs):
            yield
            return
        room = RESERVE_BYTES + _ROOM_FOR_RECORDS_BYTES + _CHECKPOINTS_OF_ROOM * self._baseline.checkpoint_bytes
        self._run.mkdir()
        with small_disk.mounted(self._run, room):
            yield
            if not self.report.is_proven:
                # What is on it is the evidence, and goes with it.
                self.report.run = self._run.with_name(f"{self._run.name}-kept")
                small_disk.keep(self._run, self.report.run)

    def _to_the_end(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            if self._is_completed():
                return
            self._do(leg)
        if not self._is_completed():
            self._do(None)
        if not self._is_completed():
            raise _Stuck(f"the last job was left alone and did not complete the run: {self.report.jobs[-1].ended}")

    def _is_completed(self) -> bool:
        end = read_history(self._layout).last("job-end")
        return end is not None and end.text("status") == "completed"

    # ---- one job ----

    def _do(self, leg: Leg | None) -> None:
        """One job, and the damage after it; without a leg it is left alone."""
        expected = self._expected()
        # Before the first commit a config may still take its global batch from the ranks of the job.
        ranks = self._ranks if leg is None or expected == 0 else leg.ranks
        drill = Drill(save_steps=self._baseline.save_steps)
        if leg is not None:
            drill = drill_for(leg, self._baseline, begin=expected, ranks=ranks or self._baseline.ranks)
        before = set(read_history(self._layout).jobs)
        with self._bench.start(self._run, drill, ranks) as job:
            outside = self._interrupt(job, leg, drill, expected) if leg is not None else []
            ended = self._bench.wait(job)
        small_disk.empty(self._run)
        history = read_history(self._layout)
        mine = [number for number in history.jobs if number not in before]
        report = self._reported(history, mine, ended, ranks)
        report = self._with_faults(report, drill, outside, is_over=ended is not None and _is_completed(ended))
        if leg is not None and leg.damage is not None and not self._is_completed():
            done = do_damage(self._store, leg.damage, leg.where, job=max(mine, default=0))
            injected = [*report.injected, *([f"then {leg.damage}"] if done.name is not None else [])]
            report = replace(report, injected=tuple(injected), damage=done.words)
        self.report.jobs.append(report)
        self._say(_line(self.report.number, len(self.report.jobs), report))
        self._require_sound(job, ended, report, expected, leg)

    def _with_faults(self, report: JobReport, drill: Drill, outside: Sequence[str], *, is_over: bool) -> JobReport:
        """What was done to a job, by the marks that faults leave; what never struck is told apart."""
        before = self.report.jobs[-1].ranks if self.report.jobs else report.ranks
        resized = [] if report.ranks == before else [f"{before} to {report.ranks} ranks"]
        struck = self._bench.struck(self._run, drill)
        inside = [words for fault in struck if (words := in_words(fault)) is not None]
        missed = [words for fault in drill.faults if fault not in struck and (words := in_words(fault)) is not None]
        if is_over:
            # It came to its end before it was met by what was sent from outside.
            outside, missed = (), [*missed, *outside]
        return replace(report, injected=(*resized, *inside, *outside), missed=tuple(missed))

    def _expected(self) -> int:
        """The step that the next job must not fall behind: of the newest checkpoint whose every byte is right."""
        names = newest_first(self._store, scan(self._store).committed)
        found = choose(names, lambda name: verify(self._store, name, Level.FULL)).chosen
        return found.manifest.step if found is not None and found.manifest is not None else 0

    def _interrupt(self, job: Job, leg: Leg, drill: Drill, begin: int) -> list[str]:
        """Do to the job from outside what its leg says, and tell it; the drill does the rest inside."""
        at = step_of(leg, self._baseline, begin)
        done: list[str] = []
        step_s = max(self._baseline.step_s, *(fault.seconds for fault in drill.faults if fault.at == "edge"), 0.0)
        if leg.trouble == "full":
            self._wait_for_step(job, begin + 1)
            if job.is_running and job.number() is not None:
                done.append(f"disk full, {amounts.size(small_disk.fill(self._run))} taken")
            # Nothing can be written any more, so nothing tells the step: the clock has to do.
            time.sleep(min(_LONGEST_FULL_S, max(0, at - begin) * step_s))
        else:
            self._wait_for_step(job, at, is_inside=leg.ending in _INSIDE)
        if leg.ending in _INSIDE:
            return done
        time.sleep(leg.pause * step_s)
        if not job.is_running:
            return done
        return [*done, self._end(job, leg)]

    def _end(self, job: Job, leg: Leg) -> str:
        if leg.ending == "kill":
            job.kill()
            return "killed, every process"
        # On a full disk nobody can write a request.
        if leg.ending == "stop" and leg.trouble != "full":
            return "asked to stop" if job.stop(self._bench.limit_s) else "ended before it could be asked to stop"
        job.terminate(signal.SIGTERM)
        return "SIGTERM"

    def _wait_for_step(self, job: Job, step: int, *, is_inside: bool = False) -> None:
        """Wait until a job has come to a step, or is over; for what strikes inside the job there is nothing to do."""
        deadline_s = time.monotonic() + self._bench.limit_s
        while not is_inside and job.is_running and self._reached(job) < step and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _reached(self, job: Job) -> int:
        """The last step known of a job: of its metrics, or of its last save where it logs none."""
        number = job.number()
        if number is None:
            return -1
        saved = read_history(self._layout).last("save", job=number)
        return max(job.step() or 0, (saved.whole("step") if saved else None) or 0)

    # ---- what became of it ----

    def _reported(self, history: History, mine: Sequence[int], ended: Ended | None, ranks: int | None) -> JobReport:
        start = history.last("job-start", job=max(mine)) if mine else None
        resumed = next((history.last("resume", job=number) for number in mine), None)
        passed = [fact for fact in history.of_kind("checkpoint-skipped") if fact.job in mine]
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
            passed_over=tuple(f"{fact.text('name')}: {fact.text('reason')}" for fact in passed),
        )

    def _require_sound(self, job: Job, ended: Ended | None, report: JobReport, expected: int, leg: Leg | None) -> None:
        """Raise if a job did what no job may do, whatever happens to it."""
        number = len(self.report.jobs)
        if report.went_on_from is not None and report.went_on_from < expected:
            self._fail(job, f"job {number} went on from step {report.went_on_from}, though {expected} was usable")
        if report.went_on_from is not None and report.went_on_from > expected:
            self._fail(job, f"job {number} went on from step {report.went_on_from}, a checkpoint with wrong bytes")
        if ended is None:
            self._fail(job, f"job {number} did not end within {amounts.duration(self._bench.limit_s)}, and was killed")
            return
        outcome = ended.outcome
        if outcome is None:
            is_ours = leg is not None and leg.ending in ("kill", "term", "stop")
            if not is_ours:
                self._fail(job, f"job {number} ended with exit code {ended.code} and never took the run")
        elif outcome.status not in ("stopped", "completed", "crashed") and outcome.verdict != "again":
            self._fail(job, f"job {number} ended as {outcome.status}: {outcome.reason}")

    def _fail(self, job: Job, problem: str) -> None:
        self.report.log = job.said(LOG_LINES)
        raise _Stuck(problem)


def _is_completed(ended: Ended) -> bool:
    return ended.outcome is not None and ended.outcome.status == "completed"


def _unsaved(history: History) -> tuple[str, ...]:
    found = history.last("audit")
    names = found.values.get("unsaved") if found is not None else None
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _words(ended: Ended | None) -> str:
    if ended is None:
        return "hangs"
    if ended.outcome is None:
        return f"gone before it began (exit code {ended.code})"
    status, code = ended.outcome.status, ended.outcome.exit_code
    return f"{status}, exit code {code}" if status in ("error", "halted") else status


def _line(chain: int, job: int, report: JobReport) -> str:
    began = "" if report.went_on_from is None else f" from step {amounts.count(report.went_on_from)}"
    done = "; ".join(report.injected) or "left alone"
    return f"chain {chain}, job {job}{began}: {done}; {report.ended}"
