"""The uninterrupted run: what it must be, and that it must equal itself."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.state.tiny import job, quietly, tiny
from unbroken.errors import BaselineFails, NotDeterministic, NothingToProve
from unbroken.prove.baseline import Baseline, require_same, run_alone
from unbroken.prove.drilled_command import understood
from unbroken.prove.proof_setup import ProofSetup, environment, proof_folder


def setup(folder: Path, *words: str) -> ProofSetup:
    return ProofSetup(understood(words), folder, folder, {}, limit_s=60.0)


def trained(folder: Path, seed: int) -> Baseline:
    job(folder, 6, quietly(), **tiny(seed=seed))
    return Baseline(folder, steps=6, seconds=1.0, step_s=0.1, ranks=1, checkpoint_bytes=1)


def test_two_uninterrupted_runs_that_differ_are_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("model = nn.Linear(1, 1)")
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    with pytest.raises(NotDeterministic) as refused:
        require_same(setup(tmp_path, "python", "train.py"), first, second)
    assert any("model.0.weight" in line for line in refused.value.differences)
    assert any("torch.manual_seed" in cause for cause in refused.value.causes)
    assert refused.value.exit_code == 3


def test_two_that_are_alike_are_one(tmp_path: Path) -> None:
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 1)
    assert require_same(setup(tmp_path, "python", "train.py"), first, second).agreeing == 6


def test_a_command_that_ends_by_itself_shows_the_end_of_its_output(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("print('about to')\nraise SystemExit(9)")
    with pytest.raises(BaselineFails, match="exit code 9") as refused:
        run_alone(setup(tmp_path, sys.executable, "fails.py"), "alone", save_steps=None, ranks=None)
    assert refused.value.log == ("about to",)


def test_a_command_without_a_run_is_reported(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("")
    with pytest.raises(NothingToProve, match=r"never entered an unbroken\.Run"):
        run_alone(setup(tmp_path, sys.executable, "idle.py"), "alone", save_steps=None, ranks=None)


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\nprint('at work', flush=True)\ntime.sleep(600)")
    # A busy machine may take longer than the shortest limit until the command has said anything.
    for limit_s in (3.0, 30.0, 300.0):
        impatient = replace(setup(tmp_path, sys.executable, "hangs.py"), limit_s=limit_s)
        with pytest.raises(NothingToProve, match=rf"did not end within {limit_s} s") as refused:
            run_alone(impatient, f"alone-{limit_s:.0f}", save_steps=None, ranks=None)
        if refused.value.log:
            break
    assert refused.value.log == ("at work",)


def test_jobs_have_the_environment_of_the_shell_but_not_of_a_launcher_above() -> None:
    before = {"HOME": "/root", "UNBROKEN_OUTCOME_FILE": "/x", "UNBROKEN_LAUNCHER_PID": "7"}
    assert environment(before, is_resized=False) == {"HOME": "/root"}
    assert environment(before, is_resized=True) == {"HOME": "/root", "OMP_NUM_THREADS": "1"}
    assert environment({"OMP_NUM_THREADS": "4"}, is_resized=True) == {"OMP_NUM_THREADS": "4"}


def test_a_folder_that_was_requested_stays_and_an_earlier_proof_in_it_is_never_touched(tmp_path: Path) -> None:
    for name in ("prove-5", "prove-5.2"):
        with proof_folder(tmp_path / "proofs", 5) as folder:
            (folder.path / "evidence").write_text(name)
        assert folder.path == tmp_path / "proofs" / name
    assert [(tmp_path / "proofs" / name / "evidence").read_text() for name in ("prove-5", "prove-5.2")] == [
        "prove-5",
        "prove-5.2",
    ]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_temporary_folder_goes_unless_it_holds_evidence(is_kept: bool) -> None:
    with proof_folder(None, 5) as folder:
        (folder.path / "run").mkdir()
        folder.is_kept = is_kept
    assert folder.path.exists() == is_kept
    if is_kept:
        (folder.path / "run").rmdir()
        folder.path.rmdir()
