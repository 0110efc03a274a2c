"""Each guarantee broken on purpose in a copy of the source: a test must turn red for every one.

A mutation that survives is a hole in the tests, not a detail: it is closed by a stronger test, never by taking the
mutation out of the table.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unbroken
from tests.mutation.data_table import DATA
from tests.mutation.habits_table import HABITS
from tests.mutation.launch_table import LAUNCH
from tests.mutation.proof_table import PROOF
from tests.mutation.table import STORE, Mutation
from tests.mutation.training_table import TRAINING

MUTATIONS = (*STORE, *DATA, *TRAINING, *LAUNCH, *PROOF, *HABITS)
REPOSITORY = Path(__file__).parents[2]


def _copy(into: Path) -> Path:
    """A copy of the package that ``PYTHONPATH`` puts before the installed one."""
    shutil.copytree(Path(unbroken.__file__).parent, into / "unbroken", ignore=shutil.ignore_patterns("__pycache__"))
    return into


def _python(source: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "UNBROKEN_MUTATED": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def _run_tests(source: Path, *nodes: str) -> "subprocess.CompletedProcess[str]":
    return _python(source, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", *nodes)


def test_the_copy_is_what_the_tests_import_and_unbroken_it_is_green(tmp_path: Path) -> None:
    source = _copy(tmp_path)
    where = _python(source, "-c", "import unbroken.files; print(unbroken.files.__file__)")
    assert Path(where.stdout.strip()) == source / "unbroken" / "files.py", where.stderr
    nodes = dict.fromkeys(node for mutation in MUTATIONS for node in mutation.caught_by)
    run = _run_tests(source, *nodes)
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_broken_guarantee_turns_a_test_red(mutation: Mutation, tmp_path: Path) -> None:
    source = _copy(tmp_path)
    for file, old, new in mutation.replacements:
        path = source / "unbroken" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} holds {text.count(old)} times:\n{old}"
        path.write_text(text.replace(old, new))
    run = _run_tests(source, *mutation.caught_by)
    assert run.returncode == 1, (
        f"{mutation} survived (exit {run.returncode}):\n{run.stdout[-2000:]}{run.stderr[-1000:]}"
    )
