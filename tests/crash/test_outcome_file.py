"""What a job tells its launcher, under every crash: the whole outcome, an earlier one, or none; never half of one."""

from pathlib import Path

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.launch import job_files
from unbroken.launch.job_files import JobOutcome, StepsWriter, last_step, steps_path
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points

TEMPORARY = Path("/tmp")
RUNNING = JobOutcome("/run", "running", 0, "held", "")
ENDED = JobOutcome("/run", "stopped", 0, "again", "a signal came (SIGTERM)")


def a_machine() -> MemoryDisk:
    return MemoryDisk([TEMPORARY])


def tells_its_launcher(disk: Disk) -> None:
    files = Files(disk)
    place = job_files.make_outcome_path(TEMPORARY, "token", files=files) / "outcome.json"
    job_files.write_outcome(place, RUNNING, files=files)
    job_files.write_outcome(place, ENDED, files=files)
    steps = StepsWriter(steps_path(place), files)
    for step in (7, 8):
        steps.write(step)
    steps.close()


def test_the_launcher_reads_a_whole_outcome_or_none() -> None:
    seen = set()
    for trial in crash_points(a_machine, tells_its_launcher, (*KILLS, *ERRORS)):
        found = job_files.read_job_outcome(TEMPORARY / "unbroken-token/outcome.json", files=Files(trial.disk))
        assert found in (None, RUNNING, ENDED), str(trial)
        assert found == ENDED or not trial.is_finished, str(trial)
        seen.add(found)
    assert seen == {None, RUNNING, ENDED}


def test_the_launcher_reads_a_step_that_was_completed_or_none() -> None:
    seen = set()
    for trial in crash_points(a_machine, tells_its_launcher, KILLS):
        found = last_step(steps_path(TEMPORARY / "unbroken-token/outcome.json"), files=Files(trial.disk))
        assert found in (None, 7, 8), str(trial)
        seen.add(found)
    assert seen == {None, 7, 8}
