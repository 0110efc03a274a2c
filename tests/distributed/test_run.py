"""Runs of several ranks that are killed, all or one, in a step or in a save, end with the bits of one that was not."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training_world import Job, exact, train
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.records.outcome import read_outcome
from unbroken.testing.worlds import Ended, logs, spawn

ALL = (0, 1, 2)


def good(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def losses(directory: Path) -> list[tuple[int, str]]:
    return [(step, float(value).hex()) for step, value in read_metrics(Layout(directory)).series("loss")]


@pytest.fixture(scope="module")
def unbroken_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Three ranks that nobody disturbs."""
    directory = tmp_path_factory.mktemp("one") / "run"
    return directory, good(spawn(3, train, Job(str(directory))))


def test_the_ranks_of_one_run_end_alike_where_they_should(
    unbroken_run: tuple[Path, list[dict[str, Any]]],
) -> None:
    _, results = unbroken_run
    parameters = [{k: v for k, v in each["weights"].items() if "running" not in k} for each in results]
    assert parameters[0] == parameters[1] == parameters[2]
    # Else the tests below would prove nothing about what differs by rank.
    assert results[0]["weights"] != results[1]["weights"]
    assert results[0]["generators"] != results[1]["generators"]
    assert results[0]["losses"] != results[1]["losses"]


KILLS = [
    pytest.param(ALL, "kill", 1, id="all ranks before the first save"),
    pytest.param(ALL, "kill", 4, id="all ranks beside a save"),
    pytest.param(ALL, "kill-saved", 5, id="all ranks in a step after a commit"),
    pytest.param((1,), "kill", 4, id="one rank in the step after a save"),
    pytest.param((0,), "kill-saved", 5, id="the first rank in a step"),
    pytest.param((2,), "kill-in-save", 4, id="one rank in a save"),
    pytest.param((0,), "kill-in-save", 4, id="the first rank in a save"),
]


@pytest.mark.parametrize(("victims", "what", "step"), KILLS)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path,
    unbroken_run: tuple[Path, list[dict[str, Any]]],
    victims: tuple[int, ...],
    what: str,
    step: int,
) -> None:
    whole, expected = unbroken_run
    run = tmp_path / "run"
    killed = spawn(3, train, Job(str(run), victims=victims, at_step=step, what=what))
    assert [each.exit_code for each in killed if each.rank in victims] == [-9] * len(victims), logs(killed)
    assert not any(each.is_late or each.is_good for each in killed), f"a rank went on alone: {logs(killed)}"
    resumed = good(spawn(3, train, Job(str(run))))
    assert [exact(each) for each in resumed] == [exact(each) for each in expected]
    if what == "kill-saved":
        assert {each["resumed_from"] for each in resumed} == {str(run / "checkpoints/checkpoint-4")}
    for mine, theirs in zip(resumed, expected, strict=True):
        first = min(mine["losses"])
        assert mine["losses"] == {k: v for k, v in theirs["losses"].items() if k >= first}
    assert losses(run) == losses(whole)


def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, unbroken_run: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole, expected = unbroken_run
    run = tmp_path / "run"
    for victims, step in ((ALL, 3), ((2,), 5), (ALL, 7)):
        assert not any(
            e.is_good for e in spawn(3, train, Job(str(run), victims=victims, at_step=step, what="kill-saved"))
        )
    results = good(spawn(3, train, Job(str(run))))
    assert [exact(each) for each in results] == [exact(each) for each in expected]
    assert losses(run) == losses(whole)
    facts = read_history(Layout(run)).of_kind("recomputed")
    assert facts and all(fact.values.get("compared") == fact.values.get("agreeing") for fact in facts)


@pytest.mark.parametrize("wrap", ["fsdp", "fsdp1", "tp"])
def test_a_sharded_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path, wrap: str) -> None:
    is_alike = wrap == "tp"
    whole = good(spawn(2, train, Job(str(tmp_path / "one"), wrap=wrap, total=6, is_alike=is_alike)))
    job = Job(
        str(tmp_path / "run"), wrap=wrap, total=6, is_alike=is_alike, victims=(0, 1), at_step=3, what="kill-saved"
    )
    assert [each.exit_code for each in spawn(2, train, job)] == [-9, -9]
    results = good(spawn(2, train, Job(str(tmp_path / "run"), wrap=wrap, total=6, is_alike=is_alike)))
    assert results[0]["resumed_from"].endswith("checkpoint-2")
    assert [exact(each) for each in results] == [exact(each) for each in whole]
    assert losses(tmp_path / "run") == losses(tmp_path / "one")


def test_copies_that_drift_apart_are_kept_apart(tmp_path: Path) -> None:
    """Tensor-parallel ranks that see different batches: nobody keeps their replicated layers equal."""
    whole = good(spawn(2, train, Job(str(tmp_path / "one"), wrap="tp", total=4)))
    assert whole[0]["weights"]["module.weight"] != whole[1]["weights"]["module.weight"]
    good(spawn(2, train, Job(str(tmp_path / "run"), wrap="tp", total=2)))
    results = good(spawn(2, train, Job(str(tmp_path / "run"), wrap="tp", total=4)))
    assert [exact(each) for each in results] == [exact(each) for each in whole]


def test_buckets_that_change_after_the_first_step_are_reported_as_not_exact(tmp_path: Path) -> None:
    """Three ranks under DDP as it comes: a sum of three numbers depends on its order, and DDP changes that order."""
    good(spawn(3, train, Job(str(tmp_path / "run"), wrap="ddp-rebucketed", total=2)))
    good(spawn(3, train, Job(str(tmp_path / "run"), wrap="ddp-rebucketed", total=3)))
    resumed = read_history(Layout(tmp_path / "run")).of_kind("resume")[-1]
    assert resumed.values["step"] == 2
    assert any("buckets" in note for note in resumed.values["notes"])


def test_two_ranks_under_ddp_as_it_comes_are_exact(tmp_path: Path) -> None:
    whole = good(spawn(2, train, Job(str(tmp_path / "one"), wrap="ddp-rebucketed")))
    job = Job(str(tmp_path / "run"), wrap="ddp-rebucketed", victims=(0, 1), at_step=5, what="kill-saved")
    assert [each.exit_code for each in spawn(2, train, job)] == [-9, -9]
    results = good(spawn(2, train, Job(str(tmp_path / "run"), wrap="ddp-rebucketed")))
    assert [exact(each) for each in results] == [exact(each) for each in whole]
    assert losses(tmp_path / "run") == losses(tmp_path / "one")
    assert read_history(Layout(tmp_path / "run")).of_kind("resume")[-1].values["notes"] == []


def test_the_outcome_of_a_run_of_many_ranks_is_reported_once(unbroken_run: tuple[Path, list[dict[str, Any]]]) -> None:
    directory, results = unbroken_run
    assert [each["step"] for each in results] == [8, 8, 8]
    history = read_history(Layout(directory))
    assert len(history.of_kind("job-start")) == len(history.of_kind("job-end")) == 1
    outcome = read_outcome(Layout(directory), now_s=time.time())
    assert outcome is not None and (outcome.status, outcome.exit_code) == ("completed", 0)


def test_a_rank_whose_clock_is_an_hour_ahead_is_reported_and_does_not_end_the_run_before_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_MAX_RUNTIME", "600")
    job = Job(str(tmp_path / "run"), wrap="plain", save_steps=None, victims=(1,), ahead_s=3600.0)
    ended = spawn(2, train, job)
    assert [(each["step"], each["is_stopped"]) for each in good(ended)] == [(8, False)] * 2
    assert [line for line in ended[0].log.splitlines() if "clocks" in line and "1 h" in line]
