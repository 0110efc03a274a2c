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
    assert document(unbroken, "ls", "new")["entries"] == []
    for rank, host in enumerate(("alpha/1", "beta/2")):
        point(tmp_path / "new", Pointer(rank, 2, 5000, "job1", host, f"/scratch/rank-{rank}"))
        [entry] = document(unbroken, "ls", "new")["entries"]
        assert (entry["name"], entry["state"], entry["step"]) == ("emergency_step_5000", "emergency", 5000)
    assert "alpha" in entry["note"] and "beta" in entry["note"]
    status = document(unbroken, "status", "new")
    [dumps] = status["emergency_dumps"]
    assert (dumps["step"], dumps["ranks"], dumps["world_size"]) == (5000, 2, 2)
    assert status["resumable_step"] is None
    # There is a run, and it has no checkpoint: that is another answer than that there is no run.
    assert unbroken("verify", "new").returncode == 5
    assert document(unbroken, "prune", "new")["removed"] == []


def test_dumps_of_some_ranks_alone_promise_nothing(unbroken: Tool, tmp_path: Path) -> None:
    point(tmp_path / "new", Pointer(0, 2, 5000, "job1", "alpha/1", "/scratch/rank-0"))
    [entry] = document(unbroken, "ls", "new")["entries"]
    assert "alpha" in entry["note"] and document(unbroken, "status", "new")["resumable_step"] is None


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
