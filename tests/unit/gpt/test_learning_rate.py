"""The learning rate: a function of the step, of which every corner is known."""

import math
from itertools import pairwise

import pytest

from unbroken.config import OptimizerConfig
from unbroken.gpt.optimizer import rate_at

STEPS = 100


def rates(**options: object) -> list[float]:
    optimizer = OptimizerConfig(**{"learning_rate": 2.0, "warmup_steps": 10, "min_lr_ratio": 0.1, **options})  # type: ignore[arg-type]
    return [rate_at(step, optimizer, STEPS) for step in range(STEPS)]


@pytest.mark.promise("C14")
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_rises_to_the_peak_and_falls_to_the_minimum(schedule: str) -> None:
    found = rates(schedule=schedule)
    assert found[:10] == [2.0 * ((step + 1) / 10) for step in range(10)]
    assert max(found) == found[9] == found[10] == 2.0
    assert found[-1] == pytest.approx(0.2, abs=0)
    assert all(later <= earlier for earlier, later in pairwise(found[9:]))


def test_a_cosine_is_halfway_down_in_the_middle_and_a_line_is_straight() -> None:
    assert rates(schedule="cosine", decay_steps=81)[50] == pytest.approx(1.1)
    assert rates(schedule="linear", decay_steps=81)[50] == pytest.approx(1.1)
    assert rates(schedule="cosine", decay_steps=81)[30] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates(schedule="linear", decay_steps=81)[30] == pytest.approx(0.2 + 1.8 * 0.75)


def test_wsd_stays_at_the_peak_until_the_last_tenth() -> None:
    found = rates(schedule="wsd")
    assert set(found[10:91]) == {2.0}
    assert found[91] < 2.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_that_is_over_stays_at_the_minimum(schedule: str) -> None:
    assert set(rates(schedule=schedule, decay_steps=20)[29:]) == {0.2}


def test_without_a_warmup_and_with_one_step_of_decay_every_step_has_a_rate() -> None:
    assert rates(warmup_steps=0)[0] == 2.0
    assert all(math.isfinite(rate) and rate > 0 for rate in rates(warmup_steps=0, decay_steps=1))


def test_more_steps_than_planned_change_nothing_before_the_decay_of_wsd() -> None:
    optimizer = OptimizerConfig(learning_rate=2.0, warmup_steps=10, schedule="wsd", decay_steps=10)
    assert [rate_at(step, optimizer, 100) for step in range(90)] == [
        rate_at(step, optimizer, 200) for step in range(90)
    ]
