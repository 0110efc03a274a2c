"""Records of uploads are written by threads beside the saves, and swept by nobody meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mirror.made import run_at, saved
from unbroken.disk import LocalDisk
from unbroken.files import Files
from unbroken.loop.opening import _may_be_written
from unbroken.store.directory import Store
from unbroken.store.mirrored import Upload, mirrored_ids, record_upload, remote_name, write_mirrors
from unbroken.store.names import MIRROR, DraftName, scratch
from unbroken.store.sweep import plan_sweep

_OWN = 2


class _Interrupted(LocalDisk):
    """Another thread takes its turn before a scratch file gets its name."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], None] | None = None

    def link(self, source: Path, target: Path) -> None:
        turn, self.meanwhile = self.meanwhile, None
        if turn is not None:
            turn()
        super().link(source, target)


def test_two_mirrors_are_recorded_at_the_same_moment(tmp_path: Path) -> None:
    disk = _Interrupted()
    store = Store(tmp_path / "run" / "checkpoints", Files(disk))
    first, second = (Upload(f"file:///{each}", "id", "checkpoint-1", f"there-{each}", 1) for each in "ab")
    disk.meanwhile = lambda: record_upload(store, second, job="j0001_a", at_ns=1)
    record_upload(store, first, job="j0001_a", at_ns=1)
    for each in (first, second):
        assert mirrored_ids(store, each.mirror) == {"id"}
        assert remote_name(store, each.mirror, "id") == each.remote_name


@pytest.mark.parametrize(("job", "is_swept"), [("j0001_a", True), ("j0002_b", False), ("j0003_c", False)])
def test_a_save_does_not_sweep_the_scratch_of_its_own_uploads(tmp_path: Path, job: str, is_swept: bool) -> None:
    store = run_at(tmp_path / "run")
    saved(store, 10)
    write_mirrors(store, ["file:///a"], job="m")
    name = scratch(job, "upload-a")
    (store.path(MIRROR) / name).write_bytes(b"{}")
    plan = plan_sweep(store, [], is_live=lambda draft: _may_be_written(draft, _OWN))
    assert plan.leftovers == ((f"{MIRROR}/{name}",) if is_swept else ())


def test_a_save_sweeps_its_own_drafts_and_those_of_earlier_jobs() -> None:
    drafts = [DraftName(job, 10, 1) for job in ("j0001_a", "j0002_b", "j0003_c", "cli")]
    assert [_may_be_written(draft, _OWN) for draft in drafts] == [False, False, True, True]
