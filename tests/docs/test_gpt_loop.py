"""The example loop: at most twelve lines make it unbreakable, and killed or not it ends with the plain loop's bits."""

import ast
import difflib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = "120"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def code_of(name: str) -> list[str]:
    """The lines of a program below its docstring."""
    text = (EXAMPLES / name).read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


def test_at_most_twelve_lines_make_the_plain_loop_a_run() -> None:
    changed = difflib.ndiff(code_of("gpt_loop_plain.py"), code_of("gpt_loop.py"))
    added = [line for line in changed if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= 12, added


def last_line(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


def test_killed_and_resumed_the_example_ends_with_the_bits_of_the_plain_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "gpt_loop.py"), STEPS, str(tmp_path / "run")]
    first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "run" / "checkpoints" / "checkpoint-40").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "run" / "checkpoints" / "final").exists()
    resumed = last_line(*command)
    assert resumed.startswith("weights ")
    assert resumed == last_line(sys.executable, str(EXAMPLES / "gpt_loop_plain.py"), STEPS)
    assert len(list((tmp_path / "run" / "journal").iterdir())) == 2
