"""The older FSDP: its sharded state goes from any world to any other without the model being gathered, and what a run
brought back can be exported whole.

The export that is offloaded needs a CUDA device, which CI has not; the results of a run on one are kept in
``docs/measured/fsdp1-full.md``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.fsdp1_world import (
    BLOCKS,
    STEPS,
    WIDTH,
    Moved,
    export,
    gather_counted,
    load_counted,
    save_counted,
    sizes,
)
from unbroken.testing.worlds import Ended, logs, spawn

SIZES = (2, 3)
# Several units each; the sharded state dicts of one are of ShardedTensor, of the other of DTensor.
FLAT = ("units", "mesh")
WRAPS = (*FLAT, "fsdp2", "one unit")
FLOAT_BYTES = 4
CUDA_WIDTH = 3001


def good(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def largest(moved: list[Moved]) -> int:
    """The most elements in any one collective."""
    return max((each.elements for each in moved if each.is_float), default=0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are."""
    return tmp_path_factory.mktemp("fsdp1")


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[int, list[dict[str, Any]]]:
    """What the ranks of each world saved."""
    return {size: good(spawn(size, save_counted, str(root), WRAPS)) for size in SIZES}


@pytest.fixture(scope="module")
def loaded(root: Path, saved: dict[int, list[dict[str, Any]]]) -> dict[int, list[dict[str, Any]]]:
    """What the ranks of each world loaded of what the other one saved."""
    found = {}
    for before, after in (SIZES, SIZES[::-1]):
        pairs = tuple((f"{source}-{before}", wrap) for source in FLAT for wrap in FLAT)
        pairs += ((f"fsdp2-{before}", "fsdp2"), (f"fsdp2-{before}", "one unit"))
        found[after] = good(spawn(after, load_counted, str(root), pairs))
    return found


@pytest.mark.promise("C6")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_sharded_state_of_several_units_loads_in_a_world_of_another_size(
    saved: dict[int, list[dict[str, Any]]], loaded: dict[int, list[dict[str, Any]]], before: int, after: int
) -> None:
    assert len(loaded[after]) == after
    for rank in loaded[after]:
        assert len(rank) == len(FLAT) ** 2 + 2
        for key, found in rank.items():
            expected = saved[before][0][key.partition(f"-{before} as ")[0]]
            assert found["step"] == STEPS, key
            assert found["weights"] == expected["weights"], key
            assert len(found["weights"]) == 2 * (BLOCKS + 2), key
            assert found["moments"] == expected["moments"], key
            assert len(found["moments"]) == 3 * 2 * (BLOCKS + 2), key


@pytest.mark.promise("C6")
@pytest.mark.parametrize("size", SIZES)
def test_no_collective_of_a_save_or_a_load_is_larger_than_a_unit(
    saved: dict[int, list[dict[str, Any]]], loaded: dict[int, list[dict[str, Any]]], size: int
) -> None:
    whole, block = sizes()
    # What is gathered is padded, by less than a row for each rank.
    unit = block + size * WIDTH
    assert unit < whole / 2
    for rank in (*saved[size], *loaded[size]):
        for key, found in rank.items():
            if key.endswith(FLAT):
                assert block <= largest(found["moved"]) <= unit, (key, found["moved"])
                # Nor does anything else come near it: plans and votes, as bytes.
                assert max(each.nbytes for each in found["moved"]) < whole * FLOAT_BYTES / 2, key


@pytest.mark.promise("C6")
@pytest.mark.parametrize("size", SIZES)
def test_a_save_or_a_load_moves_no_element_of_what_fsdp2_shards(
    saved: dict[int, list[dict[str, Any]]], loaded: dict[int, list[dict[str, Any]]], size: int
) -> None:
    _, block = sizes()
    other = next(each for each in SIZES if each != size)
    for rank, again in zip(saved[size], loaded[size], strict=True):
        for found in (rank["fsdp2"], again[f"fsdp2-{other} as fsdp2"]):
            assert found["moved"], "plans and votes are exchanged"
            assert not [each for each in found["moved"] if each.is_float]
            # All that was said together is too short to hold even one block.
            assert sum(each.nbytes for each in found["moved"]) < block * FLOAT_BYTES


@pytest.mark.parametrize("size", SIZES)
def test_a_model_that_is_gathered_whole_is_noticed(
    saved: dict[int, list[dict[str, Any]]], loaded: dict[int, list[dict[str, Any]]], size: int
) -> None:
    whole, _ = sizes()
    other = next(each for each in SIZES if each != size)
    for rank, again in zip(saved[size], loaded[size], strict=True):
        assert largest(rank["one unit"]["moved"]) >= whole
        assert largest(again[f"fsdp2-{other} as one unit"]["moved"]) >= whole
    ended = spawn(size, gather_counted)
    assert all(each.is_good for each in ended), logs(ended)
    for moved in (each.value for each in ended):
        assert sum(each.elements for each in moved if each.is_float) >= whole


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_writes_its_own_share(saved: dict[int, list[dict[str, Any]]], size: int) -> None:
    whole, _ = sizes()
    # Weights and two moments.
    expected = 3 * whole * FLOAT_BYTES
    for wrap in (*FLAT, "fsdp2"):
        parts = saved[size][0][wrap]["parts"]
        assert len(parts) == size
        # Each tensor has a head of its own, which in a model as small as this one is not nothing.
        assert expected <= sum(parts) < expected * 1.25, wrap
        assert max(parts) < expected / size * 1.25, wrap


@pytest.mark.promise("C5")
def test_the_full_state_dict_of_what_a_run_brought_back_is_that_of_the_unsharded_model(tmp_path: Path) -> None:
    (alone,) = good(spawn(1, save_counted, str(tmp_path), ("bare",)))
    expected = alone["bare"]["weights"]
    for size in SIZES:
        first, *others = good(spawn(size, export, str(tmp_path / "bare-1"), FLAT))
        for wrap in FLAT:
            assert first[wrap]["state"] == expected, wrap
            assert all(rank[wrap]["state"] == {} for rank in others), wrap


@pytest.mark.promise("C5")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_full_state_dict_is_offloaded_unit_by_unit(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    (alone,) = good(spawn(1, save_counted, str(tmp_path), ("bare",), "cuda", CUDA_WIDTH))
    first, second = (
        each["units"] for each in good(spawn(2, export, str(tmp_path / "bare-1"), ("units",), "cuda", CUDA_WIDTH))
    )
    assert first["state"] == alone["bare"]["weights"]
    assert first["devices"] == {"cpu"}
    assert second["state"] == {}
    whole_bytes, block_bytes = (FLOAT_BYTES * each for each in sizes(CUDA_WIDTH))
    for name in ("shard_bytes", "held_bytes", "peak_bytes"):
        record_property(name, first[name])
    record_property("whole_bytes", whole_bytes)
    record_property("block_bytes", block_bytes)
    assert first["held_bytes"] >= first["shard_bytes"]
    assert first["peak_bytes"] < 2 * whole_bytes + first["shard_bytes"]
    # The export itself takes the room of a unit or two: torch gathers one at a time and moves it to the CPU.
    assert block_bytes <= first["peak_bytes"] - first["held_bytes"] < whole_bytes * 3 / 4
