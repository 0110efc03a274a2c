"""The bits do not depend on the world on a GPU either: one to four ranks that share one device, over gloo.

Needs a CUDA device, which CI has not.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exact.chain_world import TOTAL, job
from tests.exact.lane_world import Case, train_each
from tests.exact.small_gpt import Shape
from tests.exact.test_resize_chain import CHAINS, bits, run_chain
from unbroken.testing.worlds import logs, spawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = (1, 2, 3, 4)
CASES = tuple(
    Case(is_sharded, is_low, lanes, shape, device="cuda", is_fused=is_fused)
    for shape in (Shape(), Shape(dropout=0.1, is_checkpointed=True))
    for lanes in (7, 8)
    for is_low in (False, True)
    for is_fused in (False, True)
    for is_sharded in (False, True)
)
CONTROLS = (
    Case(broken="stock reduction", lanes=8, device="cuda"),
    Case(broken="rank-seeded dropout", shape=Shape(dropout=0.1), device="cuda", is_sharded=True),
)
# cuBLAS reads the first when it is loaded, before a rank pins anything.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture(scope="module")
def results() -> dict[int, dict[Case, dict[str, Any]]]:
    found = {}
    for size in SIZES:
        ended = spawn(size, train_each, CASES + CONTROLS, timeout_seconds=400, env=ENVIRONMENT)
        assert all(each.is_good for each in ended), logs(ended)
        assert all(each.value == ended[0].value for each in ended), "the ranks disagree"
        found[size] = dict(zip(CASES + CONTROLS, ended[0].value, strict=True))
    return found


def test_on_cuda_every_loss_bit_and_the_final_state_are_equal_in_every_world(
    results: dict[int, dict[Case, dict[str, Any]]],
) -> None:
    families: dict[tuple[object, ...], list[Any]] = defaultdict(list)
    for size in SIZES:
        for case in CASES:
            families[case.family].append(results[size][case])
    assert all(len(same) == 2 * len(SIZES) for same in families.values())
    differing = [family for family, same in families.items() if any(each != same[0] for each in same)]
    assert not differing


@pytest.mark.parametrize("control", CONTROLS, ids=lambda case: case.broken)
def test_on_cuda_without_any_one_of_its_parts_the_bits_depend_on_the_world(
    results: dict[int, dict[Case, dict[str, Any]]], control: Case
) -> None:
    prints = [results[size][control]["fingerprint"] for size in SIZES]
    assert all(each != prints[0] for each in prints[1:]), prints


@pytest.mark.parametrize("is_low", [False, True])
def test_on_cuda_killed_and_resized_on_the_way_a_run_ends_with_the_bits_of_one_job(
    tmp_path: Path, is_low: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ENVIRONMENT["CUBLAS_WORKSPACE_CONFIG"])
    case = Case(is_low=is_low, shape=Shape(dropout=0.1), device="cuda", is_fused=True)
    [alone] = spawn(1, job, str(tmp_path / "one"), replace(case, is_sharded=True), 0)
    assert alone.is_good, logs([alone])
    last = run_chain(tmp_path / "many", case, CHAINS["sharded and replicated by turns"])
    assert last["fingerprint"] == alone.value["fingerprint"]
    assert bits(tmp_path / "many") == bits(tmp_path / "one")
    assert len(bits(tmp_path / "one")) == TOTAL
