"""What ``stop`` says where nobody is at work."""

from pathlib import Path

from click.testing import CliRunner

from unbroken.cli.group import ROOT
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.process import Placement


def test_between_two_jobs_of_slurm_the_one_that_waits_is_named(tmp_path: Path) -> None:
    journal = Journal(Layout(tmp_path), 1, clock=lambda: 0.0)
    journal.write("job-start", placement=Placement("slurm", "4711").as_json())
    journal.close()
    said = CliRunner().invoke(ROOT, ["stop", str(tmp_path)])
    assert said.exit_code == 0
    assert said.output.endswith("nothing to stop; to remove a requeued job: scancel 4711\n")
