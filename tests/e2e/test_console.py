"""What a script that never set up logging sees of its run, and how that is turned off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.promise("U12")

SCRIPT = """
import logging, sys
import torch, unbroken
if "logging" in sys.argv:
    logging.basicConfig(level=logging.INFO, format="own %(message)s", stream=sys.stderr)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
settings = unbroken.Settings(save_steps=4, console="silent" not in sys.argv)
with unbroken.Run("run", model=model, optimizer=optimizer, settings=settings) as run:
    for step in run.steps(int(sys.argv[1])):
        optimizer.zero_grad(); model(torch.ones(1, 3)).sum().backward(); optimizer.step()
        if step == 5 and "stop" in sys.argv:
            run.stop("enough")
"""


def said(directory: Path, *arguments: str, **env: str) -> list[str]:
    (directory / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout == ""
    return ended.stderr.splitlines()


def test_start_saves_stop_resume_and_end_are_seen(tmp_path: Path) -> None:
    first = said(tmp_path, "10", "stop")
    assert first[1] == "unbroken: starting at step 0"
    assert any(line.startswith("unbroken: saved checkpoint-4 in ") for line in first)
    assert first[-1].startswith("unbroken: job stopped at step 6: ") and "the same command resumes the run" in first[-1]
    second = said(tmp_path, "10")
    assert "unbroken: resuming from step 6 (checkpoint-6-shutdown, all checksums verified)" in second
    assert second[-1] == "unbroken: run completed at step 10 of 10"
    third = said(tmp_path, "10")
    assert "unbroken: nothing to do: step 10 of 10 is already reached" in third


def test_one_switch_turns_it_off(tmp_path: Path) -> None:
    assert said(tmp_path, "2", "silent") == []
    assert said(tmp_path, "4", UNBROKEN_QUIET="1") == []


def test_a_script_with_its_own_logging_sees_each_line_once(tmp_path: Path) -> None:
    lines = said(tmp_path, "2", "logging")
    assert "own starting at step 0" in lines
    assert not any(line.startswith("unbroken:") for line in lines)


def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    script = SCRIPT.replace("torch.manual_seed(0)", 'torch.distributed.init_process_group("gloo")')
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py", "4"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert ended.stderr.count("unbroken: starting at step 0") == 1
    assert ended.stderr.count("unbroken: run completed at step 4 of 4") == 1
