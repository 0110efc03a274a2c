"""Launchers in the background, and the scripts they are given."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.patience import PATIENCE_S
from unbroken.launch.processes import below, living

TOOL = [sys.executable, "-m", "unbroken"]

TELL = """
import os, sys, pathlib
from unbroken.launch.job_files import JobOutcome, write_outcome
def tell(status, code, kind, run="runs/a"):
    path = pathlib.Path(os.environ["UNBROKEN_OUTCOME_FILE"])
    write_outcome(path, JobOutcome(run, status, int(code), kind, "as told"))
"""

# Tells what it is given and ends by another code, as a worker below torchrun does.
TELLER = f"{TELL}\ntell(*sys.argv[1:4])\nsys.exit(1)\n"

# Says which signals came, ends cleanly after the first one; half a second is time for one that came twice.
LISTENER = f"""{TELL}
import signal, time
seen = []
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: seen.append(signal.Signals(number).name))
os.write(1, b"ready %d\\n" % os.getpid())
while not seen:
    time.sleep(0.02)
time.sleep(0.5)
tell("stopped", 0, "again")
pathlib.Path("seen").write_text(" ".join(seen))
"""

# Hears no signal but the one that cannot be missed, and has a child in a session of its own that does not either.
STUBBORN = """
import os, signal, subprocess, sys, time
for each in (signal.SIGTERM, signal.SIGINT):
    signal.signal(each, signal.SIG_IGN)
code = "import time; time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
os.write(1, b"ready %d %d\\n" % (os.getpid(), grandchild.pid))
time.sleep(600)
"""

# Two or more ranks that agree to stop as soon as one of them was signalled; rank 0 tells the outcome.
AGREEING = f"""{TELL}
import signal, time, torch, torch.distributed as dist
seen = []
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: seen.append(number))
dist.init_process_group("gloo")
dist.barrier()
os.write(1, b"ready %d %s\\n" % (os.getpid(), os.environb.get(b"OMP_NUM_THREADS", b"?")))
while True:
    flag = torch.tensor(len(seen))
    dist.all_reduce(flag)
    if flag.item():
        break
    time.sleep(0.02)
if dist.get_rank() == 0:
    # record
    tell("stopped", 0, "again")
dist.barrier()
os._exit(0)
"""


# What rank 0 leaves in the run's own records, in the place marked above.
RECORDING = """
    from unbroken.records.journal import Journal
    from unbroken.records.layout import Layout
    from unbroken.records.lease import acquire, release
    from unbroken.records.process import this_holder
    run = pathlib.Path("r")
    lease = acquire(run, this_holder(), token="t", now_s=time.time())
    journal = Journal(Layout(run), lease.number, clock=time.time)
    journal.write("job-end", status="stopped", exit_code=0, reason="as recorded", **{"class": "again"})
    release(run, lease, now_s=time.time())
"""

# The scripts say that they are ready in one write: unbuffered, a print of two ranks would mix.


class Launch:
    """A launcher in the background whose output can be waited for."""

    def __init__(self, folder: Path, command: str, *arguments: str | Path) -> None:
        self.folder = folder
        self.said = ""
        self.process = subprocess.Popen(
            [*TOOL, command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, "TMPDIR": str(folder)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def wait_for(self, text: str, times: int = 1) -> list[str]:
        """Read on until a text was said so many times; returns the lines that hold it."""
        assert self.process.stdout is not None
        until = time.monotonic() + PATIENCE_S
        while self.said.count(text) < times or not self.said.endswith("\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            assert piece, f"{text!r} was not said {times} times; said was:\n{self.said}"
            self.said += piece.decode()
        return [line for line in self.said.splitlines() if text in line]

    def ready(self, times: int = 1) -> list[int]:
        """The ids the scripts gave when they were ready."""
        return [int(word) for line in self.wait_for("ready", times) for word in line.split()[1:]]

    def end(self) -> int:
        """Wait for the launcher's end; returns its exit code."""
        rest, _ = self.process.communicate(timeout=PATIENCE_S)
        self.said += rest.decode()
        return self.process.returncode


Start = Callable[..., Launch]


@contextlib.contextmanager
def launching(folder: Path, command: str = "run") -> Iterator[Start]:
    """Start a launcher on a script's text; whatever it left is killed afterwards."""
    launches: list[Launch] = []

    def begin(text: str, *options: str) -> Launch:
        (folder / "script.py").write_text(text)
        launches.append(Launch(folder, command, *options, "--", "script.py"))
        return launches[-1]

    yield begin
    for launch in launches:
        if launch.process.poll() is None:
            for pid in [*below(launch.process.pid, living()), launch.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        launch.process.communicate()


def write_script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + PATIENCE_S
    while set(pids) & living().keys():
        assert time.monotonic() < until, f"still there: {set(pids) & living().keys()}"
        time.sleep(0.02)


OUTCOMES = [
    ("completed", 0, "done"),
    ("stopped", 0, "again"),
    ("error", 1, "look"),
    ("error", 2, "look"),
    ("error", 3, "look"),
    ("halted", 4, "look"),
    ("error", 5, "look"),
    ("error", 6, "look"),
    ("error", 7, "held"),
    ("halted", 8, "look"),
    ("error", 74, "again"),
]
