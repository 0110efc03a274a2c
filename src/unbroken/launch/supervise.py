"""Supervising one job: forward signals, give a save its time, leave no process behind.

Signals are blocked and waited for in one place, so none interrupts this module and none is lost between the start of
the launcher and the start of the job.
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
    """Block the signals that the launcher handles; returns the set to wait for.

    Signals that are ignored stay ignored, as ``nohup`` and background jobs of a shell need it. They are never
    unblocked: a signal after the exit code is decided must not change it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handled = {each for each in PASSED_ON if signal.getsignal(each) is not signal.SIG_IGN}
    waited = frozenset({*handled, signal.SIGCHLD})
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    return waited


def next_signal(waited: frozenset[signal.Signals], timeout_s: float) -> signal.Signals | None:
    """The next signal, or None after the timeout."""
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
        """Wait until the job has exited, forwarding signals; if it failed, end all processes it left behind."""
        while (code := self.child.poll()) is None:
            self._reap_orphans()
            number = next_signal(self.waited, self._timeout_s())
            if number is not None and number != signal.SIGCHLD:
                self._forward(number)
            elif self.deadline_s is not None and self.clock() >= self.deadline_s:
                self._kill_late()
        if code != 0:
            self.end_leftovers()
        return JobExit(code, self.asked_by, self.interrupts > 1, self.ran_out_of_time)

    def _timeout_s(self) -> float:
        return _LOOK_S if self.deadline_s is None else min(_LOOK_S, self.deadline_s - self.clock())

    def _forward(self, number: signal.Signals) -> None:
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            processes.kill_below(os.getpid())
            return
        if self.asked_by is None:
            self.asked_by = number
            self.deadline_s = self.clock() + self.shutdown_timeout_s
            self._say_forwarded(number)
        # A script without a handler dies of SIGHUP; a closed terminal is a reason to stop cleanly.
        processes.send(self._receivers(), signal.SIGTERM if number == signal.SIGHUP else number)

    def _say_forwarded(self, number: signal.Signals) -> None:
        hint = "; press Ctrl-C again to kill it" if number == signal.SIGINT else ""
        self.say(f"{number.name} forwarded to the job, which has {self.shutdown_timeout_s:g} s to save and exit{hint}")

    def _receivers(self) -> list[int]:
        # The workers and not torchrun, which would exit with a traceback and 1 even after a clean stop. Without workers
        # yet, torchrun itself.
        workers = processes.child_ranks(self.child.pid, processes.living()) if self.through_torchrun else []
        return workers or [self.child.pid]

    def _kill_late(self) -> None:
        self.ran_out_of_time = True
        self.deadline_s = None
        self.say(f"the job did not exit within {self.shutdown_timeout_s:g} s after the signal; killing it")
        processes.kill_below(os.getpid())

    def end_leftovers(self) -> None:
        """End leftover processes: if torchrun is killed, its workers keep training.

        They get SIGTERM and the same time to save; another Ctrl-C kills them. If the other nodes continue without this
        one (elastic), they are killed at once: after SIGTERM they would agree with all other ranks to stop.
        """
        left = self._leftovers()
        if not left:
            return
        if self.others_continue and self.asked_by is None:
            self.say(f"killing leftover processes so that the other nodes continue: {', '.join(map(str, left))}")
            processes.kill_below(os.getpid())
            self._reap_orphans()
            return
        self.say(f"sending SIGTERM to leftover processes: {', '.join(map(str, left))}")
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
        # Only adopted processes: the exit of the child itself is read by ``poll``.
        with contextlib.suppress(ChildProcessError):
            while (seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if seen.si_pid == self.child.pid:
                    return
                os.waitpid(seen.si_pid, 0)
