"""The examples: at most twelve lines make a plain loop a run, and killed or not it ends with the plain bits."""

import ast
import difflib
import os
import signal
import subprocess
import sys
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

# Runs a program that is killed as soon as a checkpoint of that name stands.
KILLED_AFTER = """
import os, runpy, signal, sys
from unbroken.files import Files

last, publish = sys.argv[1], Files.publish

def publish_and_die(files, source, target):
    publish(files, source, target)
    if target.name == last:
        os.kill(os.getpid(), signal.SIGKILL)

Files.publish = publish_and_die
sys.argv[:] = sys.argv[2:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def code_of(name: str) -> list[str]:
    """The lines of a program below its docstring."""
    text = (EXAMPLES / name).read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


@pytest.mark.parametrize("name", [name for name, _, _ in LOOPS])
def test_at_most_twelve_lines_make_the_plain_loop_a_run(name: str) -> None:
    changed = difflib.ndiff(code_of(f"{name}_plain.py"), code_of(f"{name}.py"))
    added = [line for line in changed if line.startswith("+ ") and line[2:].strip()]
    assert 0 < len(added) <= 12, added


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
    words = [str(EXAMPLES / f"{name}.py"), str(steps), str(layout.run)]
    killing = [sys.executable, "-c", KILLED_AFTER, f"checkpoint-{killed_after}", *words]
    killed = subprocess.run(killing, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=False)
    assert killed.returncode == -signal.SIGKILL and (layout.checkpoints / f"checkpoint-{killed_after}").exists()
    assert not (layout.checkpoints / "final").exists() and not (layout.checkpoints / f"checkpoint-{steps}").exists()
    resumed = last_line(sys.executable, *words)
    assert resumed.startswith("weights ")
    plain = [sys.executable, str(EXAMPLES / f"{name}_plain.py"), str(steps), str(tmp_path / "plain")]
    assert resumed == last_line(*plain)
    assert len(list(layout.journal.iterdir())) == 2
