"""One launch from its first job to its exit code: start, watch, read the outcome, start again where that helps."""

import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.launch import job_files, processes, torchrun
from unbroken.launch.command import Shape, Target, command_of, environment_of
from unbroken.launch.job_files import JobOutcome
from unbroken.launch.last_job import last_job, recorded_outcome, resumable_step, stop_kind
from unbroken.launch.restarts import NO_PROGRESS_RESTARTS, Again, Attempt, Enough, Policy, decide
from unbroken.launch.supervise import Say, Watch, hold_signals, next_signal
from unbroken.launch.verdict import Ended, Verdict, judge
from unbroken.records.process import process_of

SHUTDOWN_TIMEOUT_S: Final = 600
RESTART_DELAY_S: Final = 1.0
_ALLOCATION: Final = "SLURM_JOB_ID"


@dataclass(frozen=True)
class Orders:
    """What one launch was asked to do; ``max_restarts`` is None for as many as bring the run further."""

    target: Target
    shape: Shape = Shape()
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S
    stopped_exit_code: int = 0
    max_restarts: int | None = 0
    restart_delay_s: float = RESTART_DELAY_S
    run: Path | None = None
    until_done: bool = False


@dataclass(frozen=True)
class Surroundings:
    """What a launch takes from the machine: environment, interpreter, a directory of its own, clocks, voice."""

    environ: Mapping[str, str]
    python: str
    place: Path
    clock: Callable[[], float]
    now_s: Callable[[], float]
    say: Say
    stdout: IO[str] | None = None


@dataclass(frozen=True)
class Launched:
    """How a launch ended, and how many jobs it took."""

    verdict: Verdict
    jobs: int


def launch(orders: Orders, around: Surroundings) -> Launched:
    """Run jobs until one needs no successor here.

    Raises:
        TorchMissing: several processes were asked for and there is no torch.
    """
    options = _torchrun_options(orders)
    policy = _policy(orders, around.environ)
    waited = hold_signals()
    processes.adopt_orphans()
    attempts: tuple[Attempt, ...] = ()
    run = orders.run
    while True:
        path = around.place / f"outcome-{len(attempts)}.json"
        before = last_job(run)
        watch = _started(orders, around, path, options, waited)
        ended = watch.until_end()
        outcome = _outcome(path, around, run, before)
        run = Path(outcome.run) if outcome else run
        verdict = judge(ended, outcome, stopped_exit_code=orders.stopped_exit_code)
        attempts += (_attempt(ended, verdict.exit_code, outcome, run, path),)
        following = decide(attempts, policy)
        if isinstance(following, Enough):
            return Launched(_with_reason(verdict, following.reason), len(attempts))
        watch.end_leftovers()
        if not _waited_out(following, verdict, around, waited, _count(len(attempts), policy.max_restarts)):
            return Launched(_with_reason(verdict, "asked to stop before the next restart"), len(attempts))


def _policy(orders: Orders, environ: Mapping[str, str]) -> Policy:
    most = orders.max_restarts
    if orders.shape.meeting is not None:
        # The restarts asked for are those of torchrun, whose agents meet again after each.
        most = None if orders.until_done else 0
    return Policy(most, orders.restart_delay_s, orders.until_done, _ALLOCATION in environ)


def _attempt(ended: Ended, code: int, outcome: JobOutcome | None, run: Path | None, path: Path) -> Attempt:
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


def _torchrun_options(orders: Orders) -> list[str]:
    if not orders.shape.needs_torchrun:
        return []
    return torchrun.stopping_options(torchrun.launcher_text(), orders.shutdown_timeout_s)


def _started(
    orders: Orders, around: Surroundings, path: Path, options: list[str], waited: frozenset[signal.Signals]
) -> Watch:
    environment = environment_of(
        around.environ,
        orders.shape,
        outcome_path=path,
        shutdown_timeout_s=orders.shutdown_timeout_s,
        free_port=_free_port(),
    )
    command = command_of(
        orders.target,
        orders.shape,
        python=around.python,
        torchrun_options=options,
        torchrun_restarts=NO_PROGRESS_RESTARTS if orders.max_restarts is None else orders.max_restarts,
    )
    return Watch(
        processes.start(command, environment, stdout=around.stdout),
        orders.shape.needs_torchrun,
        waited,
        orders.shutdown_timeout_s,
        around.clock,
        around.say,
        goes_on_elsewhere=orders.shape.nodes.least < orders.shape.nodes.most,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _outcome(path: Path, around: Surroundings, run: Path | None, before: int | None) -> JobOutcome | None:
    told = _told(path, around.say)
    if told is not None and told.has_ended:
        return told
    return recorded_outcome(run, after_job=before, now_s=around.now_s(), process_of=process_of) or told


def _told(path: Path, say: Say) -> JobOutcome | None:
    try:
        return job_files.read_outcome(path)
    except (RecordDamaged, StorageFailed) as refusal:
        say(f"what the job told of its outcome cannot be used: {refusal.headline()}")
        return None


def _with_reason(verdict: Verdict, reason: str | None) -> Verdict:
    return replace(verdict, line=f"{verdict.line}; {reason}") if reason else verdict


def _waited_out(
    again: Again, verdict: Verdict, around: Surroundings, waited: frozenset[signal.Signals], count: str
) -> bool:
    """Whether the time until a restart passed without a signal."""
    around.say(f"{verdict.line} (exit code {verdict.exit_code}); restart {count} in {again.delay_s:g} s")
    end_s = around.clock() + again.delay_s
    while (left_s := end_s - around.clock()) > 0:
        number = next_signal(waited, left_s)
        if number is not None and number != signal.SIGCHLD:
            return False
    return True
