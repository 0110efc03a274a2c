"""A checkpoint has the names that the model's author wrote, whatever was around it, and goes into any other wrapper."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resize_world import load_each, place, save_each
from unbroken.store.directory import Store
from unbroken.testing.worlds import Ended, logs, spawn

WRAPS = ("ddp", "ddp-compile", "compile-ddp", "fsdp", "fsdp-compile", "bare")
NAMES = {f"model.{layer}.{leaf}" for layer in ("first", "module", "last") for leaf in ("weight", "bias")}


def good(ended: list[Ended]) -> list[dict[str, Any]]:
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are."""
    return tmp_path_factory.mktemp("wrappers")


@pytest.fixture(scope="module")
def saved(root: Path) -> dict[str, Any]:
    """What two ranks saved under each wrapper."""
    return good(spawn(2, save_each, str(root), WRAPS))[0]


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_are_the_authors_own(root: Path, saved: dict[str, Any], wrap: str) -> None:
    store = Store(Path(place(str(root), wrap, 2)) / "checkpoints")
    names = store.read_manifest("final").tensors
    shared = {name for name in names if name.startswith("model.")}
    # A layer that its author called `module` keeps its name.
    assert shared == NAMES
    moments = {name for name in names if name.startswith("optimizer.") and name.endswith(".exp_avg")}
    assert moments == {f"optimizer.state.{name.removeprefix('model.')}.exp_avg" for name in NAMES}
    assert set(saved[wrap]["weights"]) == {name.removeprefix("model.") for name in NAMES}


def test_what_was_saved_in_any_wrapper_loads_into_any_other(root: Path, saved: dict[str, Any]) -> None:
    sources = tuple((wrap, 2) for wrap in WRAPS)
    for size in (1, 2):
        for rank in good(spawn(size, load_each, str(root), sources, WRAPS)):
            assert len(rank) == len(WRAPS) ** 2
            for key, found in rank.items():
                expected = saved[key.split()[0]]
                assert found["weights"] == expected["weights"], key
                assert found["moments"] == expected["moments"], key


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)])
def test_tensor_parallel_layers_load_at_the_same_degree_and_at_another(tmp_path: Path, sizes: tuple[int, int]) -> None:
    before, after = sizes
    expected = good(spawn(before, save_each, str(tmp_path), ("tp",)))[0]["tp"]
    for rank in good(spawn(after, load_each, str(tmp_path), (("tp", before),), ("tp",))):
        assert rank[f"tp {before} as tp"]["weights"] == expected["weights"]
        assert rank[f"tp {before} as tp"]["moments"] == expected["moments"]
