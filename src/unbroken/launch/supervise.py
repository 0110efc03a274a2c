"""Watching over one job: signals are passed on, a save gets the time it needs, nothing is left behind.

Signals are held back and waited for in one place, so none comes between two lines of this module and none is lost
between the start of the launcher and the start of the job.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from unbroken.launch import processes
from unbroken.launch.exit_code import JobExit

PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_LOOK_S: Final = 1.0
_LEFTOVER_LOOK_S: Final = 0.1

Say = Callable[[str], None]


def hold_signals() -> frozenset[signal.Signals]:
    """Hold back the signals a launcher answers to; returns those to be waited for.

    One that the launcher was told to ignore stays ignored: ``nohup`` and a shell's background jobs mean it. They are
    never let through again: when the exit code is decided, a late signal must not replace it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answered = {each for each in PASSED_ON if signal.getsignal(each) is not signal.SIG_IGN}
    waited = frozenset({*answered, signal.SIGCHLD})
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    return waited


def next_signal(waited: frozenset[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """The next signal, or None when the time is over."""
    found = signal.sigtimedwait(waited, max(timeout_s, 0.0))
    return signal.Signals(found.si_signo) if found else None


@dataclass
class SupervisedJob:
    """One job under supervision."""

    child: "subprocess.Popen[str]"
    through_torchrun: bool
    waited: frozenset[signal.Signals]
    shutdown_timeout_s: float
    clock: Callable[[], float]
    say: Say
    others_continue: bool = False
    asked_by: signal.Signals | None = None
    interrupts: int = 0
    deadline_s: float | None = None
    ran_out_of_time: bool = False

    def wait(self) -> JobExit:
        """Wait for the job's end, passing signals on; afterwards no process of a job that ended badly is left."""
        while (code := self.child.poll()) is None:
            self._reap_orphans()
            number = next_signal(self.waited, self._patience_s())
            if number is not None and number != signal.SIGCHLD:
                self._answer(number)
            elif self.deadline_s is not None and self.clock() >= self.deadline_s:
                self._kill_late()
        if code != 0:
            self.end_leftovers()
        return JobExit(code, self.asked_by, self.interrupts > 1, self.ran_out_of_time)

    def _patience_s(self) -> float:
        return _LOOK_S if self.deadline_s is None else min(_LOOK_S, self.deadline_s - self.clock())

    def _answer(self, number: signal.Signals) -> None:
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            processes.kill_below(os.getpid())
            return
        if self.asked_by is None:
            self.asked_by = number
            self.deadline_s = self.clock() + self.shutdown_timeout_s
            self._say_passed_on(number)
        # A script that knows nothing of SIGHUP dies of it; a terminal that went away is a reason to stop cleanly.
        processes.send(self._receivers(), signal.SIGTERM if number == signal.SIGHUP else number)

    def _say_passed_on(self, number: signal.Signals) -> None:
        hint = "; once more leaves at once" if number == signal.SIGINT else ""
        self.say(
            f"{number.name} is passed on to the job, which has {self.shutdown_timeout_s:g} s to save and end{hint}"
        )

    def _receivers(self) -> list[int]:
        # Not torchrun, if it has workers: it would end by a traceback and the code 1 after the cleanest stop. Before it
        # has any, it is the one to end.
        workers = processes.workers_of(self.child.pid, processes.living()) if self.through_torchrun else []
        return workers or [self.child.pid]

    def _kill_late(self) -> None:
        self.ran_out_of_time = True
        self.deadline_s = None
        self.say(f"the job has not ended {self.shutdown_timeout_s:g} s after the signal and is killed")
        processes.kill_below(os.getpid())

    def end_leftovers(self) -> None:
        """End what a dead parent left behind: torchrun that was killed leaves its workers training.

        They get SIGTERM and the same time to save; one more interrupt ends them at once. Where the nodes that are left
        go on without this one, they are killed: asked to stop, they would agree with all other ranks to stop.
        """
        left = self._leftovers()
        if not left:
            return
        if self.others_continue and self.asked_by is None:
            self.say(f"what the job left behind is killed, so that the other nodes go on: {', '.join(map(str, left))}")
            processes.kill_below(os.getpid())
            self._reap_orphans()
            return
        self.say(f"SIGTERM is sent to what the job left behind: {', '.join(map(str, left))}")
        processes.send(left, signal.SIGTERM)
        end_s = self.clock() + self.shutdown_timeout_s
        while self.clock() < end_s and self._leftovers():
            if next_signal(self.waited, _LEFTOVER_LOOK_S) == signal.SIGINT:
                self.interrupts += 1
                break
        processes.kill_below(os.getpid())
        self._reap_orphans()

    def _leftovers(self) -> list[int]:
        return processes.below(os.getpid(), processes.living())

    def _reap_orphans(self) -> None:
        # Only those adopted: the child's own end is for ``poll`` to see.
        with contextlib.suppress(ChildProcessError):
            while (seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if seen.si_pid == self.child.pid:
                    return
                os.waitpid(seen.si_pid, 0)
