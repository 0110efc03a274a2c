"""A user's command, sent elsewhere and set to another number of ranks."""

from pathlib import Path

import pytest

from unbroken.prove.drilled_command import understood

RUN = Path("/proof/chain-1")
PYTHON = "/usr/bin/python3"


def words(*given: str, ranks: int | None = None) -> list[str]:
    return understood(given, python=PYTHON).words_for(RUN, ranks)


def test_a_script_is_left_as_it_is() -> None:
    command = understood(("python", "train.py", "--lr", "1"))
    assert command.words_for(RUN, None) == ["python", "train.py", "--lr", "1"]
    assert not command.sets_ranks
    assert command.ranks is None


def test_the_word_run_is_replaced() -> None:
    command = understood(("python", "train.py", "--out={run}", "{run}/log"))
    assert command.words_for(RUN, None) == ["python", "train.py", f"--out={RUN}", f"{RUN}/log"]


def test_the_word_ranks_is_replaced() -> None:
    assert words("mpirun", "-n", "{ranks}", "python", "train.py", ranks=3) == [
        "mpirun",
        "-n",
        "3",
        "python",
        "train.py",
    ]
    assert words("mpirun", "-n", "{ranks}", "python", "train.py") == ["mpirun", "-n", "1", "python", "train.py"]
    assert understood(("mpirun", "-n", "{ranks}", "x")).sets_ranks


def test_unbroken_is_the_one_that_runs_and_train_gets_its_directory_by_the_config() -> None:
    command = understood(("unbroken", "train", "run.yaml"), python=PYTHON)
    assert command.words_for(RUN, 1) == [PYTHON, "-m", "unbroken", "train", "run.yaml", f"training.output_dir={RUN}"]
    assert command.given == ("unbroken", "train", "run.yaml")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            ("unbroken", "run", "--", "t.py", "--nproc-per-node", "9"),
            [PYTHON, "-m", "unbroken", "run", "--nproc-per-node", "3", "--", "t.py", "--nproc-per-node", "9"],
        ),
        (
            ("python", "-m", "unbroken", "run", "--nproc-per-node", "2", "--max-restarts", "1", "--", "t.py"),
            ["python", "-m", "unbroken", "run", "--nproc-per-node", "3", "--max-restarts", "1", "--", "t.py"],
        ),
        (
            ("torchrun", "--nproc_per_node=2", "--standalone", "t.py", "--nproc-per-node=7"),
            ["torchrun", "--nproc-per-node", "3", "--standalone", "t.py", "--nproc-per-node=7"],
        ),
        (
            ("python3", "-m", "torch.distributed.run", "--nproc-per-node", "2", "t.py"),
            ["python3", "-m", "torch.distributed.run", "--nproc-per-node", "3", "t.py"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_launchers_own_option_is_set_and_the_scripts_is_not(given: tuple[str, ...], expected: list[str]) -> None:
    assert words(*given, ranks=3) == expected


def test_a_command_that_has_the_ranks_already_is_not_changed() -> None:
    given = ("torchrun", "--nproc-per-node", "2", "t.py")
    assert words(*given, ranks=2) == list(given)
    assert words(*given) == list(given)
    assert understood(given).ranks == 2
    assert understood(("torchrun", "--nproc-per-node=gpu", "t.py")).ranks is None


def test_a_program_that_is_not_there_is_known_before_it_is_started(tmp_path: Path) -> None:
    assert understood(("python3", "x.py")).is_startable
    assert not understood(("no-such-program-at-all",)).is_startable
    (tmp_path / "not-executable").write_text("")
    assert not understood((str(tmp_path / "not-executable"),)).is_startable
