"""What the store's commands say of a run that has emergency dumps and no checkpoint."""

from pathlib import Path

from tests.conftest import Tool
from tests.e2e.test_store_commands import document
from unbroken.records.lease import acquire
from unbroken.records.process import this_holder
from unbroken.store.dumps import Pointer, point


def test_a_run_with_nothing_but_dumps_says_whose_they_are_and_what_the_next_job_makes_of_them(
    unbroken: Tool, tmp_path: Path
) -> None:
    acquire(tmp_path / "new", this_holder(), token="x", now_s=0.0)
    assert unbroken("ls", "new").stdout == "no checkpoints yet\n"
    for rank, host in enumerate(("alpha/1", "beta/2")):
        point(tmp_path / "new", Pointer(rank, 2, 5000, "job1", host, f"/scratch/rank-{rank}"))
        [entry] = document(unbroken, "ls", "new")["entries"]
        assert (entry["name"], entry["state"], entry["step"]) == ("emergency_step_5000", "emergency", 5000)
    assert entry["note"] == (
        "2 of 2 ranks dumped on alpha, beta; the next job makes a checkpoint of it, if it runs on these hosts"
    )
    shown = unbroken("ls", "new").stdout
    assert "emergency_step_5000" in shown and "alpha, beta" in shown
    status = unbroken("status", "new").stdout
    assert "from the emergency dumps of step 5,000, if usable; no usable checkpoint" in status
    assert "starts at step 0" not in status
    # There is a run, and it has no checkpoint: that is another answer than that there is no run.
    assert unbroken("verify", "new").returncode == 5
    assert unbroken("prune", "new").stdout.endswith("deleted 0 entries, 0 bytes\n")


def test_dumps_of_some_ranks_alone_promise_nothing(unbroken: Tool, tmp_path: Path) -> None:
    point(tmp_path / "new", Pointer(0, 2, 5000, "job1", "alpha/1", "/scratch/rank-0"))
    [entry] = document(unbroken, "ls", "new")["entries"]
    assert entry["note"] == "1 of 2 ranks dumped on alpha; not a checkpoint without the others"
    assert "the next job starts at step 0" in unbroken("status", "new").stdout


def test_a_reference_to_a_run_without_a_checkpoint_is_an_error(forked_unbroken: Tool, tmp_path: Path) -> None:
    acquire(tmp_path / "new", this_holder(), token="x", now_s=0.0)
    for asked in (
        ("show", "new"),
        ("show", "new@5"),
        ("pin", "new"),
        ("diff", "new", "new"),
        ("generate", "new", "--prompt", "a"),
        ("evaluate", "new"),
        ("export", "new", "--output", "w.pt"),
    ):
        ended = forked_unbroken(*asked)
        assert ended.returncode == 5, (asked, ended.stderr)
        assert ended.stderr.startswith("error[no-usable-checkpoint]"), (asked, ended.stderr)
        assert "seal" not in ended.stderr, asked
