"""The whole demo once, as a newcomer meets it: every job meets the end it is to meet, and the bits are the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.store.directory import Store

TOOL = [sys.executable, "-m", "unbroken"]


@pytest.mark.promise("G1")
def test_the_demo_is_killed_stopped_resized_and_damaged_and_ends_with_the_bits_of_a_run_left_alone(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "demo"
    command = [*TOOL, "demo", "--dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = ended.stdout.splitlines()

    heading = next(at for at, line in enumerate(results) if line.startswith("job  ranks"))
    rows = [line.split(maxsplit=5) for line in results[heading + 1 : heading + 5]]
    assert [(row[0], row[1]) for row in rows] == [("1", "2"), ("2", "1"), ("3", "3"), ("4", "2")]
    assert [row[5].partition(",")[0] for row in rows] == [
        "SIGKILL in mid-step",
        "stopped on request: saved and exited",
        "SIGKILL while it saved",
        "completed",
    ]
    assert rows[3][2] != rows[0][2], "another number of workers"

    assert any(line.endswith("are equal, bit for bit") for line in results)
    assert any("120 of 120" in line and "val_loss" in line for line in results)
    assert "runs/chained" in ended.stdout
    assert "torn" in ended.stderr, "the draft that was left by the kill during a save"

    chained = Layout(folder / "runs" / "chained")
    history = read_history(chained)
    assert [fact.values["world_size"] for fact in history.of_kind("job-start")] == [2, 1, 3, 2]
    assert [(fact.job, fact.values["status"]) for fact in history.of_kind("job-end")] == [
        (2, "stopped"),
        (4, "completed"),
    ]
    [passed] = history.of_kind("checkpoint-skipped")
    assert passed.job == 4
    assert (chained.checkpoints / "quarantine" / str(passed.text("name"))).is_dir()
    recomputed = read_metrics(chained).recomputed
    assert recomputed.compared == recomputed.agreeing > 20
    fingerprints = [
        Store(Layout(folder / "runs" / name).checkpoints).read_manifest("final").fingerprint
        for name in ("alone", "chained")
    ]
    assert fingerprints[0] is not None and fingerprints[0] == fingerprints[1]
    assert pasted(ended.stdout, "verify")[0] == 0
    assert pasted(ended.stdout, "ls")[0] == 0


def pasted(said: str, word: str) -> tuple[int, str]:
    """Run what the demo says to try next, as it stands there."""
    lines = said[said.index("try next") :].splitlines()
    enter = lines[0].removeprefix("try next").strip()
    [line] = [each.strip() for each in lines[1:] if f"unbroken {word} " in each]
    script = f"{enter} && {line.split('  ')[0]}"
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, env=os.environ)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_command_that_fails_is_shown_with_the_end_of_its_log_and_no_traceback(tmp_path: Path) -> None:
    # A module of this name comes before the real one, so the first command that needs it ends badly.
    (tmp_path / "tokenizers.py").write_text("raise RuntimeError('the tokenizers are broken here')\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [*TOOL, "demo", "--dir", str(tmp_path / "demo"), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    results = json.loads(ended.stdout)
    assert (ended.returncode, results["kind"]) == (1, "demo-failed")
    assert any("the tokenizers are broken here" in line for line in results["details"]), "the script's own words"
    assert Path(results["at"]).is_file() and "Traceback" not in ended.stderr
