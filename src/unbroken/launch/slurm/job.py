"""Inside a job of SLURM: start the step, pass SLURM's warning on, and queue the job again where the run is to go on.

The batch script becomes this process. The warning is passed on through the run's directory: it reaches every rank on
every node and nobody else. Only while no rank has taken the run is the signal sent through ``srun``.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BadUsage, SlurmMissing, SlurmRefused, StorageFailed
from unbroken.launch import processes
from unbroken.launch.run_records import last_job
from unbroken.launch.slurm import commands
from unbroken.launch.slurm.decide import NoRequeue, Requeue, Step, after_end, before_start, starts_in_vain
from unbroken.launch.slurm.submit import submit
from unbroken.launch.supervise import Say, hold_signals, next_signal
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import DEFAULT_TTL_S, Standing, read_current
from unbroken.records.outcome import Outcome, judge_outcome
from unbroken.records.process import placement, process_of
from unbroken.records.stop import request_stop
from unbroken.records.takeover import LeaseWatch
from unbroken.store.names import scratch

EXIT_UNKNOWN: Final = 1
# A job whose machine was lost is found out by watching its lease that long, and a little more.
HELD_PATIENCE_S: Final = 1.5 * DEFAULT_TTL_S
_LOOK_S: Final = 1.0
# SLURM's word for a job whose last save took longer than the warning left: it ends it, and does not queue it again.
_OUT_OF_TIME: Final = "TimeLimit"
_WARNINGS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


@dataclass(frozen=True)
class JobOptions:
    """What a job is to do.

    Attributes:
        script: what a follower is submitted from where SLURM lets no job be queued again.
        in_vain: how many jobs in a row, up to the one that this one follows, never took their run.
    """

    run: Path
    command: tuple[str, ...]
    script: Path | None = None
    is_link: bool = False
    is_chained: bool = False
    in_vain: int = 0


@dataclass(frozen=True)
class JobContext:
    """What a job takes from the machine."""

    environ: Mapping[str, str]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    say: Say
    held_patience_s: float = HELD_PATIENCE_S


def run_job(options: JobOptions, context: JobContext) -> int:
    """Do one job from its start to what follows it; returns its exit code.

    Raises:
        StorageFailed: the run's records could not be read.
    """
    is_requeued = context.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    waited = hold_signals()
    outcome = _settled(options.run, context)
    refused = before_start(outcome, is_link=options.is_link or is_requeued)
    if refused is not None:
        context.say(f"nothing is started: {refused.reason}")
        return refused.exit_code
    job_before = last_job(options.run) or 0
    step = _Watch(options, context, job_before, waited).until_end()
    history = read_history(Layout(options.run))
    in_vain = starts_in_vain(history, placement(context.environ), options.in_vain)
    ended = _settled(options.run, context)
    following = after_end(ended, step, job_before=job_before, history=history, in_vain=in_vain)
    if isinstance(following, NoRequeue):
        context.say(f"not queued again: {following.reason}")
        return following.exit_code
    return _follow(following, options, context, step)


def _settled(run: Path, context: JobContext) -> Outcome | None:
    """How the last job of a run ended; one that seems to run is given the time in which a dead one is found out."""
    end_s = context.clock() + context.held_patience_s
    is_told = False
    watch = LeaseWatch(run, monotonic=context.clock, process_of=process_of)
    while True:
        found = judge_outcome(Layout(run), is_live=lambda _: watch.look() is not Standing.GONE)
        if found is None or found.verdict != "held" or context.clock() >= end_s:
            return found
        if not is_told:
            context.say(f"the run is held by {found.reason}; watching its lease for up to {DEFAULT_TTL_S:g} s")
        is_told = True
        context.sleep(_LOOK_S)


@dataclass
class _Watch:
    """The step under supervision."""

    options: JobOptions
    context: JobContext
    job_before: int
    waited: frozenset[signal.Signals]
    was_warned: bool = False

    def until_end(self) -> Step:
        """Start the step and wait for its end, passing warnings on."""
        try:
            child = processes.start(self.options.command, self.context.environ, stdout=None)
        except OSError as refusal:
            self.context.say(f"{self.options.command[0]} could not be started: {refusal.strerror or refusal}")
            return Step(127, was_warned=False)
        while (code := child.poll()) is None:
            number = next_signal(self.waited, _LOOK_S)
            if number in _WARNINGS and not self.was_warned:
                self.was_warned = True
                self._warn(child, number)
            elif number in (signal.SIGINT, signal.SIGHUP):
                processes.send([child.pid], number)
        return Step(code if code >= 0 else 128 - code, self.was_warned)

    def _warn(self, child: "subprocess.Popen[str]", number: signal.Signals) -> None:
        layout, name = Layout(self.options.run), number.name
        by = f"SLURM job {_job_name(self.context.environ)}, {name}"
        why = "SLURM ends this job" if number == signal.SIGTERM else "the time SLURM gives is nearly over"
        why = f"{name}: {why}"
        try:
            lease = read_current(layout.run)
            if lease is not None and lease.number > self.job_before and not lease.is_released:
                request_stop(layout, job=lease.number, by=by, scratch=scratch(f"warning_{os.getpid()}", "request"))
                self.context.say(f"{why}; the run is asked to save and end")
                return
        except StorageFailed as refusal:
            self.context.say(f"the run's directory cannot be written: {refusal}")
        self.context.say(f"{why}; it is sent to every process of the step")
        # To srun, which hands it to its tasks; SIGTERM it would take for its own end.
        processes.send([child.pid], signal.SIGUSR1)


def _job_name(environ: Mapping[str, str]) -> str:
    placed = placement(environ)
    return placed.id if placed is not None else ""


def _follow(following: Requeue, options: JobOptions, context: JobContext, step: Step) -> int:
    job = _job_name(context.environ)
    if options.is_chained:
        context.say(f"the next link of the chain goes on, if there is one: {following.reason}")
        return 0
    state, reason = commands.job_state(job)
    if state not in ("RUNNING", "") and reason != _OUT_OF_TIME:
        # Cancelled: then a person has decided. Preempted, or its node is gone: then SLURM queues it again by itself.
        context.say(f"SLURM is ending this job itself ({state}), so it is not queued again from here")
        return step.code
    words = commands.requeue(job)
    if words is None:
        context.say(f"queued again: {following.reason}")
        return 0
    context.say(f"SLURM does not queue it again: {words}")
    return _successor(following, options, context)


def _successor(following: Requeue, options: JobOptions, context: JobContext) -> int:
    if options.script is None:
        context.say("and no --script is known to submit instead; submit it again by hand")
        return EXIT_UNKNOWN
    task = context.environ.get("SLURM_ARRAY_TASK_ID")
    array = [f"array={task}"] if task else []
    after = context.environ.get("SLURM_JOB_ID")
    try:
        found = submit(options.script, after=after, is_link=True, in_vain=following.in_vain, options=array)
    except (SlurmRefused, SlurmMissing, BadUsage) as refusal:
        context.say(f"and takes no follower: {' '.join(refusal.details()) or refusal.headline()}")
        return EXIT_UNKNOWN
    context.say(f"job {found.job} follows: {following.reason}")
    return 0
