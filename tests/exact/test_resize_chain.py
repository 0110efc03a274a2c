"""A run that is killed and resumes in a world of another size, held in another way, ends with the bits of one job."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.exact.chain_world import TOTAL, job, refused
from tests.exact.lane_world import Case
from tests.exact.small_gpt import Shape
from unbroken import errors
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics
from unbroken.testing.worlds import logs, spawn

FULL = Case(shape=Shape(dropout=0.1, is_checkpointed=True))
LOW = replace(FULL, is_low=True)
# Ranks, whether sharded, the step at which all of them are killed, or (negative) stop; 0 runs to the end. Killed at
# an even step, before its save, a job has always logged a step that it loses.
CHAINS = {
    "sharded and replicated by turns": ((4, True, 6), (3, False, -7), (1, True, 10), (2, True, 0)),
    "replicated and sharded by turns": ((4, False, 6), (3, True, 8), (1, False, 10), (2, False, 0)),
}
KINDS = {"fp32": FULL, "bf16": LOW}


def bits(run: Path) -> dict[int, dict[str, str]]:
    """Losses and norms of the steps that count, in hexadecimal."""
    return {step: dict(row.bits) for step, row in read_metrics(Layout(run)).kept.items()}


def run_chain(run: Path, case: Case, links: Sequence[tuple[int, bool, int]]) -> dict[str, Any]:
    """Run the jobs of a chain one after the other; returns what the last one tells."""
    results: dict[str, Any] = {}
    for size, is_sharded, end_at in links:
        ended = spawn(size, job, str(run), replace(case, is_sharded=is_sharded), end_at)
        if end_at > 0:
            # The first to die may take the last exchange of another with it, which then ends by an error.
            assert any(each.exit_code == -signal.SIGKILL for each in ended), logs(ended)
            assert not any(each.is_good for each in ended), logs(ended)
        else:
            assert all(each.is_good for each in ended), logs(ended)
            results = ended[0].value
    return results


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path, str]:
    """One job on one rank, left alone."""
    run = tmp_path_factory.mktemp("alone") / "run"
    case = KINDS[request.param]
    results = run_chain(run, case, [(1, False, 0)])
    return case, run, results["fingerprint"]


@pytest.mark.promise("G1")
@pytest.mark.parametrize("chain", CHAINS)
def test_killed_and_resized_on_the_way_a_run_ends_with_the_bits_of_one_job(
    alone: tuple[Case, Path, str], chain: str, tmp_path: Path
) -> None:
    case, reference, expected = alone
    last = run_chain(tmp_path / "run", case, CHAINS[chain])
    assert last["fingerprint"] == expected
    assert last["began"] in (6, 8), "the last job began from a checkpoint"
    assert bits(tmp_path / "run") == bits(reference)
    assert len(bits(reference)) == TOTAL
    # What was lost in a kill and computed again, elsewhere and in another world, is the same too.
    lost = read_metrics(Layout(tmp_path / "run")).lost
    assert lost and all(dict(row.bits) == bits(reference)[row.step] for row in lost)
    history = read_history(Layout(tmp_path / "run"))
    assert [fact.values["notes"] for fact in history.of_kind("resume")] == [[]] * 4, "a resize that is exact says so"
    assert sum(fact.values["compared"] for fact in history.of_kind("recomputed")) >= len(lost)


def test_another_number_of_lanes_or_another_precision_is_refused_by_name(alone: tuple[Case, Path, str]) -> None:
    case, reference, _ = alone
    changed = replace(case, lanes=8, is_low=not case.is_low)
    [ended] = spawn(1, refused, str(reference), changed)
    assert isinstance(ended.error, errors.ArithmeticDiffers), logs([ended])
    here = "float32" if case.is_low else "bfloat16"
    before = "bfloat16" if case.is_low else "float32"
    assert ended.error.differences == (("lanes", "7", "8"), ("compute_dtype", before, here))
