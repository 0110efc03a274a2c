"""Paths at which no run can be: one clear error from every command, and nothing written anywhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.cli.main import main

LONG = "n" * 256
COMMANDS = [
    *(["status"], ["stop"], ["outcome"], ["release"], ["plan"]),
    *(["ls"], ["prune"], ["verify"], ["show"], ["pin"], ["unpin"], ["diff", "a@1"]),
]
BAD = {
    "": "error[bad-run-path]: the run path is empty",
    LONG: "error[bad-run-path]: the run path is too long: a name in it has 256 bytes",
    f"new/{LONG}/a": "error[bad-run-path]: the run path is too long: a name in it has 256 bytes",
    "d/" * 3000: "error[bad-run-path]: the run path is too long: it has ",
    "dangling": "error[bad-run-path]: the run path is a dangling symlink: its target /nowhere",
    "dangling/below": "error[bad-run-path]: the run path goes through the dangling symlink dangling: its target /no",
    "circle": "error[bad-run-path]: the run path contains a symlink loop",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("/nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("x")
    (tmp_path / "a").mkdir()
    return tmp_path


def contents(directory: Path) -> set[str]:
    return {str(path) for path in directory.rglob("*")}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.promise("U7")
def test_every_command_refuses_a_bad_path_in_one_error(
    here: Path, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(here)
    for path, words in BAD.items():
        code = main([command[0], path, *command[1:]])
        said = capfd.readouterr().err
        assert (code, said.startswith(words), said.count("error[")) == (2, True, 1), said
    code = main([command[0], "file/below", *command[1:]])
    assert code == 2 and "error[" in capfd.readouterr().err
    assert contents(here) == before


@pytest.mark.parametrize("command", ["run", "launch"])
@pytest.mark.promise("U7")
def test_a_launcher_starts_nothing_for_a_bad_path(here: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    script = here / "train.py"
    script.write_text("open('started', 'w')\n")
    for path, words in {**BAD, "file": "error[not-a-store]", "file/below": "error[not-a-store]"}.items():
        code = main([command, "--run-dir", path, str(script)])
        said = capfd.readouterr().err
        assert (code, said.startswith(words)) == (2, True), said
    assert main(["init", "-o", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "training.output_dir=dangling"]) == 2
    assert capfd.readouterr().err.startswith(BAD["dangling"])
    assert not (here / "started").exists() and not (here / "new").exists()


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory that lets nobody else in, and a run in it."""
    run = tmp_path / "closed" / "run"
    (run / ".lease").mkdir(parents=True)
    for above in (tmp_path, *tmp_path.parents):
        if above.name.startswith(("pytest-", "test_")):
            above.chmod(0o755)
    run.parent.chmod(0o700)
    yield run
    run.parent.chmod(0o755)


@pytest.mark.needs("root")
@pytest.mark.promise("U7")
def test_a_directory_without_permission_is_named(closed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    commands = ("status", "prune", "release")
    for command in commands:
        assert main([command, str(closed)]) == 0, "and whoever may look is let in"
    capfd.readouterr()
    os.seteuid(65534)
    try:
        ended = [(main([command, str(closed)]), capfd.readouterr().err) for command in commands]
    finally:
        os.seteuid(0)
    for code, said in ended:
        assert code == 2 and f"ls -ld {closed.parent}" in said, said
