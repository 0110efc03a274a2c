"""The file moves under every crash: after each, the old or the new, never neither and never a mixture.

Each move is killed before and during each of its operations, or refused at each, and then the power is cut: every
disk that may be left is looked at. The last tests take one sync away and see to it that the same checks notice.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.testing import (
    ERRORS,
    KILLS,
    FaultyDisk,
    Ignore,
    MemoryDisk,
    Trial,
    always,
    crash_points,
    crash_states,
    tree,
)

RUN = Path("/run")
OLD, NEW = b"old: it was here before", b"new: longer than the old one by a good deal"

Tree = dict[str, str | bytes | None]


@dataclass(frozen=True)
class Move:
    """A file move: what stands there before it, what it does, and the trees that are old and new."""

    name: str
    before: Callable[[Files], object]
    act: Callable[[Files], object]
    old: Tree
    new: Tree
    scratch: str | None = None
    """A leftover that the next move of the same kind removes."""
    between: tuple[Tree, ...] = ()
    """Trees that a reader takes for the old one."""

    def __str__(self) -> str:
        return self.name

    def fresh(self) -> MemoryDisk:
        disk = MemoryDisk([RUN])
        self.before(Files(disk))
        disk.sync_all()
        return disk

    def action(self, disk: Disk) -> object:
        return self.act(Files(disk))


def _two_files(files: Files, directory: Path) -> None:
    files.make_directory(directory)
    files.write_new(directory / "part", [b"part"])
    files.write_new(directory / "manifest", [b"manifest"])
    files.sync_directory(directory)


def _publish_directory(files: Files) -> None:
    _two_files(files, RUN / ".tmp")
    files.publish(RUN / ".tmp", RUN / "done")


def _whole(name: str) -> Tree:
    return {name: None, f"{name}/part": b"part", f"{name}/manifest": b"manifest"}


def _quarantine(files: Files) -> None:
    files.make_directory(RUN / "aside")
    files.publish(RUN / "done", RUN / "aside" / "done")


MOVES = (
    Move(
        "replace",
        lambda files: files.write_new(RUN / "f", [OLD]),
        lambda files: files.replace(RUN / "f", NEW, scratch=".f"),
        {"f": OLD},
        {"f": NEW},
        ".f",
    ),
    Move(
        "replace where nothing was",
        lambda files: None,
        lambda files: files.replace(RUN / "f", NEW, scratch=".f"),
        {},
        {"f": NEW},
        ".f",
    ),
    Move(
        "swap_link",
        lambda files: files.swap_link(RUN / "latest", "old", scratch=".latest"),
        lambda files: files.swap_link(RUN / "latest", "new", scratch=".latest"),
        {"latest": "old"},
        {"latest": "new"},
        ".latest",
    ),
    Move(
        "create_once",
        lambda files: None,
        lambda files: files.create_once(RUN / "f", NEW, scratch=".f"),
        {},
        {"f": NEW},
        ".f",
    ),
    Move("publish a directory", lambda files: None, _publish_directory, {}, _whole("done"), ".tmp"),
    Move(
        "publish into a new directory",
        lambda files: _two_files(files, RUN / "done"),
        _quarantine,
        _whole("done"),
        {"aside": None, **{f"aside/{name}": content for name, content in _whole("done").items()}},
        between=({"aside": None, **_whole("done")},),
    ),
)


def violations(move: Move, trial: Trial[MemoryDisk]) -> Iterator[str]:
    """What a reader may find after this trial and must not."""
    found_states = [("nobody cut the power", trial.disk), *crash_states(trial.disk, random.Random(7))]
    for words, found in found_states:
        left = tree(found, RUN)
        seen = left if left == move.new else _without(left, move.scratch)
        allowed = [move.new] if trial.is_finished else [move.old, *move.between, move.new]
        if seen not in allowed:
            yield f"{move}: {trial}; then {words}: found {left}"


def _without(left: Tree, scratch: str | None) -> Tree:
    return {name: content for name, content in left.items() if name.split("/")[0] != scratch}


def all_violations(move: Move, action: Callable[[Disk], object]) -> list[str]:
    trials = crash_points(move.fresh, action, (*KILLS, *ERRORS))
    return [violation for trial in trials for violation in violations(move, trial)]


@pytest.mark.promise("C2", "M10", "G3", "X7")
@pytest.mark.parametrize("move", MOVES, ids=str)
def test_after_every_crash_there_is_the_old_or_the_new_and_after_the_return_the_new(move: Move) -> None:
    assert all_violations(move, move.action) == []


@pytest.mark.promise("X7")
@pytest.mark.parametrize("move", [move for move in MOVES if move.scratch in (".f", ".latest")], ids=str)
def test_after_every_crash_the_next_attempt_succeeds_and_leaves_nothing_beside(move: Move) -> None:
    attempts = 0
    for trial in crash_points(move.fresh, move.action, (*KILLS, *ERRORS)):
        for _, found in crash_states(trial.disk, random.Random(7)):
            move.action(found)
            assert tree(found, RUN) == move.new, str(trial)
            attempts += 1
    assert attempts > 20


def without(name: str, move: Move) -> Callable[[Disk], object]:
    """The move as it would be if somebody forgot this sync."""
    return lambda disk: move.action(FaultyDisk(disk, always(name, Ignore())))


FORGETTABLE = [
    (move, name)
    for move in MOVES
    for name in ("sync_file", "sync_directory")
    if (move.name, name) not in {("swap_link", "sync_file"), ("publish into a new directory", "sync_file")}
]


@pytest.mark.promise("C2", "M10")
@pytest.mark.parametrize(("move", "name"), FORGETTABLE, ids=lambda value: str(value))
def test_a_forgotten_sync_does_not_go_unnoticed(move: Move, name: str) -> None:
    assert all_violations(move, without(name, move)) != []


def test_a_directory_published_before_its_own_names_are_synced_comes_back_empty() -> None:
    def careless(disk: Disk) -> None:
        files = Files(disk)
        files.make_directory(RUN / ".tmp")
        files.write_new(RUN / ".tmp" / "part", [b"part"])
        files.publish(RUN / ".tmp", RUN / "done")

    disk = MemoryDisk([RUN])
    careless(disk)
    assert tree(disk.after_crash(), RUN) == {"done": None}
    move = Move(
        "careless",
        lambda files: None,
        lambda files: careless(files.disk),
        {},
        {"done": None, "done/part": b"part"},
        ".tmp",
    )
    assert any("found {'done': None}" in violation for violation in all_violations(move, careless))


def test_killing_alone_cannot_see_a_forgotten_sync() -> None:
    move = MOVES[0]
    for trial in crash_points(move.fresh, without("sync_file", move), KILLS):
        assert _without(tree(trial.disk, RUN), ".f") in (move.old, move.new)
