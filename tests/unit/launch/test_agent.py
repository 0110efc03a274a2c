"""torchrun's failures: which rank the others follow from, and what is said of it."""

import subprocess
import sys

import pytest

from unbroken.launch.agent import Failure, first_of


@pytest.mark.parametrize(
    ("noticed", "rank", "code", "words"),
    [
        ([Failure(0, -15, 7), Failure(1, 3, 7)], 1, 3, "rank 1 exited with code 3"),
        ([Failure(0, 1, 7), Failure(1, -9, 7), Failure(2, -15, 8)], 1, 137, "rank 1 was killed by SIGKILL"),
        ([Failure(0, 1, 7), Failure(1, -9, 600)], 0, 1, "rank 0 exited with code 1"),
        ([Failure(0, -15, 7), Failure(1, -15, 7)], 0, 143, "rank 0 was killed by SIGTERM"),
        ([Failure(2, 5, 7), Failure(0, 6, 7)], 2, 5, "rank 2 exited with code 5"),
    ],
)
def test_what_torchrun_did_itself_is_never_the_cause(noticed: list[Failure], rank: int, code: int, words: str) -> None:
    first = first_of(noticed)
    assert (first.rank, first.exit_code, first.in_words()) == (rank, code, words)


# An agent whose torchrun leaves its handlers behind, as the real one does, and is signalled while Python ends.
SIGNALLED_LATE = """
import atexit, importlib, os, runpy, signal, sys, types

class Late(Exception):
    pass

def handle(number, frame):
    raise Late

def run(arguments):
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(each, handle)
        atexit.register(os.kill, os.getpid(), each)

importlib.import_module = lambda name: types.SimpleNamespace(
    main=run, ChildFailedError=KeyError, SignalException=KeyError, RendezvousError=KeyError,
    distributed=types.SimpleNamespace(DistError=KeyError),
)
sys.argv = ["agent"]
runpy.run_module("unbroken.launch.agent", run_name="__main__")
"""


def test_a_signal_that_comes_while_the_agent_ends_leaves_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED_LATE], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
