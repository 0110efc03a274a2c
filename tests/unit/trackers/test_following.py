"""Trackers of a run: ids, what is sent after a kill or a failure, and what never reaches the training."""

import random
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import unbroken
from tests.patience import PATIENCE_S
from tests.trackers.board import Board
from unbroken import trackers
from unbroken.cli.status import summary_text
from unbroken.errors import TrackerMissing
from unbroken.loop.trackers import load_trackers
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.summary import summarize
from unbroken.records.tracker_marks import TrackerMarks, known_ids, last_marks
from unbroken.report.style import Style
from unbroken.store.directory import Store
from unbroken.trackers import sender
from unbroken.trackers.named import KNOWN, Known


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_FIRST_WAIT_S", 0.01)


def train(run: Path, board: Board, total: int, *, fails_at: int = 0, **settings: object) -> str:
    """Train; a job that raises at a step loses what it has computed since its last checkpoint."""
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"save_steps": 4, "logging_steps": 1, "trackers": (board,), "audit": "off", "console": False, **settings}
    opened = unbroken.Run(run, settings=unbroken.Settings(**given), model=model, optimizer=optimizer)  # type: ignore[arg-type]
    with opened:
        for step in opened.steps(total):
            loss = model(torch.randn(1, 2)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            opened.log(loss=loss)
            if step + 1 == fails_at:
                raise ZeroDivisionError
    return repr([value.tolist() for value in model.parameters()])


def shown(board: Board) -> list[list[int]]:
    return [[step for step, _ in rows] for rows in board.runs.values()]


def ids(run: Path) -> dict[str, str]:
    return known_ids(read_history(Layout(run)).events)


@pytest.mark.promise("G24")
def test_steps_computed_again_are_sent_once_and_the_id_stays(tmp_path: Path) -> None:
    board, run = Board(), tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(run, board, 12, fails_at=7)
    assert shown(board) == [[1, 2, 3, 4, 5, 6]]
    first = ids(run)
    train(run, board, 12)
    assert shown(board) == [[*range(1, 13)]]
    assert ids(run) == first and list(board.runs) == [first["board"]]
    assert board.ends == ["failed", "completed"]
    assert [each.is_resumed for each in board.started] == [False, True]
    assert board.started[0].name == "run"


@pytest.mark.promise("G24")
def test_a_tracker_that_cannot_tell_is_sent_what_was_not_written_down(tmp_path: Path) -> None:
    board, run = Board(tells=False), tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(run, board, 12, fails_at=7)
    train(run, board, 12)
    assert shown(board) == [[*range(1, 13)]]


def test_what_the_tracker_lost_is_sent_again_from_the_records(tmp_path: Path) -> None:
    board, run = Board(), tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(run, board, 12, fails_at=7)
    (rows,) = board.runs.values()
    # As wandb's block that a kill cuts off.
    del rows[2:]
    train(run, board, 12)
    assert shown(board) == [[*range(1, 13)]]


@pytest.mark.promise("G24")
def test_committed_steps_alone_are_shown(tmp_path: Path) -> None:
    board, run = Board(), tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        train(run, board, 12, fails_at=3, tracker_mode="committed")
    assert shown(board) == [[]]
    with pytest.raises(ZeroDivisionError):
        train(run, board, 12, fails_at=7, tracker_mode="committed")
    assert shown(board) == [[1, 2, 3, 4]]
    train(run, board, 12, tracker_mode="committed")
    assert shown(board) == [[*range(1, 13)]]


def test_a_run_that_goes_back_gets_a_new_run_with_its_whole_past(tmp_path: Path) -> None:
    board, run = Board(), tmp_path / "run"
    train(run, board, 8)
    train(run, board, 10, resume="4")
    assert shown(board) == [[*range(1, 9)], [*range(1, 11)]]
    # Once: the next job continues that one.
    train(run, board, 12, resume="4")
    assert shown(board) == [[*range(1, 9)], [*range(1, 13)]]


def test_a_run_that_lost_its_records_finds_its_tracker_in_the_checkpoint(tmp_path: Path) -> None:
    board, run = Board(), tmp_path / "run"
    train(run, board, 4)
    before = ids(run)
    for folder in ("journal", "metrics", "trackers"):
        shutil.rmtree(run / folder)
    train(run, board, 8)
    assert ids(run) == before
    assert shown(board) == [[*range(1, 9)]]
    # A run that starts from its weights is another one.
    train(tmp_path / "other", board, 10, load_path=str(run))
    assert len(board.runs) == 2


@pytest.mark.promise("G24")
def test_a_failing_tracker_changes_no_bit_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BOARD_API_KEY", "very-secret-key")
    board, run = Board(failing=lambda: True), tmp_path / "run"
    weights = train(run, board, 8)
    assert weights == train(tmp_path / "alone", board, 8, trackers=())
    said = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert len([text for text in said if "failed" in text]) == 1
    assert "board" in said[0] and "***" in said[0] and "very-secret" not in said[0]
    (ended,) = read_history(Layout(run)).of_kind("tracker-end")
    assert (ended.whole("failures") or 0) >= 2 and "***" in str(ended.text("error"))
    text = summary_text(summarize(Store(run / "checkpoints"), now_s=0.0), Style(color=False))
    assert ids(run)["board"] in text
    # It works again: the next job sends everything.
    board.failing = lambda: False
    train(run, board, 12)
    assert shown(board) == [[*range(1, 13)]]


def test_a_tracker_that_took_no_step_is_behind_though_its_run_was_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, run = Board(), tmp_path / "run"
    board.failing = lambda: bool(board.started)
    train(run, board, 8)
    assert board.ends == ["completed"] and shown(board) == [[]]
    (ended,) = read_history(Layout(run)).of_kind("tracker-end")
    assert ended.text("error") and ended.whole("sent") == 0
    assert [record for record in caplog.records if "is behind" in record.getMessage()]
    # The same command, though there is nothing left to compute.
    board.failing = lambda: False
    train(run, board, 8)
    assert shown(board) == [[*range(1, 9)]]


def test_a_failure_in_the_middle_of_a_batch_doubles_nothing(tmp_path: Path) -> None:
    failures = iter([False] * 4 + [True] + [False] * 100)
    board = Board(failing=lambda: next(failures))
    train(tmp_path / "run", board, 8, logging_steps=8)
    assert shown(board) == [[*range(1, 9)]]


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unbroken.loop.trackers.WAIT_S", 0.1)
    hanging, other = Board(hangs=threading.Event()), Board(name="other")
    train(tmp_path / "run", hanging, 8, trackers=(hanging, other))
    assert hanging.runs == {}
    # The one that hangs uses up the time for both: what the other has not sent by then, its thread sends now.
    until_s = time.monotonic() + PATIENCE_S
    while shown(other) != [[*range(1, 9)]]:
        assert time.monotonic() < until_s, shown(other)
        time.sleep(0.01)
    assert hanging.hangs is not None
    hanging.hangs.set()


def test_a_drill_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unbroken.records.drill import ENVIRONMENT, Drill, write_drill

    write_drill(tmp_path / "drill.json", Drill(directory=tmp_path / "drilled"))
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "drill.json"))
    board = Board()
    train(tmp_path / "run", board, 4)
    assert board.runs == {}


def test_a_missing_tracker_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "unbroken.trackers.wandb", raising=False)
    with pytest.raises(TrackerMissing) as refused:
        train(tmp_path / "run", Board(), 4, trackers="wandb:p")
    assert refused.value.help()[0].command == "pip install 'unbroken[wandb]'"
    assert not (tmp_path / "run" / "journal").exists()


def test_a_library_that_draws_when_it_is_imported_moves_no_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As rich does, which trackio imports.
    (tmp_path / "drawing.py").write_text("import random\nrandom.random()\n\ndef make(target):\n    return target\n")
    monkeypatch.setattr(trackers, "__path__", [*trackers.__path__, str(tmp_path)])
    monkeypatch.setitem(KNOWN, "drawing", Known("", "drawing"))
    before = random.getstate()
    assert [*map(str, load_trackers(unbroken.Settings(trackers="drawing:it")))] == ["it"]
    assert "unbroken.trackers.drawing" in sys.modules and random.getstate() == before
    monkeypatch.delitem(sys.modules, "unbroken.trackers.drawing")


@pytest.mark.parametrize("wrong", ["nothing", "wandb, nothing", ("wandb", "wandb"), (3,)])
def test_a_wrong_name_is_reported_when_the_settings_are_made(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"Settings\.trackers"):
        unbroken.Settings(trackers=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tracker_mode"):
        unbroken.Settings(tracker_mode="sometimes")  # type: ignore[arg-type]


def test_marks_of_an_older_job_count_where_the_newer_one_has_none(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for job, tracker, step in ((1, "a", 3), (1, "b", 4), (2, "a", 7)):
        marks = TrackerMarks(layout, job)
        marks.writer(tracker, "id")(step)
        marks.close()
    assert last_marks(layout, [("a", "id"), ("b", "id"), ("c", "id")]) == {("a", "id"): 7, ("b", "id"): 4}
