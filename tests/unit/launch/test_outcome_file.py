"""The outcome file: told whole or not at all, and believed only where it is one."""

import json
from pathlib import Path

import pytest

from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.launch.job_files import JobOutcome, make_outcome_path, read_job_outcome, write_outcome

STOPPED = JobOutcome("runs/a", "stopped", 0, "again", "SIGTERM")


def outcome_text(**changes: object) -> str:
    facts = {
        "schema": "unbroken.outcome/1",
        "run": "runs/a",
        "status": "stopped",
        "exit_code": 0,
        "class": "again",
        "reason": "SIGTERM",
    }
    return json.dumps({**facts, **changes})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    write_outcome(path, STOPPED)
    assert read_job_outcome(path) == STOPPED
    assert json.loads(path.read_text()) == json.loads(outcome_text())


def test_the_last_word_counts_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "outcome.json"
    begun = JobOutcome("runs/a", "running", 1, "again", "")
    write_outcome(path, begun)
    assert not begun.has_ended
    write_outcome(path, STOPPED)
    assert read_job_outcome(path) == STOPPED and STOPPED.has_ended
    assert [each.name for each in tmp_path.iterdir()] == ["outcome.json"]


def test_a_run_whose_name_is_no_unicode_comes_through(tmp_path: Path) -> None:
    outcome = JobOutcome("runs/\udcff", "completed", 0, "done", "ende: größe \n")
    write_outcome(tmp_path / "o", outcome)
    assert read_job_outcome(tmp_path / "o") == outcome


def test_without_an_outcome_file_there_is_no_outcome(tmp_path: Path) -> None:
    assert read_job_outcome(tmp_path / "outcome.json") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "{",
        "[" * 100_000,
        outcome_text(schema="unbroken.outcome/2"),
        outcome_text(status="fine"),
        outcome_text(exit_code=256),
        outcome_text(exit_code=-1),
        outcome_text(exit_code=True),
        outcome_text(**{"class": "maybe"}),
        outcome_text(run=None),
        outcome_text(reason=3),
    ],
)
def test_a_malformed_outcome_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "outcome.json"
    path.write_text(content)
    with pytest.raises(RecordDamaged):
        read_job_outcome(path)


def test_a_link_or_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text(outcome_text())
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(RecordDamaged):
            read_job_outcome(tmp_path / name)


def test_the_place_is_writable_by_its_owner_alone(tmp_path: Path) -> None:
    place = make_outcome_path(tmp_path, "token")
    assert place.is_dir() and place.stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed):
        make_outcome_path(tmp_path / "file", "token")
