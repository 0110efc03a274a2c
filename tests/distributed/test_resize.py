"""What one world saves, a world of any other size loads, under any wrapper, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resize_world import STEPS, load_each, load_stock, place, save_each
from tests.distributed.training_world import Job, train
from unbroken import errors
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.testing.worlds import Ended, logs, spawn

SIZES = (1, 2, 3, 4, 8)
LARGEST = max(SIZES)
WRAPS = ("ddp", "fsdp")
FLAT = "fsdp1"
FLAT_SIZES = (2, 3)


def good(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def wraps_at(size: int) -> tuple[str, ...]:
    """What a world of a size saves and loads into; the largest only shards, which is where its size matters."""
    if size in FLAT_SIZES:
        return (*WRAPS, FLAT)
    return WRAPS if size < LARGEST else ("fsdp",)


def sources_at(size: int) -> tuple[tuple[str, int], ...]:
    """What a world of a size loads: all that was saved; the largest only what itself and half of it saved."""
    sizes = SIZES if size < LARGEST else (LARGEST // 2, LARGEST)
    return tuple((wrap, saver) for saver in sizes for wrap in wraps_at(saver))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are."""
    return tmp_path_factory.mktemp("resize")


@pytest.fixture(scope="module")
def saved_by(root: Path) -> Callable[[int], dict[str, dict[str, Any]]]:
    """What a world of a size saved, by wrapper and size, as the first rank tells it."""

    @cache
    def save(size: int) -> dict[str, dict[str, Any]]:
        ranks = good(spawn(size, save_each, str(root), wraps_at(size)))
        for wrap in wraps_at(size):
            # Whole tensors are the same whoever gathers them.
            assert all(each[wrap]["weights"] == ranks[0][wrap]["weights"] for each in ranks)
        return {f"{wrap} {size}": ranks[0][wrap] for wrap in wraps_at(size)}

    return save


@pytest.fixture(scope="module")
def saved(saved_by: Callable[[int], dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What all worlds saved."""
    return {key: reported for size in SIZES for key, reported in saved_by(size).items()}


@pytest.fixture(scope="module")
def loaded(root: Path, saved: dict[str, dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """What each world loaded of all that was saved."""
    return {size: good(spawn(size, load_each, str(root), sources_at(size), wraps_at(size))) for size in SIZES}


@pytest.mark.promise("C7", "M18")
@pytest.mark.parametrize("size", SIZES)
def test_a_world_of_any_size_loads_what_any_other_saved(
    saved: dict[str, dict[str, Any]], loaded: dict[int, list[dict[str, Any]]], size: int
) -> None:
    count = 0
    for rank in loaded[size]:
        for key, found in rank.items():
            if key.endswith("exported"):
                continue
            expected = saved[key.partition(" as ")[0]]
            assert found["step"] == STEPS, key
            assert found["weights"] == expected["weights"], key
            assert found["moments"] == expected["moments"] and len(found["moments"]) == 18, key
            assert found["rates"] == found["learning"] == expected["rates"], key
            count += 1
    assert count == size * len(sources_at(size)) * len(wraps_at(size))


@pytest.mark.parametrize("size", FLAT_SIZES)
def test_the_whole_state_dict_of_fsdp_is_on_the_first_rank_and_nowhere_else(
    saved: dict[str, dict[str, Any]], loaded: dict[int, list[dict[str, Any]]], size: int
) -> None:
    first, *others = loaded[size]
    for key, expected in saved.items():
        assert first[f"{key} exported"] == expected["weights"], key
        assert all(rank[f"{key} exported"] == {} for rank in others)


@pytest.mark.promise("C7")
@pytest.mark.parametrize("size", [1, 4])
def test_torchs_own_tools_read_it(root: Path, saved_by: Callable[[int], dict[str, dict[str, Any]]], size: int) -> None:
    expected = saved_by(size)[f"fsdp {size}"]["weights"]
    results = good(spawn(3, load_stock, place(str(root), "fsdp", size), "fsdp"))
    assert all(each["loaded"] == expected for each in results)
    assert results[0]["converted"] == results[0]["converted by the command"] == expected
    assert results[0]["files"] == size


def test_the_journal_says_that_another_world_is_not_exact_and_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), total=2, has_average=False)))
    results = good(spawn(3, train, Job(str(run), total=4, has_average=False, accept=("data",))))
    assert {each["step"] for each in results} == {4}
    resumed = read_history(Layout(run)).of_kind("resume")[-1]
    assert resumed.values["step"] == 2
    notes = resumed.values["notes"]
    assert any("world 2 -> 3" in note for note in notes), notes
    # Running statistics are those of the rank that saw the batches.
    assert any("model.module.running_mean" in note and "rank 0" in note for note in notes), notes
    assert [step for step, _ in read_metrics(Layout(run)).series("loss")] == [1, 2, 3, 4]


@pytest.mark.promise("M18")
def test_data_that_differs_by_rank_goes_to_another_world_only_if_that_is_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good(spawn(2, train, Job(str(run), total=2)))
    require_refused(spawn(3, train, Job(str(run), total=4)))
    results = good(spawn(3, train, Job(str(run), total=4, accept=("data", "average"))))
    assert {each["step"] for each in results} == {4}
    resumed = read_history(Layout(run)).of_kind("resume")[-1]
    assert any(note.startswith("accepted: data") for note in resumed.values["notes"])
    assert read_history(Layout(run)).of_kind("accept")[-1].values["names"] == ["data", "average"]
    # To fewer ranks it is no other: what the one that is gone kept would be lost.
    require_refused(spawn(2, train, Job(str(run), total=6)))


def require_refused(ended: list[Ended]) -> None:
    """Every rank was refused, for what each of the ranks that saved had of its own."""
    assert isinstance(ended[0].error, errors.NotExact), logs(ended)
    assert {name for name, _ in ended[0].error.differences} == {"data", "average"}
    for each in ended[1:]:
        assert isinstance(each.error, errors.RankFailed) and each.error.cause.kind == "not-exact"


@pytest.mark.promise("K4")
def test_damage_to_the_record_of_a_rank_that_is_no_more_is_seen_by_those_that_are(tmp_path: Path) -> None:
    run = tmp_path / "run"
    plain = Job(str(run), total=3, has_data=False, has_average=False, has_norm=False)
    good(spawn(3, train, plain))
    record = run / "checkpoints" / "final" / "ranks" / "rank-00002.json"
    record.write_bytes(record.read_bytes().replace(b"1", b"2", 1))
    good(spawn(2, train, replace(plain, total=4)))
    history = read_history(Layout(run))
    assert history.of_kind("resume")[-1].values["step"] == 2
    [passed] = history.of_kind("checkpoint-skipped")
    assert passed.values["name"] == "final"
    assert "ranks/rank-00002.json" in passed.values["reason"]
