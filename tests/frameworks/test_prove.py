"""``unbroken prove`` on the example of each framework: broken on purpose, it ends in the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Of each framework: its example, how many steps, and the faults.
SCRIPTS = {
    "transformers": ("transformers_trainer.py", 12, "save,term,flip"),
    "accelerate": ("accelerate_loop.py", 14, "save,term,flip"),
    "lightning": ("lightning_trainer.py", 12, "save,term,flip"),
    "deepspeed": ("deepspeed_loop.py", 12, "save,term,flip"),
    "torch": ("dcp_loop.py", 12, "save,term,flip"),
}


@pytest.mark.timeout(900)
@pytest.mark.promise("C8", "C9", "C10", "C11", "X6")
@pytest.mark.parametrize("framework", SCRIPTS)
def test_prove_breaks_a_training_on_purpose_and_finds_the_same_bits(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    script, steps, faults = SCRIPTS[framework]
    how = ["--seed", "1", "--chain", "1", "--faults", faults, "--dir", str(tmp_path / "proof")]
    training = [sys.executable, str(EXAMPLES / script), str(steps), "{run}"]
    command = [sys.executable, "-m", "unbroken", "prove", *how, "--", *training]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "proven: 1 chain" in ended.stdout
