"""One launch from its first job to its exit code: start, watch, read the outcome, start again where that helps."""

import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.launch import outcome_file, processes, torchrun
from unbroken.launch.command import Shape, Target, command_of, environment_of
from unbroken.launch.outcome_file import JobOutcome
from unbroken.launch.records import last_job, recorded_outcome, resumable_step
from unbroken.launch.restarts import Again, Attempt, Enough, decide
from unbroken.launch.supervise import Say, Watch, hold_signals, next_signal
from unbroken.launch.verdict import Verdict, judge
from unbroken.run.process import process_of

SHUTDOWN_TIMEOUT_S: Final = 600
RESTART_DELAY_S: Final = 1.0


@dataclass(frozen=True)
class Orders:
    """What one launch was asked to do."""

    target: Target
    shape: Shape = Shape()
    shutdown_timeout_s: int = SHUTDOWN_TIMEOUT_S
    stopped_exit_code: int = 0
    max_restarts: int = 0
    restart_delay_s: float = RESTART_DELAY_S
    run: Path | None = None


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
        verdict = judge(
            ended,
            outcome,
            through_torchrun=orders.shape.needs_torchrun,
            stopped_exit_code=orders.stopped_exit_code,
        )
        was_asked = ended.asked_by is not None or ended.was_interrupted_twice
        attempts += (Attempt(verdict.exit_code, outcome, was_asked, resumable_step(run), run is not None),)
        following = decide(attempts, max_restarts=orders.max_restarts, first_delay_s=orders.restart_delay_s)
        if isinstance(following, Enough):
            return Launched(_with_reason(verdict, following.reason), len(attempts))
        watch.end_leftovers()
        if not _waited_out(following, verdict, around, waited, f"{len(attempts)} of {orders.max_restarts}"):
            return Launched(_with_reason(verdict, "asked to stop before the next restart"), len(attempts))


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
    command = command_of(orders.target, orders.shape, python=around.python, torchrun_options=options)
    return Watch(
        processes.start(command, environment, stdout=around.stdout),
        orders.shape.needs_torchrun,
        waited,
        orders.shutdown_timeout_s,
        around.clock,
        around.say,
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
        return outcome_file.read(path)
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
