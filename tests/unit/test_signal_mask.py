"""A test's signals are the same however the tests were started."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")
SHOW = f"""
import signal
print([name for name in {ASKED} if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN])
"""


def test_no_signal_is_ignored_or_blocked() -> None:
    assert [name for name in ASKED if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN] == []
    assert not {getattr(signal, name) for name in ASKED} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert subprocess.check_output([sys.executable, "-c", SHOW], text=True).strip() == "[]"


def _ignore_and_block() -> None:
    for name in ("SIGHUP", "SIGINT", "SIGQUIT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@pytest.mark.parametrize("workers", [("-p", "no:xdist"), ("-n", "1")], ids=["one process", "workers"])
def test_the_same_holds_under_nohup_in_the_background(workers: tuple[str, ...]) -> None:
    node = f"{Path(__file__).relative_to(ROOT)}::{test_no_signal_is_ignored_or_blocked.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, node]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=conftest.without_pytest(),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_ignore_and_block,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
