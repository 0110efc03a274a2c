"""Killed at any step and in any phase of a save, a run ends with the bits of one that was never killed."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exact.forks import Ended, forked, forked_each
from tests.exact.mutations import MUTATIONS
from tests.exact.training import TOTAL, WARM_UP, Case, count_changes, facts, logged, train


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, dict[str, str]]]:
    directory = str(tmp_path_factory.mktemp("one") / "run")
    return forked(train, Case(directory)).required(), logged(directory)


def first_step(directory: str, *, job: int) -> int:
    """The first step that one job logged."""
    lines = (Path(directory) / "metrics" / f"job-{job:04}.jsonl").read_text().splitlines()
    found: int = next(row["step"] for row in map(json.loads, lines) if "step" in row)
    return found


def require_equal(ended: Ended, directory: str, undisturbed: tuple[dict[str, Any], dict[int, dict[str, str]]]) -> None:
    end, rows = undisturbed
    found = ended.required()
    assert found["digest"] == end["digest"]
    assert logged(directory) == rows
    assert not facts(directory, "mismatch")


def test_two_uninterrupted_runs_are_equal_and_another_seed_is_not(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], dict[int, dict[str, str]]]
) -> None:
    require_equal(forked(train, Case(str(tmp_path / "a"))), str(tmp_path / "a"), undisturbed)
    assert len(undisturbed[1]) == TOTAL
    assert len({row["loss"] for row in undisturbed[1].values()}) == TOTAL
    assert forked(train, Case(str(tmp_path / "b"), total=TOTAL + 1)).required()["digest"] != undisturbed[0]["digest"]


@pytest.mark.promise("C1", "C12", "C14", "C15", "M14")
def test_killed_at_every_step_and_resumed_everything_is_equal(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], dict[int, dict[str, str]]]
) -> None:
    where = ("forward", "backward", "end")
    cases = [Case(str(tmp_path / f"{k}"), die_at=(k, where[k % 3])) for k in range(1, TOTAL + 1)]
    assert all(ended.is_killed for ended in forked_each(train, [(case,) for case in cases]))
    resumed = forked_each(train, [(Case(case.directory),) for case in cases])
    for case, ended in zip(cases, resumed, strict=True):
        require_equal(ended, case.directory, undisturbed)
    began = [ended.required()["began"] for ended in resumed]
    assert [first_step(case.directory, job=2) for case in cases] == [step + 1 for step in began]
    # The save of a step may be in flight when the next step dies; never more than one save is lost.
    for k, step in enumerate(began, start=1):
        newest = (k - 1) // 3 * 3
        assert step in (newest, max(newest - 3, 0))
    # Inside the warm-up, at its end and inside the cosine, each with something to resume.
    assert {step for step in began if step} >= {3, 6}
    assert WARM_UP in range(min(step for step in began if step), max(began))


@pytest.mark.promise("C1")
def test_killed_before_every_change_that_saves_make_and_resumed_everything_is_equal(tmp_path: Path) -> None:
    short: dict[str, Any] = {"total": 6, "save_steps": 2}
    plain = Case(str(tmp_path / "plain"), **short)
    changes = forked(count_changes, plain).required()
    end, rows = forked(train, Case(str(tmp_path / "one"), **short)).required(), logged(str(tmp_path / "one"))
    # The first save makes the store; of the second, which has one before it, every change is tried.
    commits = [number for number, change in enumerate(changes) if change.startswith("rename checkpoint-")]
    # Of many writes to one file, the first, one in the middle and the last stand for all.
    tried = [
        number
        for number in range(commits[0] - 2, commits[1] + 6)
        if number == commits[0] + 40 or len(set(changes[number - 1 : number + 2])) > 1
    ]
    assert len(tried) > 30
    cases = [Case(str(tmp_path / f"k{n}"), die_in_save=n, **short) for n in tried]
    assert all(ended.is_killed for ended in forked_each(train, [(case,) for case in cases]))
    resumed = forked_each(train, [(Case(case.directory, **short),) for case in cases])
    for case, ended in zip(cases, resumed, strict=True):
        require_equal(ended, case.directory, (end, rows))
        assert not [path for path in Path(case.directory, "checkpoints").iterdir() if path.name.startswith(".tmp-")]
    # Before the first commit there is nothing to resume, after the second there is step 4.
    assert {ended.required()["began"] for ended in resumed} == {0, 2, 4}


@pytest.fixture(scope="module")
def killed_at_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed") / "run"
    assert forked(train, Case(str(directory), die_at=(8, "forward"), settles=True)).is_killed
    return directory


@pytest.fixture
def copied(killed_at_eight: Path, tmp_path: Path) -> Callable[[str], str]:
    def copy(name: str) -> str:
        shutil.copytree(killed_at_eight, tmp_path / name, symlinks=True)
        return str(tmp_path / name)

    return copy


@pytest.mark.promise("C1")
def test_each_piece_of_state_that_is_dropped_is_seen(
    copied: Callable[[str], str], undisturbed: tuple[dict[str, Any], dict[int, dict[str, str]]]
) -> None:
    names = [None, *MUTATIONS]
    ended = forked_each(train, [(Case(copied(str(name)), mutation=name),) for name in names])
    equal = [
        name for name, each in zip(names, ended, strict=True) if each.required()["digest"] == undisturbed[0]["digest"]
    ]
    assert equal == [None]


@pytest.mark.promise("C3")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_command_repeated_through_random_kills_ends_where_one_run_ends(
    seed: int, tmp_path: Path, undisturbed: tuple[dict[str, Any], dict[int, dict[str, str]]]
) -> None:
    rng = random.Random(seed)
    directory = str(tmp_path / "run")
    kills = 0
    for _ in range(6):
        die: dict[str, Any] = {"die_in_save": rng.randrange(60)}
        if rng.random() < 0.5:
            die = {"die_at": (rng.randint(1, TOTAL), rng.choice(("forward", "backward", "end")))}
        kills += forked(train, Case(directory, **die)).is_killed
    assert kills >= 2
    ended = forked(train, Case(directory))
    require_equal(ended, directory, undisturbed)
    assert forked(train, Case(directory)).required()["began"] == TOTAL
