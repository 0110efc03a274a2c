"""Every place marked as one where a crash can bite is really bitten by the crash suite."""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import unbroken
from tests.crash.scenes import ROOT, SCENES
from tests.crash.test_batch_results import answers, with_old_answers
from tests.crash.test_compiled_code import makes_a_folder, unpacks_and_keeps, with_old_ones
from tests.crash.test_copied_checkpoint import copies_it, with_a_checkpoint
from tests.crash.test_demo_folder import prepares, with_an_earlier_demo
from tests.crash.test_direct import keeps_records, saves, with_two
from tests.crash.test_direct import with_a_checkpoint as direct_checkpoint
from tests.crash.test_disk_speed import measures, with_a_leftover
from tests.crash.test_doctor import examines, keeps_a_result, with_leftovers
from tests.crash.test_drills import DAMAGES, a_folder, damages, two_checkpoints, writes_a_drill
from tests.crash.test_emergency import SCENES as EMERGENCIES
from tests.crash.test_emergency import with_an_older_dump
from tests.crash.test_export import a_place, exports, replaces, with_exports
from tests.crash.test_file_systems import acquire_without_links
from tests.crash.test_framework_folders import (
    links_anew,
    notes_a_file,
    publishes,
    removes_what_was_given_up,
    saves_by_dcp,
    with_an_earlier_one,
    with_paths_given_up,
    with_two_links,
)
from tests.crash.test_lease import _acquire, _release, _renew, _run_with
from tests.crash.test_mirror import (
    brings_back,
    damaged,
    mirrors_everything,
    refreshes,
    repairs,
    stale,
    tidies,
    wiped,
    with_a_ledger,
    with_an_empty_mirror,
    with_leavings,
)
from tests.crash.test_mirror import two_checkpoints as mirrored_never
from tests.crash.test_outcome_file import a_machine, tells_its_launcher
from tests.crash.test_payload import saves_the_second, with_the_first
from tests.crash.test_plan import a_cache_with_scratch, opens_a_plan
from tests.crash.test_records import ACTIONS, fresh
from tests.crash.test_sequence_digests import takes_digests, with_scratch
from tests.crash.test_shards import with_the_old_one, writes_the_new_one
from tests.crash.test_tokenize import SCENES as TOKENIZING
from tests.crash.test_tokenize import discards, drops_the_engine, nothing_yet, trains, with_drafts
from tests.crash.test_trainer_records import a_run, accepts_a_value, keeps_its_records, with_its_records
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.store.directory import Store
from unbroken.testing import Fault, FaultyDisk, MemoryDisk, Operation

SOURCE = Path(unbroken.__file__).parent
MARK = "# crash here:"
Line = tuple[Path, int]


@dataclass(frozen=True)
class Mark:
    """A comment that names a crash, and the lines of the statement it stands before."""

    path: Path
    line: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(SOURCE)}:{self.line}"


def _marks(path: Path) -> list[Mark]:
    text = path.read_text()
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    marks = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith(MARK):
            following = min((s for s in statements if s.lineno > number), key=lambda s: s.lineno)
            marks.append(Mark(path, number, following.lineno, following.end_lineno or following.lineno))
    return marks


MARKS = [mark for path in sorted(SOURCE.rglob("*.py")) for mark in _marks(path)]


class Witness:
    """A plan that strikes nothing and notes which lines of the house ask for each change."""

    def __init__(self) -> None:
        self.lines: set[Line] = set()

    def __call__(self, operation: Operation) -> Fault | None:
        frame = sys._getframe() if operation.is_mutating else None
        while frame is not None:
            self.lines.add((Path(frame.f_code.co_filename), frame.f_lineno))
            frame = frame.f_back
        return None


def _scene_actions() -> list[tuple[MemoryDisk, Callable[[Disk], object]]]:
    found: list[tuple[MemoryDisk, Callable[[Disk], object]]] = []
    for scene in SCENES:
        disk = MemoryDisk()
        scene.prepare(Store(ROOT, Files(disk)))
        found.append((disk, lambda faulty, act=scene.act: act(Store(ROOT, Files(faulty)), lambda: None)))  # type: ignore[misc]
    found += [(_run_with(7)(), action) for action in (_acquire, _renew, _release, acquire_without_links)]
    found += [(fresh(), action) for action in ACTIONS]
    found.append((with_the_first(), saves_the_second))
    found.append((a_machine(), tells_its_launcher))
    found.append((with_the_old_one(), writes_the_new_one))
    found.append((a_cache_with_scratch(), opens_a_plan))
    found.append((a_run(), keeps_its_records))
    found.append((with_its_records(), accepts_a_value))
    found.append((with_scratch(), takes_digests))
    found += [(fresh(), action) for fresh, action in TOKENIZING.values()]
    found += [(nothing_yet(), action) for action in (drops_the_engine, trains)]
    found.append((with_drafts(), discards))
    found.append((with_a_leftover(), measures))
    found += [(with_leftovers(), action) for action in (examines, keeps_a_result)]
    found += [(with_old_ones(), action) for action in (unpacks_and_keeps, makes_a_folder)]
    found.append((a_place(), exports))
    found.append((with_exports(), replaces))
    found.append((with_old_answers(), answers))
    found.append((with_a_checkpoint(), copies_it))
    found.append((with_an_earlier_demo(), prepares))
    found.append((a_folder(), writes_a_drill))
    found += [(two_checkpoints(), damages(kind)) for kind in DAMAGES]
    found += [(with_an_older_dump(), action) for action in EMERGENCIES]
    found += [(with_an_empty_mirror(), mirrors_everything), (mirrored_never(), mirrors_everything)]
    found += [(with_a_ledger(), mirrors_everything), (wiped(), brings_back), (damaged(), repairs)]
    found.append((with_leavings(), tidies))
    found += [(with_an_earlier_one(), publishes), (with_an_earlier_one(), saves_by_dcp), (with_two_links(), links_anew)]
    found += [(with_paths_given_up(), action) for action in (removes_what_was_given_up, notes_a_file)]
    found.append((stale(), refreshes))
    found += [(direct_checkpoint(), saves), (with_two(), keeps_records)]
    return found


@pytest.fixture(scope="module")
def bitten() -> set[Line]:
    """The lines at which some change is asked for in a scene that the suite cuts short at every change."""
    witness = Witness()
    for disk, action in _scene_actions():
        action(FaultyDisk(disk, witness))
    return witness.lines


def test_there_are_marks() -> None:
    assert len(MARKS) >= 20
    assert {mark.path.name for mark in MARKS} >= {"files.py", "commit.py", "sweep.py", "choose.py", "rewind.py"}


@pytest.mark.promise("X7")
def test_the_suite_crashes_where_the_source_says_a_crash_can_bite(bitten: set[Line]) -> None:
    def is_bitten(mark: Mark) -> bool:
        return any((mark.path, line) in bitten for line in range(mark.first, mark.last + 1))

    spared = [str(mark) for mark in MARKS if not is_bitten(mark)]
    assert not spared, "no scene of the crash suite has a change there: give each one"
