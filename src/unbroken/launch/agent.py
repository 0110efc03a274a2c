"""``python -m unbroken.launch.agent``: torchrun, but with the exit code of the rank that failed first, and one line.

torchrun itself exits with 1 and a traceback of its own functions, whatever its workers died of. This module runs it
unchanged (signals, workers, rendezvous) and replaces only how it ends; tracebacks of the ranks are kept. torch is
imported by name, in this process and never in the launcher.
"""

import contextlib
import datetime
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from unbroken.errors import UnbrokenError
from unbroken.launch import job_files, torchrun
from unbroken.launch.exit_code import SIGNALLED, signal_name
from unbroken.quoting.terminal import printable

MODULE: Final = "unbroken.launch.agent"
# In the store of torch.distributed: the rank that was killed on another node than the first one.
KILLED: Final = "unbroken/killed"
_ERRORS: Final = "torch.distributed.elastic.multiprocessing.errors"
_SIGNALS: Final = "torch.distributed.elastic.multiprocessing.api"
_MEETING: Final = "torch.distributed.elastic.rendezvous.api"
_CPP_LOG: Final = "TORCH_CPP_LOG_LEVEL"
# torchrun notes the time of a failure in seconds; workers that it kills itself, after the shutdown timeout, come later.
_AT_ONCE_S: Final = 1
# The store goes with the first node's agent, which may have ended too.
_TELLING_S: Final = 5


@dataclass(frozen=True)
class Failure:
    """One rank that failed; ``code`` is negative for a signal, ``at_s`` is when torchrun noticed."""

    rank: int
    code: int
    at_s: int

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it that torchrun did not send."""
        return self.code < 0 and self.code != -signal.SIGTERM

    def in_words(self) -> str:
        """How it ended, as text."""
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.code)}"
        return f"rank {self.rank} exited with code {self.code}"

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 + N for a signal."""
        return SIGNALLED - self.code if self.code < 0 else self.code


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that caused the others.

    A rank that is killed makes its peers fail, which may be noticed in the same second, and torchrun ends the rest
    with SIGTERM. So a signal other than SIGTERM is the most likely cause, SIGTERM the least likely.
    """
    noticed = list(failures)
    began_s = min(each.at_s for each in noticed)
    return min((each for each in noticed if each.at_s <= began_s + _AT_ONCE_S), key=_follows_from_others)


def _follows_from_others(failure: Failure) -> int:
    if failure.code == -signal.SIGTERM:
        return 2
    return 0 if failure.code < 0 else 1


def main(arguments: Sequence[str], environ: MutableMapping[str, str]) -> int:
    """Run torchrun with these arguments; returns the exit code."""
    program = _torchrun(environ)
    failed: Any = importlib.import_module(_ERRORS).ChildFailedError
    signalled: Any = importlib.import_module(_SIGNALS).SignalException
    unmet: Any = importlib.import_module(_MEETING).RendezvousError
    unreachable: Any = importlib.import_module("torch").distributed.DistError
    if torchrun.ENDPOINT not in arguments:
        # It logs about each rank what is printed below in one line. With a rendezvous torchrun restarts by itself, and
        # its log is the only trace of that: then it stays.
        logging.getLogger(_SIGNALS).setLevel(logging.CRITICAL)
    try:
        program.main(list(arguments))
    except failed as ended:
        first = first_of(_failures(ended))
        _tell_other_nodes(first, program.get_args_parser().parse_args(list(arguments)))
        return _report_failure(first, environ)
    except signalled as ended:
        number = signal.Signals(int(ended.sigval))
        _say(f"torchrun was killed by {number.name}")
        return SIGNALLED + number
    except (unmet, unreachable) as ended:
        said = str(ended).strip().splitlines() or [type(ended).__name__]
        _say(f"rendezvous failed or was lost: {said[0]}")
        return 1
    return 0


def _torchrun(environ: MutableMapping[str, str]) -> Any:  # noqa: ANN401 -- a module, loaded by name
    """The module of torchrun, imported so that its C++ part does not log every store that closes early."""
    if _CPP_LOG in environ:
        return importlib.import_module(torchrun.MODULE)
    environ[_CPP_LOG] = "ERROR"
    program = importlib.import_module(torchrun.MODULE)
    # Read once, when torch is imported; the ranks must not inherit it.
    del environ[_CPP_LOG]
    return program


def _failures(ended: Any) -> list[Failure]:  # noqa: ANN401 -- torchrun's own error, loaded by name
    return [Failure(int(rank), int(each.exitcode), int(each.timestamp)) for rank, each in ended.failures.items()]


def _tell_other_nodes(failure: Failure, asked: Any) -> None:  # noqa: ANN401 -- torchrun's own arguments
    """Tell the ranks of other nodes which rank was killed here: they see only a closed connection."""
    if not failure.is_killed or asked.rdzv_endpoint or int(asked.node_rank) == 0:
        return
    connect: Any = importlib.import_module("torch.distributed").TCPStore
    timeout = datetime.timedelta(seconds=_TELLING_S)
    # The store is gone if the first node is gone; then no rank is left to tell.
    with contextlib.suppress(RuntimeError):
        connect(asked.master_addr, asked.master_port, timeout=timeout).compare_set(KILLED, "", str(failure.rank))


def _report_failure(failure: Failure, environ: Mapping[str, str]) -> int:
    # If the run reported why it ended, the exit code of a rank adds nothing; a signal does: the run cannot know it.
    path = environ.get(job_files.ENVIRONMENT)
    is_reported = path is not None and _add_signal(failure, Path(path))
    if failure.code < 0 or not is_reported:
        _say(failure.in_words())
    return failure.exit_code


def _add_signal(failure: Failure, path: Path) -> bool:
    """Whether the run reported its outcome; if it lost a rank to a signal, the signal is added to the reason."""
    try:
        outcome = job_files.read_job_outcome(path)
        if outcome is None or not outcome.has_ended:
            return False
        is_loss = outcome.status == "error" and outcome.outcome_class == "again"
        if is_loss and failure.is_killed:
            job_files.write_outcome(path, replace(outcome, reason=f"{outcome.reason}; {failure.in_words()}"))
    except UnbrokenError:
        return False
    return True


def _say(message: str) -> None:
    sys.stderr.write(f"unbroken: {printable(message)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # The ranks have ended. torchrun's handlers stay, and would raise at a signal that comes while Python ends.
        signal.signal(each, signal.SIG_IGN)
    sys.exit(code)
