"""Going back: the abandoned branch is set aside and never met again by mistake."""

import json
from pathlib import Path

import pytest

from tests.unit.store.saving import save, store_with, tree
from unbroken.errors import CheckpointUnknown, RecordDamaged, StorageFailed
from unbroken.store.check import Level
from unbroken.store.choose import resume_point
from unbroken.store.directory import Store
from unbroken.store.rewind import abandoned_ids, move_abandoned, record_rewind, rewind
from unbroken.store.scan import newest_first, scan


def go_back(store: Store, target: str) -> list[str]:
    return rewind(store, newest_first(store, scan(store).committed), target=target, job="j2", at_ns=7)


def chosen(store: Store) -> str | None:
    found = resume_point(store, Level.FULL, job="j3", at_ns=8).chosen
    return found.name if found else None


@pytest.mark.promise("K5")
def test_after_a_rewind_the_target_is_the_newest_and_nothing_is_deleted(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    before = tree(tmp_path / "checkpoint-3")
    assert go_back(store, "checkpoint-1") == ["checkpoint-3", "checkpoint-2"]
    assert chosen(store) == "checkpoint-1"
    assert tree(tmp_path / "abandoned" / "checkpoint-3") == before


@pytest.mark.promise("K5")
def test_a_crash_right_after_the_decision_changes_nothing_about_it(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    ids = {name: store.read_manifest(name).id for name in ("checkpoint-2", "checkpoint-3")}
    record_rewind(store, target="checkpoint-1", abandoned=ids, job="j2", at_ns=7)
    assert chosen(store) == "checkpoint-1"
    move_abandoned(store, ["checkpoint-2"])
    assert chosen(store) == "checkpoint-1"
    move_abandoned(store, scan(store).abandoned[:1])
    assert scan(store).abandoned == ("abandoned/checkpoint-2", "abandoned/checkpoint-3")


@pytest.mark.promise("K5")
def test_the_branch_that_continues_uses_the_same_names_and_is_chosen(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    go_back(store, "checkpoint-1")
    assert save(store, 2, job="j2", at_ns=50) == "checkpoint-2"
    assert chosen(store) == "checkpoint-2"
    assert save(store, 3, job="j2", at_ns=51) == "checkpoint-3"
    assert go_back(store, "checkpoint-2") == ["checkpoint-3"]
    assert scan(store).abandoned == (
        "abandoned/checkpoint-2",
        "abandoned/checkpoint-3",
        "abandoned/checkpoint-3~2",
    )
    assert chosen(store) == "checkpoint-2"


@pytest.mark.promise("K5")
def test_a_damaged_newer_one_does_not_stop_a_rewind(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-3" / "manifest.json").write_bytes(b"ruined")
    assert go_back(store, "checkpoint-1") == ["checkpoint-3", "checkpoint-2"]
    assert chosen(store) == "checkpoint-1"
    assert (tmp_path / "abandoned" / "checkpoint-3" / "manifest.json").read_bytes() == b"ruined"


def test_going_back_to_the_newest_abandons_nothing(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    before = tree(tmp_path)
    assert go_back(store, "checkpoint-2") == []
    assert tree(tmp_path) == before


def test_a_target_that_is_not_there_is_refused_before_anything_moves(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    with pytest.raises(CheckpointUnknown):
        go_back(store, "checkpoint-9")
    assert scan(store).committed == ("checkpoint-1", "checkpoint-2")


def test_records_are_numbered_and_say_who_went_where(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / ".rewinds").mkdir()
    (tmp_path / ".rewinds" / "²²²²²²").write_text("not a number, though a digit")
    for number in (1, 2):
        record_rewind(store, target="checkpoint-1", abandoned={"b": "id-b", "a": "id-a"}, job="j2", at_ns=number)
    found = json.loads((tmp_path / ".rewinds" / "000002.json").read_text())
    assert found == {
        "schema": "unbroken.rewind/2",
        "target": "checkpoint-1",
        "job": "j2",
        "at_ns": 2,
        "abandoned": [{"name": "a", "id": "id-a"}, {"name": "b", "id": "id-b"}],
    }
    assert abandoned_ids(store) == {"a": frozenset({"id-a"}), "b": frozenset({"id-b"})}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "other"}', '{"schema": "unbroken.rewind/2"}', "[" * 100_000]
)
def test_a_record_that_cannot_be_read_is_an_error_and_not_a_guess(tmp_path: Path, text: str) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / ".rewinds").mkdir()
    (tmp_path / ".rewinds" / "000001.json").write_text(text)
    with pytest.raises(RecordDamaged):
        abandoned_ids(store)


def test_a_rewind_needs_a_disk_that_takes_its_record(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    (tmp_path / ".rewinds").write_text("in the way")
    with pytest.raises(StorageFailed):
        go_back(store, "checkpoint-1")
    assert (tmp_path / "checkpoint-2").is_dir() and not (tmp_path / "abandoned").exists()
