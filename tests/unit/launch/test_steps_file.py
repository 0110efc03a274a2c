"""The steps a job tells its launcher."""

from pathlib import Path

from unbroken.disk import LocalDisk
from unbroken.files import Files
from unbroken.launch.job_files import StepsWriter, last_step, steps_path
from unbroken.testing import FaultyDisk, Operation, Refuse


def test_the_last_whole_line_counts(tmp_path: Path) -> None:
    path = steps_path(tmp_path / "outcome.json")
    assert last_step(path) is None
    writer = StepsWriter(path)
    for step in range(990, 1_100):
        writer.write(step)
    assert last_step(path) == 1_099
    with path.open("ab") as sink:
        sink.write(b"11")
    assert last_step(path) == 1_099, "a line that was cut is none"
    following = StepsWriter(path)
    following.write(7)
    assert last_step(path) == 7, "and the next job begins behind it"
    path.write_bytes(b"")
    assert last_step(path) is None


def test_a_full_temporary_directory_costs_the_name_of_a_step_and_nothing_else(tmp_path: Path) -> None:
    asked: list[Operation] = []

    def plan(operation: Operation) -> Refuse | None:
        asked.append(operation)
        return Refuse(28) if operation.name == "write" else None

    writer = StepsWriter(tmp_path / "steps", Files(FaultyDisk(LocalDisk(), plan)))
    writer.write(1)
    times = len(asked)
    writer.write(2)
    assert len(asked) == times, "it is not asked again at every step"
    assert last_step(tmp_path / "steps") is None
