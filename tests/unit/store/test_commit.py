"""A commit is computed from evidence: what is planned, reported and on disk must be the same."""

import os
from pathlib import Path

import pytest

from tests.unit.store.saving import save, tree
from unbroken.errors import EvidenceMissing, LeaseLost, ManifestDamaged, StorageFailed, UnsafeName
from unbroken.files import LOCAL
from unbroken.store.commit import Draft, Record, begin, commit, point_latest, walk_files
from unbroken.store.digest import digest_of
from unbroken.store.directory import Store
from unbroken.store.manifest import Part
from unbroken.store.names import FINAL, PERIODIC, SHUTDOWN, DraftName
from unbroken.store.scan import scan

RECORD = Record(kind=PERIODIC, saved_at_ns=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


@pytest.fixture
def draft(store: Store) -> Draft:
    return begin(store, step=5, job="j1")


def refused(draft: Draft, plan: list[str], parts: list[Part], *words: str) -> None:
    with pytest.raises(EvidenceMissing) as missing:
        commit(draft, plan=plan, parts=parts, record=RECORD)
    for word in words:
        assert word in "\n".join(missing.value.missing)
    assert scan(draft.store).committed == ()


@pytest.mark.promise("G3")
def test_a_checkpoint_exists_only_after_its_commit(store: Store, draft: Draft) -> None:
    part = draft.write_part("state/a", [b"bytes"])
    assert scan(store).committed == ()
    assert commit(draft, plan=["state/a"], parts=[part], record=RECORD) == "checkpoint-5"
    assert scan(store).committed == ("checkpoint-5",)
    assert scan(store).torn == ()
    assert store.read_manifest("checkpoint-5").parts == (part,)


def test_an_unreported_planned_part_is_named(draft: Draft) -> None:
    part = draft.write_part("a", [b"1"])
    refused(draft, ["a", "b"], [part], "b: planned and not reported")


def test_a_reported_part_that_is_not_on_disk_is_named(draft: Draft) -> None:
    refused(draft, ["a"], [Part("a", digest_of([b"1"]))], "a: reported and not on disk")


def test_an_unreported_part_on_disk_is_named(draft: Draft) -> None:
    part = draft.write_part("a", [b"1"])
    draft.write_part("deep/b", [b"2"])
    refused(draft, ["a"], [part], "deep/b: on disk and not reported")


def test_a_reported_part_that_was_not_planned_is_named(draft: Draft) -> None:
    refused(draft, ["a"], [draft.write_part("a", [b"1"]), draft.write_part("b", [b"2"])], "b: reported and not planned")


def test_a_part_of_another_size_is_named_with_both(draft: Draft) -> None:
    part = draft.write_part("a", [b"12345"])
    (draft.path / "a").write_bytes(b"123")
    refused(draft, ["a"], [part], "a: 3 bytes on disk, 5 reported")


def test_a_part_reported_twice_is_refused(draft: Draft) -> None:
    part = draft.write_part("a", [b"1"])
    refused(draft, ["a"], [part, part], "reported twice")


def test_a_link_in_place_of_a_part_is_no_evidence(draft: Draft) -> None:
    part = draft.write_part("a", [b"1"])
    (draft.path / "a").rename(draft.store.root / "elsewhere")
    (draft.path / "a").symlink_to(draft.store.root / "elsewhere")
    refused(draft, ["a"], [part], "a: ")


def test_a_checkpoint_of_nothing_is_refused(draft: Draft) -> None:
    refused(draft, [], [], "no part was planned")


def test_the_fence_is_checked_last_and_stops_the_commit(store: Store, draft: Draft) -> None:
    part = draft.write_part("a", [b"1"])
    seen: list[bool] = []

    def fence() -> None:
        seen.append((draft.path / "manifest.json").exists())
        raise LeaseLost(path=store.root, mine=1, current=2)

    with pytest.raises(LeaseLost):
        commit(draft, plan=["a"], parts=[part], record=RECORD, fence=fence)
    assert seen == [True]
    assert scan(store).committed == ()


@pytest.mark.parametrize(
    "record",
    [
        Record(kind="weekly", saved_at_ns=1),
        Record(kind=PERIODIC, saved_at_ns=-1),
        Record(kind=PERIODIC, saved_at_ns=1 << 63),
    ],
    ids=["kind", "negative", "far"],
)
def test_what_no_reader_would_take_is_not_committed(store: Store, draft: Draft, record: Record) -> None:
    part = draft.write_part("a", [b"1"])
    with pytest.raises(ManifestDamaged):
        commit(draft, plan=["a"], parts=[part], record=record)
    assert scan(store).committed == ()


def test_the_same_step_saved_twice_keeps_both(store: Store) -> None:
    names = [save(store, 5, at_ns=at) for at in (1, 2, 3)]
    assert names == ["checkpoint-5", "checkpoint-5.2", "checkpoint-5.3"]
    ids = {store.read_manifest(name).id for name in names}
    assert len(ids) == 3


def test_kinds_have_their_own_names(store: Store) -> None:
    assert [save(store, 9, kind=kind) for kind in (SHUTDOWN, FINAL, FINAL)] == [
        "checkpoint-9-shutdown",
        "final",
        "final.2",
    ]


def test_a_users_folder_under_our_name_is_left_alone(store: Store) -> None:
    (store.root / "checkpoint-5").mkdir(parents=True)
    (store.root / "checkpoint-5" / "mine.txt").write_text("mine")
    assert save(store, 5) == "checkpoint-5.2"
    assert tree(store.root / "checkpoint-5") == {"mine.txt": b"mine"}


def test_two_attempts_of_one_job_at_one_step_have_their_own_drafts(store: Store) -> None:
    first, second = begin(store, step=5, job="j1"), begin(store, step=5, job="j1")
    assert (str(first.name), str(second.name)) == (str(DraftName("j1", 5, 1)), str(DraftName("j1", 5, 2)))
    second.discard()
    assert first.path.is_dir() and not second.path.exists()


def test_a_writer_that_does_not_see_the_draft_reports_it(draft: Draft) -> None:
    draft.path.rmdir()
    with pytest.raises(StorageFailed, match="every rank must see the same directory"):
        draft.write_part("a", [b"1"])
    assert not draft.path.exists()


@pytest.mark.parametrize("name", ["../a", "/a", "manifest.json", "a/../../b"])
def test_a_part_cannot_be_written_outside_the_draft(draft: Draft, name: str) -> None:
    with pytest.raises(UnsafeName):
        draft.write_part(name, [b"1"])
    assert tree(draft.store.root) == {draft.path.name: ""}


@pytest.mark.parametrize("job", ["", "a-b", "../x", "x" * 65])
def test_a_job_that_does_not_fit_into_a_name_is_our_callers_bug(store: Store, job: str) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        begin(store, step=1, job=job)


@pytest.mark.promise("K2")
def test_latest_is_relative_and_follows_every_commit(store: Store) -> None:
    for step in (1, 2):
        assert point_latest(store, save(store, step), job="j1")
        assert (store.root / "latest").readlink() == Path(f"checkpoint-{step}")
    assert sorted(path.name for path in store.root.iterdir()) == ["checkpoint-1", "checkpoint-2", "latest"]


def test_another_tools_file_called_latest_is_left_alone(store: Store) -> None:
    name = save(store, 1)
    (store.root / "latest").write_text("global_step1")
    assert not point_latest(store, name, job="j1")
    assert (store.root / "latest").read_text() == "global_step1"


def test_walking_goes_as_deep_as_a_path_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    Path("f").write_bytes(b"1")
    assert dict(walk_files(LOCAL, tmp_path)) == {"d/" * 1500 + "f": 1}
    # Taken down from within: what removes a directory for pytest goes no deeper than Python's own stack.
    Path("f").unlink()
    for _ in range(1500):
        os.chdir("..")
        os.rmdir("d")


def test_walking_names_every_file_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_bytes(b"123")
    (tmp_path / "z").write_bytes(b"1")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert dict(walk_files(LOCAL, tmp_path)) == {"a/b/f": 3, "z": 1, "loop": None}
