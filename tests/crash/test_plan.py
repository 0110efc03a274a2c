"""Builders of plans killed at every operation, beside each other, and on disks that forget: nothing blocks the next."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash.plan_driver import GROUP_ENTRIES, SHARDS, build
from tests.unit.data.counted import index_of
from unbroken.data.packing import groups
from unbroken.data.packing.bucket_plan import PlanCache
from unbroken.data.packing.group_plan import PlanDamaged, Recipe, build_group, decode_plan, encode_plan
from unbroken.data.packing.groups import Span
from unbroken.disk import Disk
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.testing import ERRORS, Kill, MemoryDisk, crash_points, crash_states, tree

REPOSITORY = Path(__file__).parents[2]
RECIPE = Recipe(64, 8, packing=True)
SPAN = Span(0, 0, SHARDS[0].entries, 0, SHARDS[0].tokens)
WHOLE = encode_plan(build_group((SPAN,), SHARDS, RECIPE, index_of(SHARDS)))
FOLDER = Path("/cache/plans")
PLAN = FOLDER / "0123.plan"


def _cache(disk: Disk, token: str) -> PlanCache:
    return PlanCache(SHARDS, RECIPE, FOLDER, Files(disk), index_of(SHARDS), token)


def an_empty_cache() -> MemoryDisk:
    """A disk with nothing on it."""
    return MemoryDisk([Path("/")])


def puts_a_plan(disk: Disk) -> None:
    """Make the folder, put a plan there, clear away what others left."""
    _cache(disk, "mine").put(PLAN, WHOLE)
    _cache(disk, "mine").clear_scratch({PLAN.name})


def a_cache_with_scratch() -> MemoryDisk:
    """A cache in which a builder was killed."""
    disk = MemoryDisk([FOLDER])
    plan = build(FOLDER.parent, Files(disk))
    Files(disk).write_new(FOLDER / f".{plan.digest_of(0)}.plan-dead.tmp", [WHOLE[:99]])
    for node in Files(disk).list_directory(FOLDER):
        if node.name.endswith(".json"):
            Files(disk).remove_file(FOLDER / node.name)
    disk.sync_all()
    return disk


def opens_a_plan(disk: Disk) -> None:
    """Build every group anew, then the summary, and clear away what the killed one left."""
    build(FOLDER.parent, Files(disk), token="mine")


def _is_there(disk: MemoryDisk) -> bool:
    """Whether a reader takes what stands under the plan's name for a plan; then it must be this one."""
    files = Files(disk)
    if files.find(PLAN) is None:
        return False
    found = files.read_bytes(PLAN, limit_bytes=1 << 30)
    try:
        decode_plan(memoryview(found))
    except PlanDamaged:
        return False
    assert found == WHOLE
    return True


@pytest.mark.promise("X7")
def test_after_every_crash_a_plan_is_whole_or_refused_and_the_next_builder_gets_through() -> None:
    seen = set[bool]()
    for trial in crash_points(an_empty_cache, puts_a_plan, (Kill("before"), Kill("during"), Kill("after"), *ERRORS)):
        assert trial.raised is None or not isinstance(trial.raised, OSError) or isinstance(trial.raised, StorageFailed)
        for words, disk in (("the process was killed", trial.disk), *crash_states(trial.disk)):
            seen.add(_is_there(disk))
            successor = _cache(disk, "other")
            successor.put(PLAN, WHOLE)
            successor.clear_scratch({PLAN.name})
            assert _is_there(disk), (str(trial), words)
            assert [node.name for node in Files(disk).list_directory(FOLDER)] == [PLAN.name], (str(trial), words)
    assert seen == {True, False}


def _kept(disk: MemoryDisk, *, scratch: bool) -> dict[str, str | bytes | None]:
    return {name: data for name, data in tree(disk).items() if name.endswith(".tmp") == scratch}


@pytest.mark.promise("X7")
def test_after_every_crash_of_an_opening_the_next_one_finishes_and_clears_up() -> None:
    finished = a_cache_with_scratch()
    opens_a_plan(finished)
    for trial in crash_points(a_cache_with_scratch, opens_a_plan, (Kill("before"), Kill("during"))):
        for words, disk in (("the process was killed", trial.disk), *crash_states(trial.disk)):
            was_finished = _kept(disk, scratch=False) == tree(finished)
            build(FOLDER.parent, Files(disk), token="other")
            if not was_finished:
                assert tree(disk) == tree(finished), (str(trial), words)
            assert _kept(disk, scratch=False) == tree(finished), (str(trial), words)


def _run(cache: Path, nth: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.crash.plan_driver", str(cache), str(nth)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((cache / "plans").iterdir())}


@pytest.mark.promise("C13")
def test_a_builder_killed_at_any_operation_leaves_nothing_that_blocks_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "GROUP_ENTRIES", GROUP_ENTRIES)
    assert build(tmp_path / "undisturbed", LOCAL).groups == 2
    left_scratch = 0
    nth, killed = 0, True
    while killed:
        nth += 1
        cache = tmp_path / str(nth)
        struck = _run(cache, nth)
        struck.communicate()
        killed = struck.returncode == -signal.SIGKILL
        left_scratch += any(name.startswith(".") for name in _files(cache)) if (cache / "plans").exists() else 0
        build(cache, LOCAL)
        assert _files(cache) == _files(tmp_path / "undisturbed")
    # Two groups and a summary, each created, written and renamed; some kills leave a scratch file behind.
    assert nth > 9
    assert left_scratch >= 3


def test_builders_beside_each_other_do_not_disturb_each_other(tmp_path: Path) -> None:
    together = [_run(tmp_path / "shared") for _ in range(4)]
    ends = [each.communicate() for each in together]
    assert [each.returncode for each in together] == [0] * 4, ends
    assert len({said for said, _ in ends}) == 1
    _run(tmp_path / "alone").communicate()
    assert _files(tmp_path / "shared") == _files(tmp_path / "alone")


class Crowded(MemoryDisk):
    """A disk on which somebody else has cleared our scratch file away just before we rename it."""

    def rename(self, source: Path, target: Path) -> None:
        raise FileNotFoundError(2, "", str(source))


@pytest.mark.parametrize("there", [WHOLE, WHOLE[:-1], None], ids=["the plan", "another file", "nothing"])
def test_a_builder_whose_scratch_file_was_cleared_away_is_content_only_if_the_plan_is_there(
    there: bytes | None,
) -> None:
    disk = Crowded([FOLDER])
    if there is not None:
        Files(disk).write_new(PLAN, [there])
    with contextlib.nullcontext() if there == WHOLE else pytest.raises(StorageFailed):
        _cache(disk, "mine").put(PLAN, WHOLE)
