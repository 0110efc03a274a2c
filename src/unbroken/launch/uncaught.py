"""An exception that ends a script before it opens its run, reported to the launcher.

Inside a run the run reports how it ended, and an exception of the script is not restarted: the next job would raise it
again. Before the run is open nobody reports, and the launcher sees only exit code 1, as of a crash. ``import unbroken``
in a job of a launcher closes that gap for what another start cannot mend: our own errors and mistakes in the script.
"""

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Final

from unbroken.errors import UnbrokenError
from unbroken.launch import job_files
from unbroken.quoting.terminal import for_terminal
from unbroken.records.outcome import conclude

# What the machine, its network or a library may do once and not again: these stay a crash, which is restarted.
_MAY_PASS: Final = (OSError, RuntimeError, MemoryError, EOFError)


def report_uncaught() -> None:
    """From now on, report the exception that ends this process, if no run has reported anything by then."""
    before = sys.excepthook

    def report_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _report(error)
        before(kind, error, trace)

    sys.excepthook = report_and_show


def _report(error: BaseException) -> None:
    place = os.environ.get(job_files.ENVIRONMENT)
    is_final = isinstance(error, UnbrokenError) or (isinstance(error, Exception) and not isinstance(error, _MAY_PASS))
    # A run that was opened reports its end itself, and knows more; so does the rank that failed first.
    if not place or not is_final or Path(place).exists():
        return
    ended = conclude(error)
    outcome = job_files.JobOutcome("", ended.status, ended.exit_code, ended.verdict, ended.reason)
    try:
        job_files.write_outcome(Path(place), outcome)
    except UnbrokenError as refused:
        sys.stderr.write(for_terminal(f"unbroken: could not write the launcher's file: {refused.headline()}\n"))
