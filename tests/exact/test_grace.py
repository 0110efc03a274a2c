"""Grace windows on slow storage, with a real kill at their end: what fits is done, and the next job resumes exactly."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.exact import jobs
from tests.exact.forks import forked, forked_each
from tests.exact.test_endings import checkpoints
from tests.exact.training import facts

# Each sync of the store takes so long: a save, of six and more, takes longer than three quarters of DUMP_S. The kill is
# real, so that the windows are far longer than what is to fit into them.
DELAY_S, DUMP_S = 2.4, 19.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = str(tmp_path_factory.mktemp("whole") / "run")
    found: dict[str, Any] = forked(jobs.signalled, directory, signal.SIGCONT).required()
    return found


@pytest.mark.promise("M11")
def test_each_window_is_used_for_what_fits_before_the_kill_and_the_next_job_ends_in_the_same_bits(
    tmp_path: Path, whole: dict[str, Any]
) -> None:
    scratch = str(tmp_path / "scratch")
    windows = {
        "nothing": (0.0, scratch),
        "dump": (DUMP_S, scratch),
        "too short": (12.0, None),
        "save": (120.0, scratch),
    }
    runs = {results: str(tmp_path / results.replace(" ", "-")) for results in windows}
    ended = dict(
        zip(
            windows,
            forked_each(
                jobs.in_a_window, [(runs[results], g, DELAY_S, where) for results, (g, where) in windows.items()]
            ),
            strict=True,
        )
    )
    assert ended["nothing"].is_killed
    for results in ("dump", "too short", "save"):
        assert ended[results].required()["is_stopped"], results
        (end,) = facts(runs[results], "job-end")
        assert (end["status"], end["class"]) == ("stopped", "again")
    assert all(commit["seconds"] > 6 * DELAY_S for run in runs.values() for commit in facts(run, "commit"))
    assert checkpoints(runs["save"]) == {"checkpoint-2", "checkpoint-4-shutdown"}
    for results in ("nothing", "dump", "too short"):
        assert checkpoints(runs[results]) == {"checkpoint-2"}, results
    assert [fact["step"] for fact in facts(runs["dump"], "emergency-save")] == [4]
    assert [fact["step"] for fact in facts(runs["too short"], "grace-too-short")] == [4]
    again = forked_each(jobs.left_to_go_on, [(run, scratch) for run in runs.values()])
    assert {each.required()["digest"] for each in again} == {whole["digest"]}
    resumed = {results: facts(run, "resume")[-1]["step"] for results, run in runs.items()}
    assert resumed == {"nothing": 2, "dump": 4, "too short": 2, "save": 4}
