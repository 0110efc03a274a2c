"""Units of a tokenization as tasks of a real Dask cluster, one worker of which is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.test_tokenize import corpus as corpus
from tests.crash.test_tokenize import units_done, wait_until
from tests.patience import PATIENCE_S
from tests.unit.data.texts import tree

EXAMPLE = Path(__file__).parents[2] / "examples" / "tokenize_dask.py"


def workers_below(pid: int) -> list[int]:
    """The processes below one that do tasks: a nanny starts each, and again when it dies."""
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in listed.read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text()
            found += [int(child)] if "spawn_main" in words or "forkserver" in words else []
            found += workers_below(int(child))
    return found


@pytest.mark.promise("G12")
def test_a_dask_cluster_that_loses_a_worker_makes_the_files_of_one_process(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = list(map(str, [sys.executable, EXAMPLE, corpus / "text", output, "--tokenizer", corpus / "own.json"]))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    wait_until(process, lambda: units_done(output) >= 1)
    victims = workers_below(process.pid)
    os.kill(victims[0], signal.SIGKILL)
    said, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    assert "shards" in said
    assert tree(output) == tree(corpus / "expected")
