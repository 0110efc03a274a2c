"""The phases of a save, told from the operations of a disk: each is reached once a save, by the right operation."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.state.tiny import disk, job, quietly, tiny
from unbroken import Run
from unbroken.disk import LocalDisk
from unbroken.files import LOCAL
from unbroken.prove.fault_injection import ForgetfulDisk, Striking, install
from unbroken.records.drill import PHASES, Drill, Fault
from unbroken.testing.faults import Fault as Strike
from unbroken.testing.faults import FaultyDisk, Kill, Operation, Refuse


@pytest.fixture(autouse=True)
def own_disk() -> Iterator[None]:
    with disk(LocalDisk()):
        yield


class Noted:
    """A plan that strikes nothing, and notes what a drill would have struck."""

    def __init__(self, faults: list[Fault]) -> None:
        self.marked: list[Fault] = []
        self.plan = Striking(faults, self.marked.append)
        self.struck: list[tuple[str, str, Strike]] = []

    def __call__(self, operation: Operation) -> None:
        strike = self.plan(operation)
        if strike is not None:
            self.struck.append((operation.name, operation.path.name, strike))


def struck_in_a_run(folder: Path, *faults: Fault, steps: int = 13) -> list[tuple[str, str, Strike]]:
    """What strikes in a run that saves at every second step and keeps two checkpoints."""
    noted = Noted(list(faults))

    def settle(run: Run, step: int) -> None:
        run._open.opened.saver.wait()

    with disk(FaultyDisk(LocalDisk(), noted)):
        job(folder / "run", steps, quietly(keep_last_k=2), settle, **tiny())
    return noted.struck


@pytest.mark.parametrize(
    ("phase", "name", "path", "strike"),
    [
        ("begin", "make_directory", ".tmp-", Kill("after", really=True)),
        ("parts", "write", "", Kill("during", really=True)),
        ("manifest", "write", "manifest.json", Kill("during", really=True)),
        ("rename", "rename", "checkpoint-6", Kill(really=True)),
        ("committed", "rename", "checkpoint-6", Kill("after", really=True)),
        ("latest", "rename", "latest", Kill(really=True)),
        ("sweep", "rename", ".trash-checkpoint-6", Kill("after", really=True)),
        ("journal", "write", "job-0001.jsonl", Kill("during", really=True)),
        ("metrics", "write", "job-0001.jsonl", Kill("during", really=True)),
    ],
)
def test_a_kill_at_a_phase_comes_once_at_the_third_time_it_is_reached(
    tmp_path: Path, phase: str, name: str, path: str, strike: Strike
) -> None:
    [found] = struck_in_a_run(tmp_path, Fault(phase, "kill", when=3))
    assert (found[0], found[2]) == (name, strike)
    assert found[1].startswith(path)


def test_every_phase_but_the_edge_is_met_by_a_run_that_saves_and_sweeps(tmp_path: Path) -> None:
    phases = [phase for phase in PHASES if phase != "edge"]
    found = struck_in_a_run(tmp_path, *(Fault(phase, "eio") for phase in phases))
    # `rename` and `committed` are before and after one operation.
    assert len(found) == len(phases) - 1
    assert {strike for _, _, strike in found} == {Refuse(5)}


def test_a_slow_disk_takes_longer_for_every_part_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    struck_in_a_run(tmp_path, Fault("parts", "delay", when=2, seconds=0.25), steps=6)
    assert slept.count(0.25) >= 2


def test_faults_are_let_into_the_one_disk_of_the_house_and_only_those_of_this_rank(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    LOCAL.make_directory(marks)
    other, met = Fault("parts", "eio", rank=1), Fault("manifest", "enospc", rank=None)
    drill = Drill(faults=(other, met, Fault("latest", "kill")), marks=marks)
    install(drill, rank=0)
    found = LOCAL.disk
    assert isinstance(found, ForgetfulDisk)
    draft = tmp_path / ".tmp-j0001_a-4-1"
    LOCAL.make_directory(draft)
    LOCAL.write_new(draft / "part", [b"bytes"])
    assert drill.struck() == ()
    with pytest.raises(OSError, match="No space left"):
        LOCAL.write_new(draft / "manifest.json", [b"{}"])
    assert found.operations == []
    # What was planned and never met has left no mark, and is not told as done.
    assert drill.struck() == (met,)


def test_a_kill_leaves_its_mark_before_it_strikes(tmp_path: Path) -> None:
    drill = Drill(faults=(Fault("edge", "kill", when=2), Fault("edge", "kill", when=9)), marks=tmp_path)
    child = os.fork()
    if child == 0:
        edge = install(drill, rank=0)
        edge()
        edge()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert drill.struck() == drill.faults[:1]
