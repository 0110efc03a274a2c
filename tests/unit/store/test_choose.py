"""The newest usable checkpoint, and what happens to those skipped."""

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.store.saving import save, store_with, tree
from unbroken.disk import LocalDisk
from unbroken.errors import NoUsableCheckpoint
from unbroken.files import Files
from unbroken.store.check import Cause, Finding, Level, Verdict
from unbroken.store.choose import Choice, choose, resume_point
from unbroken.store.directory import Store


def resumed(store: Store, level: Level = Level.FULL) -> Choice:
    return resume_point(store, level, job="j2", at_ns=99)


def chosen(store: Store) -> str | None:
    found = resumed(store).chosen
    return found.name if found else None


def test_the_first_sound_one_is_taken_and_nothing_older_is_looked_at() -> None:
    looked: list[str] = []

    def judge(name: str) -> Verdict:
        looked.append(name)
        return Verdict(name, Level.QUICK, None, () if name == "b" else (Finding("p", "is missing"), Finding("q", "x")))

    found = choose(iter("abc"), judge)
    assert found.chosen is not None and found.chosen.name == "b"
    assert looked == ["a", "b"]
    assert [(over.name, over.reason) for over in found.skipped] == [("a", "p: is missing (and 1 more)")]


def test_of_nothing_nothing_is_chosen(tmp_path: Path) -> None:
    assert resumed(Store(tmp_path / "none")) == Choice(None)
    with pytest.raises(NoUsableCheckpoint) as none:
        Choice(None).required(Store(tmp_path))
    assert none.value.exit_code == 5


@pytest.mark.promise("K2")
@pytest.mark.parametrize("hint", ["missing", "dangling", "older", "outside", "file", "loop"])
def test_whatever_latest_says_the_newest_usable_is_chosen(tmp_path: Path, hint: str) -> None:
    store = store_with(tmp_path / "checkpoints", 1, 2)
    link = store.root / "latest"
    match hint:
        case "dangling":
            link.symlink_to("checkpoint-99")
        case "older":
            link.symlink_to("checkpoint-1")
        case "outside":
            link.symlink_to("/etc")
        case "file":
            link.write_text("checkpoint-1")
        case "loop":
            link.symlink_to("latest")
    assert chosen(store) == "checkpoint-2"


@pytest.mark.promise("K2")
def test_a_run_that_was_moved_still_resumes(tmp_path: Path) -> None:
    store_with(tmp_path / "here" / "checkpoints", 1, 2)
    (tmp_path / "here" / "checkpoints" / "latest").symlink_to("checkpoint-2")
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = Store(tmp_path / "there" / "checkpoints")
    assert chosen(moved) == "checkpoint-2"
    assert (moved.root / "latest" / "manifest.json").exists()


@pytest.mark.promise("K4")
def test_a_damaged_newest_is_quarantined_once_with_its_reason_and_every_byte(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    part = tmp_path / "checkpoint-3" / "trainer_state.json"
    part.write_bytes(part.read_bytes()[:-1])
    before = tree(tmp_path / "checkpoint-3")
    found = resumed(store, Level.QUICK)
    assert found.chosen is not None and found.chosen.name == "checkpoint-2"
    [over] = found.skipped
    assert (over.name, over.moved_to) == ("checkpoint-3", "quarantine/checkpoint-3")
    assert tree(tmp_path / "quarantine" / "checkpoint-3") == before
    reason = json.loads((tmp_path / "quarantine" / "checkpoint-3.reason.json").read_text())
    assert reason["job"] == "j2" and reason["at_ns"] == 99
    assert reason["reasons"] == ["trainer_state.json: has 10 bytes, not 11"]
    assert resumed(store).skipped == ()


def test_a_second_one_of_the_same_name_joins_the_first_in_quarantine(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    for _ in range(2):
        save(store, 2)
        (tmp_path / "checkpoint-2" / "trainer_state.json").write_bytes(b"")
        resumed(store)
    assert sorted(path.name for path in (tmp_path / "quarantine").iterdir()) == [
        "checkpoint-2",
        "checkpoint-2.reason.json",
        "checkpoint-2~2",
        "checkpoint-2~2.reason.json",
    ]


def test_when_all_are_damaged_all_are_named_and_none_is_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / "manifest.json").write_bytes(b"garbage")
    with pytest.raises(NoUsableCheckpoint) as none:
        resumed(store).required(store)
    assert [name for name, _ in none.value.skipped] == ["checkpoint-2", "checkpoint-1"]
    assert sorted(p.name for p in (tmp_path / "quarantine").iterdir() if p.is_dir()) == ["checkpoint-1", "checkpoint-2"]


def test_a_newer_format_is_skipped_and_stays_where_it_is(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"unbroken.checkpoint/2", b"unbroken.checkpoint/3"))
    before = tree(tmp_path)
    found = resumed(store)
    assert found.chosen is not None and found.chosen.name == "checkpoint-1"
    assert [(over.name, over.moved_to) for over in found.skipped] == [("checkpoint-2", None)]
    assert found.skipped[0].verdict.findings[0].cause is Cause.UNKNOWN_FORMAT
    assert tree(tmp_path) == before


class Ailing(LocalDisk):
    """A disk on which some files give an I/O error for a while."""

    def __init__(self, words: str) -> None:
        self.words = words

    def open(self, path: Path) -> int:
        if self.words in str(path):
            raise OSError(5, "Input/output error")
        return super().open(path)


@pytest.fixture(params=["checkpoint-2/state/", "checkpoint-2/manifest.json"])
def ailing(request: pytest.FixtureRequest) -> Files:
    return Files(Ailing(request.param))


def test_what_cannot_be_read_just_now_is_skipped_and_stays(tmp_path: Path, ailing: Files) -> None:
    store = store_with(tmp_path, 1, 2)
    before = tree(tmp_path)
    found = resumed(Store(tmp_path, ailing))
    assert found.chosen is not None and found.chosen.name == "checkpoint-1"
    assert [(over.name, over.moved_to) for over in found.skipped] == [("checkpoint-2", None)]
    assert tree(tmp_path) == before
    assert chosen(store) == "checkpoint-2"
