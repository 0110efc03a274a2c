"""``unbroken run`` with real processes: exit codes and signals, and nothing left behind."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Tool
from tests.e2e.launching import (
    LISTENER,
    OUTCOMES,
    STUBBORN,
    TELLER,
    TOOL,
    Start,
    launching,
    wait_until_gone,
    write_script,
)
from tests.patience import PATIENCE_S


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a launcher on a script's text."""
    with launching(tmp_path) as begin:
        yield begin


@pytest.mark.parametrize(("status", "code", "kind"), OUTCOMES)
def test_the_outcome_a_job_reported_is_the_exit_code(
    unbroken: Tool, tmp_path: Path, status: str, code: int, kind: str
) -> None:
    ended = unbroken("run", "--json", "--", write_script(tmp_path, TELLER), status, str(code), kind)
    assert (ended.returncode, ended.stderr) == (code, "")
    found = json.loads(ended.stdout)
    assert (found["status"], found["class"], found["exit_code"]) == (status, kind, code)
    assert "as told" in found["reason"], "the reason that the job gave"


def test_a_clean_stop_gets_the_code_that_was_requested(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, TELLER)
    for status, code, kind, wanted in (("stopped", 0, "again", 75), ("completed", 0, "done", 0)):
        ended = unbroken("run", "--stopped-exit-code", "75", "--", script, status, str(code), kind)
        assert ended.returncode == wanted


def test_with_json_standard_output_is_one_document_and_the_jobs_words_go_beside_it(
    unbroken: Tool, tmp_path: Path
) -> None:
    script = write_script(tmp_path, f"print('words of the job')\n{TELLER}")
    ended = unbroken("run", "--json", "--", script, "error", "6", "look")
    assert json.loads(ended.stdout) == {
        "schema": "unbroken.run/1",
        "class": "look",
        "exit_code": 6,
        "jobs": 1,
        "reason": "error: as told",
        "run": "runs/a",
        "status": "error",
    }
    assert ended.returncode == 6 and ended.stderr == "words of the job\n"


def test_a_script_that_crashes_shows_its_traceback_and_the_verdict_follows(unbroken: Tool, tmp_path: Path) -> None:
    ended = unbroken("run", "--", write_script(tmp_path, "raise RuntimeError('the script broke')"))
    *traceback, verdict = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert traceback[0].startswith("Traceback") and traceback[-1] == "RuntimeError: the script broke"
    assert verdict.startswith("unbroken run: ")


def test_an_outcome_file_that_is_none_is_reported_and_ignored(unbroken: Tool, tmp_path: Path) -> None:
    text = "import os, pathlib\npathlib.Path(os.environ['UNBROKEN_OUTCOME_FILE']).write_text('{')\nos._exit(9)"
    ended = unbroken("run", "--", write_script(tmp_path, text))
    assert ended.returncode == 9 and "JSON" in ended.stderr


def test_a_script_that_a_signal_ends_is_128_and_the_signal(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    ended = unbroken("run", "--", script)
    assert ended.returncode == 137 and "SIGKILL" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((), "bad-usage"),
        (("--", "no_such.py"), "path-missing"),
        (("-m", "no_such_module"), "module-missing"),
        (("--", "-m", "no_such_module"), "module-missing"),
        (("--nproc-per-node", "0", "--", "script.py"), "bad-usage"),
        (("--nproc-per-node", "many", "--", "script.py"), "bad-usage"),
        (("--nnodes", "2", "--", "script.py"), "bad-usage"),
        (("--no-such-option", "--", "script.py"), "bad-usage"),
        (("--run-dir", "script.py", "--", "script.py"), "not-a-store"),
    ],
)
def test_a_command_that_cannot_start_is_a_usage_error(
    unbroken: Tool, tmp_path: Path, arguments: tuple[str, ...], kind: str
) -> None:
    write_script(tmp_path, "raise SystemExit('started')")
    ended = unbroken("run", *arguments)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error[{kind}]: ") and "Traceback" not in ended.stderr


def test_arguments_reach_a_script_or_a_module_as_they_are(unbroken: Tool, tmp_path: Path) -> None:
    write_script(tmp_path, "import sys; print(sys.argv[1:])")
    given = ["--max-restarts", "x", "--json", "--", "-m", "a b"]
    for front in (["--", "script.py"], ["script.py"], ["-m", "script", "--"], ["--", "-m", "script"]):
        ended = unbroken("run", *front, *given)
        assert (ended.returncode, ended.stdout) == (0, f"{given}\n")


def test_the_private_place_is_gone_afterwards(unbroken: Tool, tmp_path: Path) -> None:
    script = write_script(tmp_path, "import os; print(os.environ['UNBROKEN_OUTCOME_FILE'])")
    (tmp_path / "t").mkdir()
    ended = unbroken("run", "--", script, env={"TMPDIR": str(tmp_path / "t")})
    assert ended.stdout.startswith(str(tmp_path / "t" / "unbroken-"))
    assert list((tmp_path / "t").iterdir()) == []


# ---- signals ----


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_to_the_launcher_reaches_the_script_once(start: Start, tmp_path: Path, name: str) -> None:
    launch = start(LISTENER, "--stopped-exit-code", "75")
    launch.ready()
    launch.process.send_signal(signal.Signals[name])
    assert launch.end() == 75
    assert (tmp_path / "seen").read_text() == name
    assert f"{name} forwarded" in launch.said


def test_a_terminal_that_goes_away_stops_the_job_cleanly(start: Start, tmp_path: Path) -> None:
    launch = start(LISTENER)
    launch.ready()
    launch.process.send_signal(signal.SIGHUP)
    assert launch.end() == 0
    assert (tmp_path / "seen").read_text() == "SIGTERM"


def test_ctrl_c_at_a_terminal_reaches_the_script_once(tmp_path: Path) -> None:
    script = write_script(tmp_path, LISTENER)
    ours, theirs = pty.openpty()
    launcher = subprocess.Popen(
        [*TOOL, "run", "--stopped-exit-code", "75", "--", script],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    with launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline().split()[1])
        # Two that come at once can be seen as one; so the terminal must not reach the script at all.
        assert os.getpgid(pid) == pid != os.getpgid(launcher.pid)
        os.write(ours, b"\x03")
        assert launcher.wait(timeout=PATIENCE_S) == 75
    os.close(ours)
    assert (tmp_path / "seen").read_text() == "SIGINT"


def test_a_script_that_ignores_the_signal_is_killed_when_its_time_is_over(start: Start) -> None:
    launch = start(STUBBORN, "--shutdown-timeout", "1")
    pids = launch.ready()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end() == 137
    wait_until_gone(pids)


def test_a_second_interrupt_leaves_at_once_and_leaves_nothing_behind(start: Start) -> None:
    launch = start(STUBBORN)
    pids = launch.ready()
    launch.process.send_signal(signal.SIGINT)
    launch.wait_for("press Ctrl-C again to kill it")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end() == 130
    wait_until_gone(pids)


def test_a_launcher_that_is_killed_asks_the_job_to_stop(start: Start, tmp_path: Path) -> None:
    launch = start(LISTENER)
    pids = launch.ready()
    launch.process.kill()
    assert launch.end() == -signal.SIGKILL
    wait_until_gone(pids)
    assert (tmp_path / "seen").read_text() == "SIGTERM"


def test_a_signal_that_the_launcher_was_set_to_ignore_stays_ignored(tmp_path: Path) -> None:
    script = write_script(tmp_path, LISTENER)
    command = [*TOOL, "run", "--", script]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith(b"ready")
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(timeout=PATIENCE_S) == 0
    assert (tmp_path / "seen").read_text() == "SIGUSR1"
