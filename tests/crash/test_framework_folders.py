"""A framework's checkpoint, under every crash and every power cut: there whole under its name, or not there."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.unit.store.saving import save
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.frameworks.dcp_storage import Writer
from unbroken.frameworks.folders import Folder, begin_folder, mark_checkpoints_here, publish_folder, write_latest
from unbroken.frameworks.framework_run import FrameworkRun
from unbroken.frameworks.lightning_leftovers import Leftovers, metadata_of, note_written
from unbroken.frameworks.lightning_links import FILE, Links
from unbroken.records.journal import Journal, read_history
from unbroken.records.layout import Layout
from unbroken.store.check import Level, verify
from unbroken.store.commit import Draft, Record, commit
from unbroken.store.directory import Store
from unbroken.store.manifest import Part
from unbroken.store.names import PERIODIC, DraftName
from unbroken.store.scan import scan
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states

RUN = Path("/run")
STAGED = DraftName("j0002_a", 7, 2)


def with_an_earlier_one() -> MemoryDisk:
    disk = MemoryDisk(["/run"])
    save(Store(RUN, Files(disk)), 4)
    return disk


def publishes(disk: Disk) -> None:
    files = Files(disk)
    store = Store(RUN, files)
    mark_checkpoints_here(Layout(RUN), job="j0002_a", files=files)
    begin_folder(store, STAGED)
    folder = store.path(str(STAGED)) / "checkpoint-7"
    files.make_directory(folder / "sub")
    # A framework syncs nothing.
    files.write_new(folder / "weights.bin", [bytes(300)], durable=False)
    files.write_new(folder / "sub" / "state.json", [b"{}"], durable=False)
    publish_folder(store, Folder(7, "some tool"), STAGED, lambda: None)
    write_latest(store, "checkpoint-7", job="j0002_a")


def found(disk: Disk) -> str:
    store = Store(RUN, Files(disk))
    assert verify(store, "checkpoint-4", Level.FULL).is_sound
    committed = set(scan(store).committed)
    if committed == {"checkpoint-4"}:
        # Nor is there a folder that the framework's own tools would take for one.
        assert not [name for name in scan(store).foreign if name.startswith("checkpoint-")]
        return "old"
    assert committed == {"checkpoint-4", "checkpoint-7"}
    return "new" if verify(store, "checkpoint-7", Level.FULL).is_sound else "damaged"


@pytest.mark.promise("X7", "C9")
def test_a_frameworks_checkpoint_is_there_whole_or_not_at_all() -> None:
    for trial in crash_points(with_an_earlier_one, publishes, (*KILLS, *ERRORS)):
        expected = ("new",) if trial.is_finished else ("old", "new")
        assert found(trial.disk) in expected, str(trial)
        for words, disk in crash_states(trial.disk):
            assert found(disk) in expected, f"{trial}, {words}"


class HeldRun:
    """A run as a writer of torch's kind knows it, without the lease and the records, which are on a real disk."""

    def __init__(self, disk: Disk) -> None:
        self.store, self.layout = Store(RUN, Files(disk)), Layout(RUN)
        self.world, self.lease = SimpleNamespace(is_first=True, rank=0), SimpleNamespace(job="j0002_a")

    def begin_draft(self, draft: Draft, *, coming_bytes: int, coming_files: int) -> None:
        draft.discard()
        begin_folder(self.store, draft.name)

    def commit_draft(self, draft: Draft, parts: list[Part], folder: Folder, *, called: str, **_: object) -> None:
        record = Record(PERIODIC, 1, origin=folder.origin)
        commit(draft, plan=[part.name for part in parts], parts=parts, record=record, called=called)


def saves_by_dcp(disk: Disk) -> None:
    run = cast("FrameworkRun", HeldRun(disk))
    writer = Writer(run, lambda step: Folder(step, "torch-dcp"), 7)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save({"weights": torch.arange(50.0)}, storage_writer=writer)
    except dcp.CheckpointException as failed:
        # Torch wraps what a rank raised, a kill too.
        raise next(iter(failed.failures.values()))[0] from None


@pytest.mark.promise("X7")
def test_what_dcp_saves_is_there_whole_or_not_at_all() -> None:
    for trial in crash_points(with_an_earlier_one, saves_by_dcp, (*KILLS, *ERRORS)):
        expected = ("new",) if trial.is_finished else ("old", "new")
        assert found(trial.disk) in expected, str(trial)
        for words, disk in crash_states(trial.disk):
            assert found(disk) in expected, f"{trial}, {words}"


MODELS = Path("/run/models")


def with_two_links() -> MemoryDisk:
    disk = MemoryDisk(["/run", "/run/models"])
    files = Files(disk)
    store = Store(RUN, files)
    save(store, 4)
    save(store, 7)
    for name in ("best.ckpt", "last.ckpt"):
        assert files.swap_link(MODELS / name, f"../checkpoint-4/{FILE}", scratch=".scratch")
    return disk


def links_anew(disk: Disk) -> None:
    links = Links(Store(RUN, Files(disk)), [MODELS], job="j0002_a")
    links.point(MODELS / "last.ckpt", "checkpoint-7")
    links.remove(MODELS / "best.ckpt")


@pytest.mark.promise("X7", "C11")
def test_a_link_of_a_model_checkpoint_leads_to_the_old_one_or_to_the_new_one() -> None:
    for trial in crash_points(with_two_links, links_anew, (*KILLS, *ERRORS)):
        for words, disk in [("now", trial.disk), *crash_states(trial.disk)]:
            links = Links(Store(RUN, Files(disk)), [MODELS], job="j0002_a")
            last, best = (links.name_of(MODELS / name) for name in ("last.ckpt", "best.ckpt"))
            assert last in ("checkpoint-4", "checkpoint-7") and best in ("checkpoint-4", None), f"{trial}, {words}"
            # The old one goes only when the new one is there.
            assert best is not None or last == "checkpoint-7", f"{trial}, {words}"


BEST, GIVEN_UP, LATER, OF_THE_USER = (MODELS / f"{name}.ckpt" for name in ("best", "given_up", "later", "mine"))


def with_paths_given_up() -> MemoryDisk:
    """A job that was killed after the commit of a save and before what it gave up was removed."""
    disk = with_two_links()
    files = Files(disk)
    save(Store(RUN, files), 9, metadata=metadata_of([f"models/{path.name}" for path in (BEST, GIVEN_UP, OF_THE_USER)]))
    for path in (GIVEN_UP, OF_THE_USER):
        files.write_new(path, [b"weights"])
    journal = Journal(Layout(RUN), 1, clock=float, files=files)
    note_written(journal.write, files, GIVEN_UP, RUN, 4)
    journal.close()
    disk.sync_all()
    return disk


def removes_what_was_given_up(disk: Disk) -> None:
    files = Files(disk)
    store = Store(RUN, files)
    events = read_history(Layout(RUN), files).events
    left = Leftovers(Links(store, [MODELS], job="j0002_a"), files, RUN, events, 9)
    left.remove_given_up(store.read_manifest("checkpoint-9"), held=set())


def notes_a_file(disk: Disk) -> None:
    files = Files(disk)
    files.write_new(LATER, [b"weights"])
    note_written(Journal(Layout(RUN), 2, clock=float, files=files).write, files, LATER, RUN, 10)


@pytest.mark.promise("X7", "C11")
@pytest.mark.parametrize("act", [removes_what_was_given_up, notes_a_file])
def test_what_a_save_gave_up_is_removed_after_any_crash_and_no_other_file(act: Callable[[Disk], object]) -> None:
    for trial in crash_points(with_paths_given_up, act, (*KILLS, *ERRORS)):
        for words, disk in [("now", trial.disk), *crash_states(trial.disk)]:
            files = Files(disk)
            for _ in range(2):
                assert files.read_bytes(OF_THE_USER, limit_bytes=100) == b"weights", f"{trial}, {words}"
                removes_what_was_given_up(disk)
            assert files.find(BEST) is None, f"{trial}, {words}"
            # A power cut gives files of this model another identity: then it stays, as a file of somebody's.
            assert files.find(GIVEN_UP) is None or disk is not trial.disk, f"{trial}, {words}"
