"""The exit code of a launch and the line that explains it: a pure function of how the job ended and its outcome."""

import signal
from dataclasses import dataclass
from typing import Final

from unbroken.launch.job_files import JobOutcome

EXIT_INTERRUPTED: Final = 130
SIGNALLED: Final = 128


@dataclass(frozen=True)
class JobExit:
    """How the processes of a job ended: the return code of the child, negative for a signal, and why."""

    returncode: int
    asked_by: signal.Signals | None = None
    was_interrupted_twice: bool = False
    ran_out_of_time: bool = False


@dataclass(frozen=True)
class ExitReport:
    """Exit code and last line of a launch; status and class are None if the job reported no outcome."""

    exit_code: int
    line: str
    status: str | None = None
    outcome_class: str | None = None
    run: str | None = None


def exit_report(ended: JobExit, outcome: JobOutcome | None, *, stopped_exit_code: int) -> ExitReport:
    """Decided by the outcome of the job, without one by the exit code of its processes."""
    run = (outcome.run or None) if outcome else None
    if ended.was_interrupted_twice:
        return ExitReport(EXIT_INTERRUPTED, "interrupted twice: killed; the last checkpoint is intact", run=run)
    if outcome is None or not outcome.has_ended:
        code, how = _by_processes(ended.returncode)
        if ended.ran_out_of_time:
            how += " after the shutdown timeout"
        where = "" if outcome is None else " after it opened its run"
        return ExitReport(code, f"the job {how}{where} and reported no outcome", run=run)
    is_stopped = outcome.status == "stopped" and outcome.exit_code == 0
    code = stopped_exit_code if is_stopped else outcome.exit_code
    line = f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status
    if outcome.status == "completed" and ended.returncode != 0:
        # The run is complete, whatever the script did afterwards; but a failure there is not hidden.
        line += f"; but the script failed afterwards: {_way(ended.returncode)}"
    return ExitReport(code, line, outcome.status, outcome.outcome_class, run)


def _way(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)


def _by_processes(code: int) -> tuple[int, str]:
    if code < 0:
        return SIGNALLED - code, f"was killed by {signal_name(-code)}"
    if code - SIGNALLED in signal.valid_signals():
        # The convention of shells and of our torchrun agent: a process below was killed.
        return code, f"was killed by {signal_name(code - SIGNALLED)}"
    return code, "exited"


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; ``signal N`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
