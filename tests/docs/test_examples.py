"""The examples: at most twelve lines make a plain loop a run, and killed or not it ends with the plain bits."""

import ast
import difflib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unbroken.records.layout import Layout

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Each with its steps, and the checkpoint after which it is killed.
LOOPS = [
    ("gpt_loop", 120, 40),
    ("prefetch_loop", 100, 40),
    ("classifier", 60, 20),
    ("transformers_trainer", 20, 8),
    ("accelerate_loop", 70, 8),
    ("streaming_dataset", 60, 30),
    ("lightning_trainer", 20, 8),
    ("fabric_loop", 20, 8),
    ("dcp_loop", 200, 40),
    ("deepspeed_loop", 80, 8),
]
# How many lines make each plain loop a run; the README promises at most twelve.
LINES = {
    "gpt_loop": 8,
    "prefetch_loop": 8,
    "classifier": 8,
    "transformers_trainer": 3,
    "accelerate_loop": 11,
    "streaming_dataset": 7,
    "lightning_trainer": 3,
    "fabric_loop": 6,
    "dcp_loop": 10,
    "deepspeed_loop": 12,
}


def code_of(name: str) -> list[str]:
    """The lines of a program below its docstring."""
    text = (EXAMPLES / name).read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


@pytest.mark.parametrize("name", [name for name, _, _ in LOOPS])
def test_at_most_twelve_lines_make_the_plain_loop_a_run(name: str) -> None:
    changed = difflib.ndiff(code_of(f"{name}_plain.py"), code_of(f"{name}.py"))
    added = [line for line in changed if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= LINES[name] <= 12, added


def last_line(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(("name", "steps", "killed_after"), LOOPS)
@pytest.mark.promise("U2")
def test_killed_and_resumed_it_ends_with_the_bits_of_the_plain_loop(
    tmp_path: Path, name: str, steps: int, killed_after: int
) -> None:
    layout = Layout(tmp_path / "run")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(steps), str(layout.run)]
    first = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (layout.checkpoints / f"checkpoint-{killed_after}").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (layout.checkpoints / "final").exists() and not (layout.checkpoints / f"checkpoint-{steps}").exists()
    resumed = last_line(*command)
    assert resumed.startswith("weights ")
    plain = [sys.executable, str(EXAMPLES / f"{name}_plain.py"), str(steps), str(tmp_path / "plain")]
    assert resumed == last_line(*plain)
    assert len(list(layout.journal.iterdir())) == 2
