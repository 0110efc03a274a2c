"""``latest`` is a hint: whatever it says, a resume takes the newest checkpoint that verifies."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.scenes import PARTS, ROOT, look, save
from unbroken.files import Files
from unbroken.store.check import Level
from unbroken.store.choose import resume_point
from unbroken.store.directory import Store
from unbroken.store.names import LATEST
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.testing import FaultyDisk, Kill, Killed, MemoryDisk, Operation


def _store() -> Store:
    store = Store(ROOT, Files(MemoryDisk()))
    save(store, 10, "a")
    save(store, 20, "b")
    return store


def _missing(store: Store) -> None:
    store.files.remove_file(store.path(LATEST))


def _pointing_at(target: str) -> Callable[[Store], None]:
    def point(store: Store) -> None:
        store.files.swap_link(store.path(LATEST), target, scratch=".scratch-x-latest")

    return point


def _a_file(store: Store) -> None:
    _missing(store)
    store.files.write_new(store.path(LATEST), [b"global_step10"])


@pytest.mark.promise("K2")
@pytest.mark.parametrize(
    "spoil",
    [
        _missing,
        _pointing_at("checkpoint-10"),
        _pointing_at("checkpoint-999"),
        _pointing_at("/etc"),
        _pointing_at("../.."),
        _pointing_at("latest"),
        _a_file,
    ],
    ids=["missing", "older", "dangling", "absolute", "climbing", "to itself", "another tool's file"],
)
def test_a_resume_takes_the_newest_whatever_latest_says(spoil: Callable[[Store], None]) -> None:
    store = _store()
    spoil(store)
    assert look(store) == ((20, "b"), ())
    save(store, 30, "c")
    assert look(store) == ((30, "c"), ())


@pytest.mark.promise("K2")
def test_latest_points_at_a_name_beside_it_so_that_a_moved_run_still_resumes() -> None:
    store = _store()
    assert store.files.read_link(store.path(LATEST)) == "checkpoint-20"
    moved = Path("/elsewhere")
    store.files.disk.rename(ROOT, moved)
    assert look(Store(moved, store.files)) == ((20, "b"), ())


@pytest.mark.promise("K2")
def test_latest_never_points_at_what_is_not_committed() -> None:
    def swap_of_latest(operation: Operation) -> Kill | None:
        is_swap = operation.name == "rename" and operation.path.name == LATEST
        return Kill("before") if is_swap else None

    store = _store()
    with pytest.raises(Killed):
        save(Store(ROOT, Files(FaultyDisk(store.files.disk, swap_of_latest))), 30, "c")
    assert store.files.read_link(store.path(LATEST)) == "checkpoint-20"
    assert look(store) == ((30, "c"), ())


@pytest.mark.promise("K4")
def test_a_damaged_newest_one_costs_one_look_and_is_kept_with_its_reason() -> None:
    store = _store()
    rotten = store.path("checkpoint-20") / PARTS[1]
    was = store.files.read_bytes(rotten, limit_bytes=1 << 20)
    store.files.remove_file(rotten)
    store.files.write_new(rotten, [bytes([was[0] ^ 1]), was[1:]])
    assert look(store) == ((10, "a"), ("checkpoint-20",))
    assert look(store) == ((10, "a"), ())
    aside = store.path("quarantine/checkpoint-20")
    assert store.files.read_bytes(aside / PARTS[0], limit_bytes=1 << 20)
    assert b"are not the bytes that were written" in store.files.read_bytes(
        store.path("quarantine/checkpoint-20.reason.json"), limit_bytes=1 << 20
    )


@pytest.mark.promise("K5")
def test_after_a_rewind_a_crash_and_a_new_branch_the_abandoned_one_is_never_chosen() -> None:
    def first_move(operation: Operation) -> Kill | None:
        return Kill("before") if operation.name == "rename" and "abandoned" in operation.path.parts else None

    store = _store()
    save(store, 30, "c")
    dying = Store(ROOT, Files(FaultyDisk(store.files.disk, first_move)))
    with pytest.raises(Killed):
        rewind(dying, newest_first(store, scan(store).committed), target="checkpoint-10", job="d", at_ns=1)
    assert look(store) == ((10, "a"), ())
    save(store, 20, "branch")
    assert look(store) == ((20, "branch"), ())
    choice = resume_point(store, Level.FULL, job="e", at_ns=2)
    assert choice.chosen is not None and choice.skipped == ()
