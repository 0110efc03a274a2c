"""However a run is cut into jobs, its metrics read as those of one job, and one wrong bit on the way is seen."""

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsWriter, Number, read_metrics
from unbroken.state.encode import decode, encode
from unbroken.testing import compare_runs, strategies
from unbroken.testing.exactness import is_measured
from unbroken.testing.strategies import JobSpan

STITCHING = settings(derandomize=True, max_examples=40, deadline=None, database=None)
STEPS = 8
series = st.lists(strategies.metric_values(), min_size=STEPS, max_size=STEPS)


def write(run: Path, chain: list[JobSpan], values: list[dict[str, Number]], poisoned: tuple[int, int] | None) -> None:
    for job, span in enumerate(chain, start=1):
        writer = MetricsWriter(Layout(run), job, start=span.start)
        for step in range(span.start + 1, span.end + 1):
            said = values[step - 1]
            writer.write(step, {**said, "loss": 0.1} if (job, step) == poisoned else said)
        writer.close()


@STITCHING
@given(strategies.chains(steps=STEPS), series)
def test_a_run_of_any_jobs_is_equal_to_one_job(chain: list[JobSpan], values: list[dict[str, Number]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one", Path(folder) / "many"
        write(one, [JobSpan(0, STEPS)], values, None)
        write(many, chain, values, None)
        found = compare_runs(one, many)
        # A step that has nothing but measured times is no proof of anything.
        results = sum(any(not is_measured(name) for name in row) for row in values)
        assert found.agreeing == results and found.is_equal == (results > 0), found.lines()
        computed = sum(span.end - span.start for span in chain)
        assert len(read_metrics(Layout(many)).lost) + STEPS == computed


@pytest.mark.promise("X3")
@STITCHING
@given(strategies.chains(steps=STEPS), st.data())
def test_a_wrong_bit_in_a_step_that_is_computed_again_is_corruption_and_in_one_that_stays_a_difference(
    chain: list[JobSpan], data: st.DataObject
) -> None:
    job, span = data.draw(st.sampled_from([(n, s) for n, s in enumerate(chain, start=1) if s.end > s.start]))
    step = data.draw(st.integers(span.start + 1, span.end))
    values: list[dict[str, Number]] = [{"loss": math.sqrt(at + 1)} for at in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one", Path(folder) / "many"
        write(one, [JobSpan(0, STEPS)], values, None)
        write(many, chain, values, (job, step))
        found = compare_runs(one, many)
        assert not found.is_equal
        assert (found.first is not None and found.first.step == step) or step in {each.step for each in found.corrupt}


@STITCHING
@given(strategies.state_trees())
def test_a_state_of_plain_values_comes_back_from_a_checkpoint_as_it_was(state: dict[str, object]) -> None:
    def no_tensor(*_: object) -> object:
        raise AssertionError("there are none")

    kept = encode(state, item="thing", path="thing", take_tensor=no_tensor, allow_pickle=False)  # type: ignore[arg-type]
    back = decode(kept, item="thing", give_tensor=no_tensor, allow_pickle=False)  # type: ignore[arg-type]
    assert repr(back) == repr(state)
