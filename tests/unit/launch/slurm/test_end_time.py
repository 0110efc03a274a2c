"""The end that SLURM gives a job: asked beside the training, late, wrong, moved, or never told."""

import os
import queue
import threading
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from unbroken.launch.slurm import controller
from unbroken.launch.slurm.end_time import LONGEST_S, SHORTEST_S, EndTime, follow_end_time, is_polled, pause_s
from unbroken.records.layout import Layout
from unbroken.records.stop import StopSources

TIMEOUT_S = PATIENCE_S


@pytest.mark.promise("G7")
@pytest.mark.parametrize(
    ("said", "meant"),
    [("1794737120", 1794737120.0), ("NONE", None), ("N/A", None), ("UNLIMITED", None), ("17\n18", 17.0)],
)
def test_what_squeue_says_of_the_end(said: str, meant: float | None) -> None:
    assert controller.parsed_end(said) == meant


def test_a_local_time_is_this_machines_own() -> None:
    assert controller.parsed_end("2026-11-15T10:05:20") == time.mktime((2026, 11, 15, 10, 5, 20, 0, 0, -1))
    assert isinstance(controller.parsed_end("tomorrow"), str)


def test_no_answer_takes_no_deadline_back() -> None:
    assert isinstance(controller.parsed_end(""), str)


def test_it_is_polled_only_without_another_limit() -> None:
    assert is_polled(None, {"SLURM_JOB_ID": "7"})
    assert is_polled(None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "99"}), "the limit may be moved"
    assert not is_polled(60.0, {"SLURM_JOB_ID": "7"})
    assert not is_polled(None, {"SLURM_JOB_ID": "7", "UNBROKEN_MAX_RUNTIME": "60"})
    assert not is_polled(None, {})


def test_the_nearer_the_end_the_more_often_it_is_polled() -> None:
    assert [pause_s(left) for left in (None, 86_400.0, 100.0, 1.0, -5.0)] == [
        LONGEST_S,
        LONGEST_S,
        50,
        *[SHORTEST_S] * 2,
    ]


def _told(answers: list[float | str | None], known_s: float | None) -> list[float | None]:
    """What is told of these answers, one after the other."""
    results: list[float | None] = []
    over = threading.Event()

    def question() -> float | str | None:
        if not answers:
            over.set()
            return known_s if not results else results[-1]
        return answers.pop(0)

    watch = EndTime(question, results.append, known_s=known_s, clock=lambda: 1000.0, pause=lambda left: 0.0)
    assert over.wait(TIMEOUT_S)
    watch.end()
    return results


def test_a_limit_that_is_moved_is_reported_and_one_that_stays_is_not() -> None:
    assert _told([2000.0, 2000.0, 5000.0, 5000.0, None], None) == [2000.0, 5000.0, None]
    assert _told([2000.0, 3000.0], 2000.0) == [3000.0]


def test_an_end_that_is_over_means_that_the_clocks_differ_and_is_no_deadline(caplog: pytest.LogCaptureFixture) -> None:
    assert _told([940.0, 930.0], None) == []
    assert caplog.text.count("the clock differs from SLURM's") == 1


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder before all others in which a test puts its own squeue."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def _squeue(folder: Path, text: str) -> None:
    (folder / "squeue").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "squeue").chmod(0o755)


def test_a_squeue_that_hangs_is_ended_and_reported(slurm: Path) -> None:
    _squeue(slurm, f"echo $$ > {slurm}/pid; exec sleep 600")
    answer = controller.run_command(["squeue"], timeout_s=2.0)
    while not (slurm / "pid").exists():
        # On a busy machine the shell may not have come to its first command.
        answer = controller.run_command(["squeue"], timeout_s=2.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((slurm / "pid").read_text()), 0)
    assert answer.code == controller.NO_ANSWER and answer.stderr
    _squeue(slurm, "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    assert "Invalid job id" in str(controller.end_time({"SLURM_JOB_ID": "7"})), "SLURM's own words"


def test_no_squeue_at_all_is_an_answer_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue" in str(controller.end_time({"SLURM_JOB_ID": "7"}))


@pytest.mark.promise("G7")
def test_a_slow_answer_delays_nothing_and_sets_the_deadline_when_it_comes(slurm: Path) -> None:
    at_s = int(time.time()) + 30
    _squeue(slurm, f"while [ ! -e {slurm}/answer ]; do sleep 0.1; done; echo {at_s}")
    facts: queue.Queue[dict[str, object]] = queue.Queue()

    def record(kind: str, /, **said: object) -> None:
        facts.put({"kind": kind, **said})

    layout = Layout(slurm / "run")
    layout.run.mkdir()
    stops = StopSources(layout, job=1, clock=time.time, reserve=lambda: 3600.0)
    assert follow_end_time(None, {"SLURM_JOB_ID": "7"}, stops, record) is not None
    try:
        assert stops.look() is None and stops.deadline_s is None
        (slurm / "answer").touch()
        assert facts.get(timeout=TIMEOUT_S) == {"kind": "deadline", "at_s": at_s, "source": "squeue"}
        reason = stops.look()
        assert reason is not None and reason.kind == "walltime"
    finally:
        stops.restore()
    assert follow_end_time(60.0, {"SLURM_JOB_ID": "7"}, stops, record) is None
