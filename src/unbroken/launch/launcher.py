"""One launch: start a job, supervise it, read its outcome, restart it if the policy says so, return the exit code."""

import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.launch import job_files, processes, start_clock, torchrun
from unbroken.launch.command import Shape, Target, command_of, environment_of
from unbroken.launch.exit_code import ExitReport, JobExit, exit_report
from unbroken.launch.job_files import JobOutcome
from unbroken.launch.restarts import NO_PROGRESS_RESTARTS, Attempt, NoRestart, Restart, RestartPolicy, decide
from unbroken.launch.run_records import last_job, recorded_outcome, resumable_step, stop_kind
from unbroken.launch.supervise import Say, SupervisedJob, hold_signals, next_signal
from unbroken.records.process import process_of

SHUTDOWN_TIMEOUT_S: Final = 600
RESTART_DELAY_S: Final = 1.0
_ALLOCATION: Final = "SLURM_JOB_ID"


@dataclass(frozen=True)
class LaunchOptions:
    """What to launch and how; ``max_restarts`` None is unlimited while the run makes progress."""

    target: Target
    shape: Shape = Shape()
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S
    stopped_exit_code: int = 0
    max_restarts: int | None = 0
    restart_delay_s: float = RESTART_DELAY_S
    run: Path | None = None
    until_done: bool = False


@dataclass(frozen=True)
class LaunchContext:
    """What a launch needs from the machine: environment, interpreter, temporary directory, clocks, output."""

    environ: Mapping[str, str]
    python: str
    directory: Path
    clock: Callable[[], float]
    now_s: Callable[[], float]
    say: Say
    stdout: IO[str] | None = None


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended, and how many jobs it took."""

    report: ExitReport
    jobs: int


def launch(options: LaunchOptions, context: LaunchContext) -> LaunchResult:
    """Run jobs until one is not restarted.

    Raises:
        TorchMissing: several processes need torch, which is not installed.
    """
    torchrun_options = _torchrun_options(options)
    policy = _policy(options, context.environ)
    waited = hold_signals()
    processes.adopt_orphans()
    attempts: tuple[Attempt, ...] = ()
    run = options.run
    while True:
        path = context.directory / f"outcome-{len(attempts)}.json"
        before = last_job(run)
        launched = start_clock.launched_now(is_restart=bool(attempts))
        job = _start(options, context, path, torchrun_options, waited, launched)
        ended = job.wait()
        outcome = _outcome(path, context, run, before)
        run = Path(outcome.run) if outcome and outcome.run else run
        report = exit_report(ended, outcome, stopped_exit_code=options.stopped_exit_code)
        attempts += (_attempt(ended, report.exit_code, outcome, run, path),)
        following = decide(attempts, policy)
        if isinstance(following, NoRestart):
            return LaunchResult(_with_reason(report, following.reason), len(attempts))
        job.end_leftovers()
        if not _waited_out(following, report, context, waited, _count(len(attempts), policy.max_restarts)):
            return LaunchResult(_with_reason(report, "stopped by a signal before the restart"), len(attempts))


def _policy(options: LaunchOptions, environ: Mapping[str, str]) -> RestartPolicy:
    most = options.max_restarts
    if options.shape.rendezvous is not None:
        # With a rendezvous torchrun itself does the restarts.
        most = None if options.until_done else 0
    return RestartPolicy(most, options.restart_delay_s, options.until_done, _ALLOCATION in environ)


def _attempt(ended: JobExit, code: int, outcome: JobOutcome | None, run: Path | None, path: Path) -> Attempt:
    return Attempt(
        code,
        outcome,
        was_asked=ended.asked_by is not None or ended.was_interrupted_twice,
        resumable_step=resumable_step(run),
        is_run_known=run is not None,
        reached=job_files.last_step(job_files.steps_path(path)),
        stopped_by=stop_kind(run) if outcome is not None and outcome.status == "stopped" else None,
    )


def _count(restart: int, most: int | None) -> str:
    return f"{restart}" if most is None else f"{restart} of {most}"


def _torchrun_options(options: LaunchOptions) -> list[str]:
    if not options.shape.needs_torchrun:
        return []
    return torchrun.stopping_options(torchrun.launcher_text(), options.shutdown_timeout_s)


def _start(
    options: LaunchOptions,
    context: LaunchContext,
    path: Path,
    torchrun_options: list[str],
    waited: frozenset[signal.Signals],
    launched: Mapping[str, str],
) -> SupervisedJob:
    environment = environment_of(
        {**context.environ, **launched, **options.target.environment},
        options.shape,
        outcome_path=path,
        shutdown_timeout_s=options.shutdown_timeout_s,
        free_port=_free_port(),
    )
    command = command_of(
        options.target,
        options.shape,
        python=context.python,
        torchrun_options=torchrun_options,
        torchrun_restarts=NO_PROGRESS_RESTARTS if options.max_restarts is None else options.max_restarts,
    )
    return SupervisedJob(
        processes.start(command, environment, stdout=context.stdout),
        options.shape.needs_torchrun,
        waited,
        options.shutdown_timeout_s,
        context.clock,
        context.say,
        others_continue=options.shape.nodes.least < options.shape.nodes.most,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _outcome(path: Path, context: LaunchContext, run: Path | None, before: int | None) -> JobOutcome | None:
    reported = _reported(path, context.say)
    if reported is not None and reported.has_ended:
        return reported
    return recorded_outcome(run, after_job=before, now_s=context.now_s(), process_of=process_of) or reported


def _reported(path: Path, say: Say) -> JobOutcome | None:
    try:
        return job_files.read_job_outcome(path)
    except (RecordDamaged, StorageFailed) as refusal:
        said = refusal.complaint if isinstance(refusal, RecordDamaged) else refusal.headline()
        say(f"ignoring the outcome file of the job: {said}")
        return None


def _with_reason(report: ExitReport, reason: str | None) -> ExitReport:
    return replace(report, line=f"{report.line}; {reason}") if reason else report


def _waited_out(
    restart: Restart, report: ExitReport, context: LaunchContext, waited: frozenset[signal.Signals], count: str
) -> bool:
    """Whether the delay before a restart passed without a signal."""
    context.say(f"{report.line} (exit code {report.exit_code}); restart {count} in {restart.delay_s:g} s")
    end_s = context.clock() + restart.delay_s
    while (left_s := end_s - context.clock()) > 0:
        number = next_signal(waited, left_s)
        if number is not None and number != signal.SIGCHLD:
            return False
    return True
