"""What a sweep removes, what it never touches, and in which order."""

from pathlib import Path

import pytest

from tests.unit.store.saving import everybody, nobody, save, store_with, tree
from unbroken.store.commit import begin
from unbroken.store.directory import Store
from unbroken.store.keep import LastK
from unbroken.store.mirrored import record_upload, upload_of, write_mirrors
from unbroken.store.names import DraftName, scratch, trash_name
from unbroken.store.rewind import record_rewind
from unbroken.store.scan import scan
from unbroken.store.sweep import candidates, carry_out, pin, pinned_ids, plan_sweep, settle, sweep, unpin


def test_released_checkpoints_go_and_others_stay(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    plan = sweep(store, ["checkpoint-1", "checkpoint-2"], is_live=nobody)
    assert plan.names == ("checkpoint-1", "checkpoint-2")
    assert plan.freed_bytes == 2 * store.read_manifest("checkpoint-3").size_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


@pytest.mark.promise("C17")
def test_a_checkpoint_with_a_foreign_file_inside_is_left_whole_and_named(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    (tmp_path / "checkpoint-1" / "state" / "my-notes.txt").write_text("mine")
    before = tree(tmp_path)
    plan = sweep(store, ["checkpoint-1"], is_live=nobody)
    assert plan.left == (("checkpoint-1", "it holds a file that is not ours: state/my-notes.txt"),)
    assert tree(tmp_path) == before


@pytest.mark.promise("C17")
def test_a_users_own_files_survive_every_sweep(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    (tmp_path / "my-run" / "sub").mkdir(parents=True)
    (tmp_path / "my-run" / "sub" / "weights.pt").write_bytes(b"mine")
    (tmp_path / "checkpoint-77").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").symlink_to("/")
    before = {name: kept for name, kept in tree(tmp_path).items() if not name.startswith(("checkpoint-1", "latest"))}
    settle(store, "checkpoint-2", [LastK(1)], job="j1", is_live=nobody)
    after = {name: kept for name, kept in tree(tmp_path).items() if name != "latest"}
    assert after == before


@pytest.mark.promise("U17")
def test_a_users_dot_names_survive_every_sweep(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    mine = (".trash-x", ".trash-checkpoint-9", ".tmp-a-3-1", ".tmp-run_2-10-1", ".scratch-notes-a", ".scratch-j1-x")
    forged = (f".trash-x~{'0' * 8}", f".tmp-a-3-1~{'f' * 8}", str(DraftName("a", 3, 1)) + "x")
    for name in (*mine, *forged):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    # A folder under a name of our scratch files holds what no writer of ours made.
    (tmp_path / scratch("j0001_a", "latest")).mkdir()
    before = tree(tmp_path)
    plan = sweep(store, [], is_live=nobody)
    assert plan.names == () and tree(tmp_path) == before


@pytest.mark.promise("U17")
def test_leftovers_of_an_earlier_version_are_swept_where_they_are_ours(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-1").rename(tmp_path / ".trash-checkpoint-1")
    (tmp_path / "checkpoint-2").rename(tmp_path / ".trash-checkpoint-2")
    (tmp_path / ".trash-checkpoint-2" / "notes.txt").write_text("mine")
    (tmp_path / ".tmp-j0004_0a1b2c3d-7-1" / "state").mkdir(parents=True)
    (tmp_path / ".scratch-j0004_0a1b2c3d-latest").symlink_to("checkpoint-1")
    sweep(store, [], is_live=nobody)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".trash-checkpoint-2", "checkpoint-3"]


def test_a_name_that_is_no_checkpoint_is_never_removed(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / "mine").mkdir()
    plan = sweep(store, ["mine", "nothing", "../x"], is_live=nobody)
    assert plan.names == () and len(plan.left) == 3
    assert (tmp_path / "mine").is_dir()


def test_a_checkpoint_with_an_unverified_manifest_is_left_alone(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    (tmp_path / "checkpoint-1" / "manifest.json").write_bytes(b"ruined")
    plan = sweep(store, ["checkpoint-1"], is_live=nobody)
    assert plan.names == () and "manifest-damaged" in plan.left[0][1]


def test_drafts_of_dead_jobs_go_and_those_of_live_jobs_stay(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    begin(store, step=2, job="dead").write_part("a", [b"123"])
    live = begin(store, step=2, job="live")
    plan = sweep(store, [], is_live=lambda draft: draft.job == "live")
    assert plan.drafts == {str(DraftName("dead", 2, 1)): 3}
    assert plan.left == ((str(DraftName("live", 2, 1)), "its job may still be writing it"),)
    assert live.path.is_dir() and not (tmp_path / str(DraftName("dead", 2, 1))).exists()


def test_leftovers_go_unless_their_job_may_still_use_them(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    (tmp_path / trash_name("checkpoint-0")).mkdir()
    (tmp_path / trash_name("checkpoint-0") / "part").write_bytes(b"1")
    (tmp_path / scratch("live", "latest")).symlink_to("checkpoint-1")
    (tmp_path / scratch("dead", "latest")).symlink_to("checkpoint-1")
    plan = sweep(store, [], is_live=lambda draft: draft == DraftName("live", 0, 0))
    assert plan.leftovers == (scratch("dead", "latest"), trash_name("checkpoint-0"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [scratch("live", "latest"), "checkpoint-1"]


def test_planning_changes_nothing(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    begin(store, step=3, job="dead")
    before = tree(tmp_path)
    plan = plan_sweep(store, ["checkpoint-1"], is_live=nobody)
    assert tree(tmp_path) == before
    carry_out(store, plan)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_sweep_finishes_a_rewind_that_was_cut_short(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2)
    record_rewind(
        store,
        target="checkpoint-1",
        abandoned={"checkpoint-2": store.read_manifest("checkpoint-2").id},
        job="j1",
        at_ns=1,
    )
    plan = sweep(store, [], is_live=everybody)
    assert plan.unfinished_rewind == ("checkpoint-2",)
    assert scan(store).abandoned == ("abandoned/checkpoint-2",)


def test_a_checkpoint_that_lacks_a_part_is_no_candidate_for_keeping(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-2" / "manifest.json").write_bytes(b"ruined")
    found = {c.name: c.is_usable for c in candidates(store, scan(store).committed)}
    assert found == {"checkpoint-1": True, "checkpoint-2": False, "checkpoint-3": False}


@pytest.mark.promise("C17", "G6")
def test_settling_points_the_hint_keeps_and_sweeps(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1, 2, 3)
    pin(store, "checkpoint-1", reason="paper", job="cli", at_ns=1)
    name = save(store, 4)
    write_mirrors(store, ["file:///shared/a"], job="j1")
    for copied in ("checkpoint-1", "checkpoint-3", name):
        manifest = store.read_manifest(copied)
        record_upload(store, upload_of("file:///shared/a", manifest, copied, copied), job="j1", at_ns=1)
    decision, plan = settle(store, name, [LastK(1)], job="j1", is_live=nobody)
    assert plan.names == decision.released == ("checkpoint-3",)
    assert decision.kept["checkpoint-2"] == ("not yet mirrored",)
    assert decision.held == ("checkpoint-2",)
    assert (tmp_path / "latest").readlink() == Path("checkpoint-4")


def test_a_pin_is_on_the_checkpoint_and_not_on_its_name(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    assert pin(store, "checkpoint-1", reason="", job="cli", at_ns=1)
    assert not pin(store, "checkpoint-1", reason="", job="cli", at_ns=2)
    (tmp_path / "checkpoint-1").rename(tmp_path / "gone")
    save(store, 1, at_ns=77)
    assert [c.is_pinned for c in candidates(store, ["checkpoint-1", "gone"])] == [False, True]
    assert not unpin(store, "checkpoint-1")
    assert unpin(store, "gone") and pinned_ids(store) == frozenset()


def test_a_store_without_pins_has_none(tmp_path: Path) -> None:
    assert pinned_ids(Store(tmp_path)) == frozenset()
