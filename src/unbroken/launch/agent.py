"""``python -m unbroken.launch.agent``: torchrun that ends in one line and in the exit code of the rank that failed.

torchrun itself ends in a traceback of its own functions and in 1, whatever its workers died of. This module runs the
same program in its own process, so that signals, workers and rendezvous are torchrun's, and words its end. Tracebacks
of the ranks are theirs and stay as they are. torch is loaded by name, in this process and never in the launcher.
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
from unbroken.launch.verdict import SIGNALLED, signal_name
from unbroken.quoting.terminal import printable

MODULE: Final = "unbroken.launch.agent"
# In the store of torch.distributed: the rank that was killed on another node than the first one.
KILLED: Final = "unbroken/killed"
_ERRORS: Final = "torch.distributed.elastic.multiprocessing.errors"
_SIGNALS: Final = "torch.distributed.elastic.multiprocessing.api"
_MEETING: Final = "torch.distributed.elastic.rendezvous.api"
_CPP_LOG: Final = "TORCH_CPP_LOG_LEVEL"
# torchrun notes failures by the second; what it ends itself, after its time to shut down, comes later.
_AT_ONCE_S: Final = 1
# The store goes with the first node's agent, which may have ended too.
_TELLING_S: Final = 5


@dataclass(frozen=True)
class Failure:
    """One rank that ended badly; ``code`` is negative for a signal, ``at_s`` when torchrun noticed."""

    rank: int
    code: int
    at_s: int

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it that torchrun did not send."""
        return self.code < 0 and self.code != -signal.SIGTERM

    def in_words(self) -> str:
        """How it ended."""
        if self.code < 0:
            return f"rank {self.rank} was ended by {signal_name(-self.code)}"
        return f"rank {self.rank} ended with exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """As a shell tells it."""
        return SIGNALLED - self.code if self.code < 0 else self.code


def first_of(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from.

    A rank that is killed makes its peers fail with errors of their own, which may be noticed in the same instant; and
    torchrun ends those that are left by SIGTERM. So a signal that torchrun did not send explains most, SIGTERM least.
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
        # It says of each rank what is said below in one line. Where torchrun restarts by itself these lines are all
        # that tells of it, and stay.
        logging.getLogger(_SIGNALS).setLevel(logging.CRITICAL)
    try:
        program.main(list(arguments))
    except failed as ended:
        first = first_of(_failures(ended))
        _tell_other_nodes(first, program.get_args_parser().parse_args(list(arguments)))
        return _told_failure(first, environ)
    except signalled as ended:
        number = signal.Signals(int(ended.sigval))
        _say(f"torchrun was ended by {number.name}")
        return SIGNALLED + number
    except (unmet, unreachable) as ended:
        said = str(ended).strip().splitlines() or [type(ended).__name__]
        _say(f"the nodes did not meet, or lost each other: {said[0]}")
        return 1
    return 0


def _torchrun(environ: MutableMapping[str, str]) -> Any:  # noqa: ANN401 -- a module, loaded by name
    """The module of torchrun; its C++ half is not to trace every store that closes before another."""
    if _CPP_LOG in environ:
        return importlib.import_module(torchrun.MODULE)
    environ[_CPP_LOG] = "ERROR"
    program = importlib.import_module(torchrun.MODULE)
    # It is read when torch is loaded; the ranks keep their own.
    del environ[_CPP_LOG]
    return program


def _failures(ended: Any) -> list[Failure]:  # noqa: ANN401 -- torchrun's own error, loaded by name
    return [Failure(int(rank), int(each.exitcode), int(each.timestamp)) for rank, each in ended.failures.items()]


def _tell_other_nodes(failure: Failure, asked: Any) -> None:  # noqa: ANN401 -- torchrun's own arguments
    """Tell the ranks of other nodes who was killed here: they see a closed connection, and none of our processes."""
    if not failure.is_killed or asked.rdzv_endpoint or int(asked.node_rank) == 0:
        return
    connect: Any = importlib.import_module("torch.distributed").TCPStore
    timeout = datetime.timedelta(seconds=_TELLING_S)
    # Where the store has gone with the first node, nobody is left to tell.
    with contextlib.suppress(RuntimeError):
        connect(asked.master_addr, asked.master_port, timeout=timeout).compare_set(KILLED, "", str(failure.rank))


def _told_failure(failure: Failure, environ: Mapping[str, str]) -> int:
    # Where the run itself told why it ended, a rank's exit code adds nothing; a signal is what the run cannot know.
    place = environ.get(job_files.ENVIRONMENT)
    has_told = place is not None and _completed_by(failure, Path(place))
    if failure.code < 0 or not has_told:
        _say(failure.in_words())
    return failure.exit_code


def _completed_by(failure: Failure, place: Path) -> bool:
    """Whether the run told how it ended; where it lost a rank to a signal, the signal is added to its words."""
    try:
        told = job_files.read_outcome(place)
        if told is None or not told.has_ended:
            return False
        is_loss = told.status == "error" and told.outcome_class == "again"
        if is_loss and failure.is_killed:
            job_files.write_outcome(place, replace(told, reason=f"{told.reason}; {failure.in_words()}"))
    except UnbrokenError:
        return False
    return True


def _say(message: str) -> None:
    sys.stderr.write(f"unbroken: {printable(message)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
