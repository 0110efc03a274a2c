"""The launcher's exit code and the one line that explains it: a pure function of how a job ended and what it told."""

import signal
from dataclasses import dataclass
from typing import Final

from unbroken.launch.job_files import JobOutcome

EXIT_INTERRUPTED: Final = 130
SIGNALLED: Final = 128


@dataclass(frozen=True)
class JobExit:
    """How the processes of a job ended: the child's return code, negative for a signal, and what led to it."""

    returncode: int
    asked_by: signal.Signals | None = None
    was_interrupted_twice: bool = False
    ran_out_of_time: bool = False


@dataclass(frozen=True)
class ExitReport:
    """What the launcher says and exits with; status and class are None where the job told nothing."""

    exit_code: int
    line: str
    status: str | None = None
    outcome_class: str | None = None
    run: str | None = None


def exit_report(ended: JobExit, outcome: JobOutcome | None, *, stopped_exit_code: int) -> ExitReport:
    """The durable outcome decides; without one, the code of the process itself."""
    run = outcome.run if outcome else None
    if ended.was_interrupted_twice:
        return ExitReport(EXIT_INTERRUPTED, "interrupted twice: left at once; the last commit stands", run=run)
    if outcome is None or not outcome.has_ended:
        code, how = _by_processes(ended.returncode)
        if ended.ran_out_of_time:
            how += " after its time to save was over"
        told = "told no outcome" if outcome is None else "began its run and told no outcome"
        return ExitReport(code, f"the job {told}; {how}", run=run)
    is_stopped = outcome.status == "stopped" and outcome.exit_code == 0
    code = stopped_exit_code if is_stopped else outcome.exit_code
    line = f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status
    if outcome.status == "completed" and ended.returncode != 0:
        # The run is whole, whatever broke in what the script did with it; but that is not hidden.
        line += f"; what came after it ended badly: {_way(ended.returncode)}"
    return ExitReport(code, line, outcome.status, outcome.outcome_class, run)


def _way(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else signal_name(-returncode)


def _by_processes(code: int) -> tuple[int, str]:
    if code < 0:
        return SIGNALLED - code, f"{signal_name(-code)} ended it"
    if code - SIGNALLED in signal.valid_signals():
        # As a shell tells it, and torchrun's agent: what ended one of the processes below.
        return code, f"{signal_name(code - SIGNALLED)} ended it"
    return code, "its own exit code stands"


def signal_name(number: int) -> str:
    """``SIGTERM`` for 15; a number the system has no name for stays one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
