"""How a job ended: status, exit code, and what to do next.

``conclude`` is the table, a pure function of what ended the loop. The outcome is written twice, into the journal and
into ``.run_state.json``, before a job releases its run. A job that wrote none and is gone has crashed.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from unbroken.errors import PeerLost, RankFailed, RankRaised, StorageFailed, UnbrokenError
from unbroken.files import LOCAL, Files
from unbroken.records.journal import Event, History, Journal, read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Lease, ProcessOf, read_current
from unbroken.records.snapshot import RunState, read_run_state
from unbroken.records.stop import StopReason

Status = Literal["running", "stopped", "completed", "halted", "error", "crashed"]
Verdict = Literal["done", "again", "look", "held"]

EXIT_BUG: Final = 1
EXIT_USAGE: Final = 2
EXIT_DATA: Final = 4
EXIT_NOT_EXACT: Final = 6
EXIT_HELD: Final = 7
EXIT_STORAGE: Final = 74
EXIT_KILLED: Final = 128
_EXIT_CODES: Final = 256
EXIT_INTERRUPTED: Final = EXIT_KILLED + signal.SIGINT

# What a status lets an orchestrator do: start the same command again, or wait for the user.
_VERDICTS: Final[dict[Status, Verdict]] = {
    "running": "held",
    "stopped": "again",
    "completed": "done",
    "halted": "look",
    "error": "look",
    "crashed": "again",
}
# The user decides about these; the job itself did nothing wrong.
_HALTING: Final = frozenset({EXIT_DATA, EXIT_NOT_EXACT})


@dataclass(frozen=True)
class Outcome:
    """How a job ended, or that it runs; ``verdict`` is what to do: ``done``, ``again``, ``look``, ``held``."""

    status: Status
    exit_code: int
    verdict: Verdict
    reason: str = ""
    step: int | None = None
    job: int | None = None


def conclude(
    ending: StopReason | BaseException,
    *,
    step: int | None = None,
    job: int | None = None,
    stopped_exit_code: int = 0,
) -> Outcome:
    """The table: from what ended the loop, a reason of its own or an error, to status, exit code and verdict.

    ``stopped_exit_code`` is the code of a clean stop before the target, for launchers that start again by exit code.
    """
    if isinstance(ending, StopReason):
        status: Status = "completed" if ending.kind == "done" else "stopped"
        code = 0 if ending.kind == "done" else stopped_exit_code
        return Outcome(status, code, _VERDICTS[status], ending.sentence(), step, job)
    if isinstance(ending, KeyboardInterrupt):
        return Outcome("stopped", EXIT_INTERRUPTED, "again", "interrupted by Ctrl-C", step, job)
    if isinstance(ending, SystemExit):
        return _by_itself(ending, step, job, stopped_exit_code)
    if isinstance(ending, RankRaised):
        # As the rank that failed first concluded; that this one lost its connection is only how it shows here.
        status, verdict = cast("Status", ending.status), cast("Verdict", ending.verdict)
        return Outcome(status, ending.exit_code, verdict, _in_words(ending), step, job)
    cause = ending.cause if isinstance(ending, RankFailed) else ending
    code = cause.exit_code if isinstance(cause, UnbrokenError) else EXIT_BUG
    status = "halted" if code in _HALTING else "error"
    # A rank that lost a peer did nothing wrong, and the last commit is intact: the same command resumes.
    verdict = "again" if isinstance(cause, PeerLost) else _verdict(status, code)
    return Outcome(status, code, verdict, _in_words(ending), step, job)


def _verdict(status: Status, code: int) -> Verdict:
    # The last commit is intact and storage comes back: nobody need look before it is tried again.
    if code == EXIT_STORAGE:
        return "again"
    return "held" if code == EXIT_HELD else _VERDICTS[status]


def _by_itself(ending: SystemExit, step: int | None, job: int | None, stopped_exit_code: int) -> Outcome:
    code = ending.code
    if code is None or code == 0:
        return Outcome("stopped", stopped_exit_code, "again", "the script ended it", step, job)
    number = code if isinstance(code, int) else EXIT_BUG
    # As the system reports it: one byte.
    return Outcome("error", number & 0xFF or EXIT_BUG, "look", f"the script ended itself with {code}", step, job)


def _in_words(ending: BaseException) -> str:
    if isinstance(ending, UnbrokenError):
        return f"{ending.kind}: {ending.message}"
    said = " ".join(str(ending).split())
    return f"{type(ending).__name__}: {said}" if said else type(ending).__name__


def killed(signal_number: int = signal.SIGKILL, *, step: int | None = None, job: int | None = None) -> Outcome:
    """The outcome of a job that ended without one; where nobody saw which signal it was, SIGKILL leaves such a job."""
    try:
        name = signal.Signals(signal_number).name
    except ValueError:
        name = f"signal {signal_number}"
    reason = f"it was killed ({name}) or lost its machine; it wrote no outcome"
    return Outcome("crashed", EXIT_KILLED + signal_number, "again", reason, step, job)


def record_outcome(outcome: Outcome, journal: Journal, write_state: Callable[[Outcome], None]) -> None:
    """Make an outcome durable, in the journal and in the live snapshot; each is tried though the other be refused.

    Raises:
        StorageFailed: one of the two could not be written.
    """
    refused: StorageFailed | None = None
    try:
        # A keyword of Python.
        named_class: dict[str, Any] = {"class": outcome.verdict}
        # crash here: no outcome is recorded, and the job reads as crashed, which it is.
        journal.write(
            "job-end",
            status=outcome.status,
            exit_code=outcome.exit_code,
            reason=outcome.reason,
            step=outcome.step,
            **named_class,
        )
    except StorageFailed as refusal:
        refused = refusal
    # crash here: the journal has the outcome and the snapshot an older one; readers ask the journal first.
    write_state(outcome)
    if refused is not None:
        raise refused


def read_outcome(
    layout: Layout, *, now_s: float, process_of: ProcessOf | None = None, files: Files = LOCAL
) -> Outcome | None:
    """How the last job of a run ended, or that it seems to run, at once; None where no job ever ran.

    Raises:
        StorageFailed: an I/O error.
    """
    return judge_outcome(
        layout, is_live=lambda lease: lease.seems_live(now_s=now_s, process_of=process_of), files=files
    )


def judge_outcome(layout: Layout, *, is_live: Callable[[Lease], bool], files: Files = LOCAL) -> Outcome | None:
    """The same, with a judge of one's own, who is asked only about a lease whose job wrote no outcome.

    Raises:
        StorageFailed: an I/O error.
    """
    lease = read_current(layout.run, files)
    history, state = read_history(layout, files), read_run_state(layout, files)
    is_open = lease is not None and not lease.is_released and history.last("job-end", job=lease.number) is None
    return derive(lease, history, state, is_live=is_open and lease is not None and is_live(lease))


def derive(lease: Lease | None, history: History, state: RunState | None, *, is_live: bool) -> Outcome | None:
    """The outcome from the three records of a run: the lease says who, the journal how, the snapshot the rest."""
    job = lease.number if lease is not None else max(history.jobs, default=None)
    step = state.step if state is not None else None
    said = history.last("job-end", job=job) if job is not None else None
    if said is not None and (outcome := _decoded(said)) is not None:
        return outcome
    if is_live:
        return Outcome("running", EXIT_HELD, "held", lease.describe() if lease else "", step, job)
    outcome = _from_state(state, job)
    if outcome is not None:
        return outcome
    # Who lets a run go in order and never said a word has not trained: a command that held it for a moment.
    has_trained = job in history.jobs or (state is not None and state.status is not None)
    return killed(step=step, job=job) if has_trained or (lease is not None and not lease.is_released) else None


def _from_state(state: RunState | None, job: int | None) -> Outcome | None:
    if state is None or state.status is None or state.status == "running":
        return None
    # A snapshot of an earlier job says nothing of this one; one without a number is of a tool that has no jobs.
    if state.job is not None and job is not None and state.job != job:
        return None
    fallback: dict[str, Status] = {
        "completed": "completed",
        "stopped": "stopped",
        "halted": "halted",
        "error": "error",
    }
    status = fallback[state.status]
    codes: dict[Status, int] = {"completed": 0, "stopped": 0, "halted": EXIT_DATA, "error": EXIT_BUG}
    is_code = state.exit_code is not None and state.exit_code < _EXIT_CODES
    code = state.exit_code if is_code and state.exit_code is not None else codes[status]
    return Outcome(
        status, code, _verdict(status, code), state.error or "", state.step, state.job if job is None else job
    )


def _decoded(event: Event) -> Outcome | None:
    status: Any = event.text("status")
    code = event.whole("exit_code")
    verdict: Any = event.text("class")
    if status not in _VERDICTS or code is None or code >= _EXIT_CODES or verdict not in _VERDICTS.values():
        return None
    return Outcome(status, code, verdict, event.text("reason") or "", event.whole("step"), event.job)


def with_exit_code(outcome: Outcome, stopped_exit_code: int) -> Outcome:
    """The same outcome for a launcher that wants another code for a clean stop."""
    if outcome.status == "stopped" and outcome.exit_code == 0:
        return replace(outcome, exit_code=stopped_exit_code)
    return outcome
