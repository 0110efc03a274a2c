"""What a scan calls each thing it finds, and the order of the committed."""

from pathlib import Path

import pytest

from tests.unit.store.saving import save, store_with
from unbroken.errors import RecordDamaged
from unbroken.store.choose import quarantine
from unbroken.store.commit import begin
from unbroken.store.directory import Store
from unbroken.store.names import FINAL, SHUTDOWN, DraftName, scratch, trash_name
from unbroken.store.rewind import record_rewind, rewind
from unbroken.store.scan import Inventory, Leftover, newest_first, scan
from unbroken.store.seal import seal


def test_a_store_that_does_not_exist_is_empty(tmp_path: Path) -> None:
    assert scan(Store(tmp_path / "nothing")) == Inventory()


def test_every_kind_of_entry_is_distinguished(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    begin(store, step=4, job="j9")
    quarantine(store, "checkpoint-1", ("why",), job="j1", at_ns=1)
    rewind(store, newest_first(store, scan(store).committed), target="checkpoint-2", job="j1", at_ns=1)
    (tmp_path / trash_name("checkpoint-0")).mkdir()
    (tmp_path / scratch("j9", "latest")).write_text("")
    (tmp_path / "quarantine" / scratch("j9", "reason")).write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("")
    (tmp_path / "latest").symlink_to("checkpoint-2")
    found = scan(store)
    assert found.committed == ("checkpoint-2",)
    assert [str(torn.name) for torn in found.torn] == [str(DraftName("j9", 4, 1))]
    assert found.quarantined == ("checkpoint-1",)
    assert found.abandoned == ("abandoned/checkpoint-3",)
    assert found.foreign == ("notes", "readme.txt")
    assert found.latest == "checkpoint-2"
    assert found.leftover == (
        Leftover(scratch("j9", "latest"), "j9"),
        Leftover(trash_name("checkpoint-0"), None),
        Leftover(f"quarantine/{scratch('j9', 'reason')}", "j9"),
    )


def test_a_sealed_folder_counts_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "global_step7" / "w.pt").write_bytes(b"1")
    assert scan(Store(tmp_path)).foreign == ("global_step7",)
    seal(Store(tmp_path), "global_step7", at_ns=1)
    assert scan(Store(tmp_path)).committed == ("global_step7",)


def test_another_tools_manifest_makes_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "web-app").mkdir()
    (tmp_path / "web-app" / "manifest.json").write_text('{"name": "app"}')
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "manifest.json").write_text("{")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "manifest.json").symlink_to("../web-app/manifest.json")
    assert scan(Store(tmp_path)).foreign == ("linked", "short", "web-app")


def test_a_ruined_manifest_under_our_name_is_a_checkpoint_to_be_judged(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / "checkpoint-1" / "manifest.json").write_bytes(b"")
    assert scan(store).committed == ("checkpoint-1",)


@pytest.mark.promise("M21")
def test_a_folder_under_our_name_without_a_manifest_is_not_listed(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2" / "manifest.json").unlink()
    assert scan(store).committed == ("checkpoint-1",)


def test_a_file_called_latest_is_foreign_and_a_link_is_ours(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    assert scan(Store(tmp_path)).foreign == ("latest",)
    assert scan(Store(tmp_path)).latest is None


def test_a_link_to_a_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / "checkpoint-9").symlink_to("checkpoint-1")
    assert scan(store).committed == ("checkpoint-1",)
    assert scan(store).foreign == ("checkpoint-9",)


def test_a_rewind_that_did_not_finish_moving_still_counts(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    ids = {"checkpoint-2": store.read_manifest("checkpoint-2").id}
    record_rewind(store, target="checkpoint-1", abandoned=ids, job="j1", at_ns=1)
    assert scan(store).committed == ("checkpoint-1",)
    assert scan(store).abandoned == ("checkpoint-2",)


def test_a_record_of_a_rewind_that_cannot_be_read_stops_the_scan(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / ".rewinds").mkdir()
    (tmp_path / ".rewinds" / "000001.json").write_text("{}")
    with pytest.raises(RecordDamaged, match="rewind"):
        scan(store)


def test_the_newest_step_comes_first_as_a_number_not_as_text(tmp_path: Path) -> None:
    store = store_with(tmp_path, 9, 10, 100)
    assert newest_first(store, scan(store).committed) == ["checkpoint-100", "checkpoint-10", "checkpoint-9"]


def test_of_one_step_the_last_committed_comes_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 5, at_ns=30)
    save(store, 5, at_ns=20)
    save(store, 5, kind=SHUTDOWN, at_ns=40)
    save(store, 5, kind=FINAL, at_ns=10)
    assert newest_first(store, scan(store).committed) == [
        "checkpoint-5-shutdown",
        "checkpoint-5",
        "checkpoint-5.2",
        "final",
    ]


def test_what_does_not_tell_its_step_is_looked_at_first(tmp_path: Path) -> None:
    store = store_with(tmp_path, 5, 6)
    save(store, 7, kind=FINAL)
    (tmp_path / "final" / "manifest.json").write_bytes(b"ruined")
    (tmp_path / "checkpoint-6" / "manifest.json").write_bytes(b"ruined")
    assert newest_first(store, scan(store).committed) == ["final", "checkpoint-6", "checkpoint-5"]
