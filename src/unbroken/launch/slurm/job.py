"""Inside a SLURM job: start the step, forward SLURM's signal to the run, and requeue the job if the run is not done.

The batch script execs into this process. The signal is forwarded as a stop request in the run directory: it reaches
the ranks on all nodes and no other process. Only before a rank has opened the run it is sent through ``srun``.
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
from unbroken.launch.slurm import controller
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
# A lost machine is detected by watching its lease for its time to live, and a little more.
HELD_TIMEOUT_S: Final = 1.5 * DEFAULT_TTL_S
_LOOK_S: Final = 1.0
# SLURM's reason for a job whose last save exceeded the limit: SLURM ends it and does not requeue it.
_OUT_OF_TIME: Final = "TimeLimit"
_WARNINGS: Final = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


@dataclass(frozen=True)
class JobOptions:
    """What a job runs.

    Attributes:
        script: the batch script to submit if SLURM does not allow requeue.
        in_vain: the number of earlier jobs in a row that never opened their run.
    """

    run: Path
    command: tuple[str, ...]
    script: Path | None = None
    is_link: bool = False
    is_chained: bool = False
    in_vain: int = 0


@dataclass(frozen=True)
class JobContext:
    """What a job needs from the machine."""

    environ: Mapping[str, str]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    say: Say
    held_timeout_s: float = HELD_TIMEOUT_S


def run_job(options: JobOptions, context: JobContext) -> int:
    """Run one job and decide what follows; returns its exit code.

    Raises:
        StorageFailed: the records of the run could not be read.
    """
    is_requeued = context.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    waited = hold_signals()
    outcome = _settled(options.run, context)
    refused = before_start(outcome, is_link=options.is_link or is_requeued)
    if refused is not None:
        context.say(f"not started: {refused.reason}")
        return refused.exit_code
    job_before = last_job(options.run) or 0
    step = _Watch(options, context, job_before, waited).until_end()
    history = read_history(Layout(options.run))
    in_vain = starts_in_vain(history, placement(context.environ), options.in_vain)
    ended = _settled(options.run, context)
    following = after_end(ended, step, job_before=job_before, history=history, in_vain=in_vain)
    if isinstance(following, NoRequeue):
        context.say(f"not requeued: {following.reason}")
        return following.exit_code
    return _follow(following, options, context, step)


def _settled(run: Path, context: JobContext) -> Outcome | None:
    """How the last job of a run ended; waits for one that seems to run until a dead one would be detected."""
    end_s = context.clock() + context.held_timeout_s
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
    """The step of the job under supervision."""

    options: JobOptions
    context: JobContext
    job_before: int
    waited: frozenset[signal.Signals]
    was_warned: bool = False

    def until_end(self) -> Step:
        """Start the step and wait for its end, forwarding signals."""
        try:
            child = processes.start(self.options.command, self.context.environ, stdout=None)
        except OSError as refusal:
            self.context.say(f"could not start {self.options.command[0]}: {refusal.strerror or refusal}")
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
        why = "SLURM ends this job" if number == signal.SIGTERM else "walltime limit is near"
        why = f"{name}: {why}"
        try:
            lease = read_current(layout.run)
            if lease is not None and lease.number > self.job_before and not lease.is_released:
                request_stop(layout, job=lease.number, by=by, scratch=scratch(f"warning_{os.getpid()}", "request"))
                self.context.say(f"{why}; requesting the run to save and exit")
                return
        except StorageFailed as refusal:
            self.context.say(f"could not write to the run directory: {refusal}")
        self.context.say(f"{why}; forwarding the signal to all processes of the step")
        # srun forwards SIGUSR1 to its tasks; on SIGTERM it would exit itself.
        processes.send([child.pid], signal.SIGUSR1)


def _job_name(environ: Mapping[str, str]) -> str:
    placed = placement(environ)
    return placed.id if placed is not None else ""


def _follow(following: Requeue, options: JobOptions, context: JobContext, step: Step) -> int:
    job = _job_name(context.environ)
    if options.is_chained:
        context.say(f"left to the next job of the chain: {following.reason}")
        return 0
    state, reason = controller.job_state(job)
    if state not in ("RUNNING", "") and reason != _OUT_OF_TIME:
        # Cancelled by the user, or preempted or without its node: then SLURM requeues it itself.
        context.say(f"not requeued: SLURM is already ending this job ({state})")
        return step.code
    words = controller.requeue(job)
    if words is None:
        context.say(f"requeued: {following.reason}")
        return 0
    context.say(f"requeue failed: {words}")
    return _submit_next(following, options, context)


def _submit_next(following: Requeue, options: JobOptions, context: JobContext) -> int:
    if options.script is None:
        context.say("no --script to submit instead; submit the job again by hand")
        return EXIT_UNKNOWN
    task = context.environ.get("SLURM_ARRAY_TASK_ID")
    array = [f"array={task}"] if task else []
    after = context.environ.get("SLURM_JOB_ID")
    try:
        found = submit(options.script, after=after, is_link=True, in_vain=following.in_vain, options=array)
    except (SlurmRefused, SlurmMissing, BadUsage) as refusal:
        context.say(f"could not submit a new job: {' '.join(refusal.details()) or refusal.headline()}")
        return EXIT_UNKNOWN
    context.say(f"submitted job {found.job}: {following.reason}")
    return 0
