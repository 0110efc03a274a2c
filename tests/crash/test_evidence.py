"""A commit is made from evidence, and a sweep removes nothing that is not known to be ours."""

from collections.abc import Callable

import pytest

from tests.crash.scenes import PARTS, ROOT, content, look, nobody_is_live, save
from unbroken.errors import EvidenceMissing, StorageFailed, UnsafeName
from unbroken.files import Files
from unbroken.store.commit import Draft, Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.manifest import Part
from unbroken.store.names import PERIODIC
from unbroken.store.scan import scan
from unbroken.store.sweep import sweep
from unbroken.testing import MemoryDisk

Parts = list[Part]


def _store() -> Store:
    store = Store(ROOT, Files(MemoryDisk()))
    save(store, 10, "a")
    return store


def _drafted(store: Store, job: str) -> tuple[Draft, Parts]:
    draft = begin(store, step=20, job=job)
    return draft, [draft.write_part(part, [content(20, job, part)]) for part in PARTS]


def _unreported(draft: Draft, parts: Parts) -> Parts:
    return parts[1:]


def _removed(draft: Draft, parts: Parts) -> Parts:
    draft.store.files.remove_file(draft.path / PARTS[0])
    return parts


def _shortened(draft: Draft, parts: Parts) -> Parts:
    draft.store.files.remove_file(draft.path / PARTS[0])
    draft.store.files.write_new(draft.path / PARTS[0], [content(20, "b", PARTS[0])[:-1]])
    return parts


def _uninvited(draft: Draft, parts: Parts) -> Parts:
    draft.store.files.write_new(draft.path / "state" / "extra", [b"?"])
    return parts


def _not_planned(draft: Draft, parts: Parts) -> Parts:
    return [*parts, draft.write_part("extra", [b"?"])]


def _twice(draft: Draft, parts: Parts) -> Parts:
    return [*parts, parts[0]]


def _a_link(draft: Draft, parts: Parts) -> Parts:
    draft.store.files.remove_file(draft.path / PARTS[2])
    draft.store.files.disk.make_symlink(".metadata", draft.path / PARTS[2])
    return parts


@pytest.mark.promise("C2", "M26")
@pytest.mark.parametrize(
    "spoil", [_unreported, _removed, _shortened, _uninvited, _not_planned, _twice, _a_link], ids=lambda f: f.__name__
)
def test_a_commit_without_evidence_is_refused_and_the_next_one_works(spoil: Callable[[Draft, Parts], Parts]) -> None:
    store = _store()
    draft, parts = _drafted(store, "b")
    reported = spoil(draft, parts)
    with pytest.raises(EvidenceMissing):
        commit(draft, plan=PARTS, parts=reported, record=Record(kind=PERIODIC, saved_at_ns=2))
    assert scan(store).committed == ("checkpoint-10",)
    save(store, 20, "b", live=nobody_is_live)
    assert look(store) == ((20, "b"), ())


@pytest.mark.parametrize("name", ["../stolen", "state/../../stolen", "/etc/passwd", "a//b", "manifest.json", ""])
def test_a_part_cannot_be_written_outside_its_draft(name: str) -> None:
    draft = begin(_store(), step=20, job="b")
    with pytest.raises(UnsafeName):
        draft.write_part(name, [b"?"])


def test_a_part_is_not_written_where_the_draft_is_not_seen() -> None:
    store = _store()
    draft = begin(store, step=20, job="b")
    draft.discard()
    with pytest.raises(StorageFailed, match="draft"):
        draft.write_part(PARTS[0], [b"?"])


@pytest.mark.promise("C17")
@pytest.mark.parametrize("name", ["notes.txt", "state/notes.txt", "mine/notes.txt"])
def test_a_checkpoint_with_a_users_file_in_it_is_left_whole(name: str) -> None:
    store = _store()
    mine = store.path("checkpoint-10") / name
    store.files.make_directory(mine.parent)
    store.files.write_new(mine, [b"mine"])
    save(store, 20, "b", policies=[LastK(1)])
    save(store, 30, "c", policies=[LastK(1)])
    assert store.files.read_bytes(mine, limit_bytes=9) == b"mine"
    assert scan(store).committed == ("checkpoint-10", "checkpoint-30")
    assert sweep(store, ["checkpoint-10"], is_live=nobody_is_live).left[0][0] == "checkpoint-10"


@pytest.mark.promise("C17")
def test_a_sweep_refuses_to_remove_a_users_folder() -> None:
    store = _store()
    store.files.make_directory(store.path("my-experiment"))
    swept = sweep(store, ["my-experiment", "../checkpoints/checkpoint-10", "quarantine"], is_live=nobody_is_live)
    assert not swept.checkpoints
    assert len(swept.left) == 3
    assert scan(store).committed == ("checkpoint-10",)
    assert store.files.find(store.path("my-experiment")) is not None
