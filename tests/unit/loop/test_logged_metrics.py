"""Metrics are read late and exactly."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from unbroken.loop.logged_metrics import LoggedMetrics, NonFinite, first_non_finite


def test_tensors_numbers_and_scalars_of_numpy_come_back_exactly_in_order() -> None:
    logged = LoggedMetrics()
    loss = torch.tensor(0.1, requires_grad=True)
    logged.log({"loss": loss, "tokens": torch.tensor([7]), "lr": 0.1, "flag": True})
    logged.close_step(1)
    logged.log({"loss": torch.tensor(0.3, dtype=torch.float64), "norm": np.float32(0.1)})
    logged.log({"loss": torch.tensor(0.2, dtype=torch.float64)})
    logged.close_step(2)
    logged.close_step(3)
    assert logged.read() == [
        (1, {"loss": loss.item(), "tokens": 7, "lr": 0.1, "flag": True}),
        (2, {"loss": 0.2, "norm": float(np.float32(0.1))}),
    ]
    assert logged.read() == []
    assert logged.latest["loss"] == 0.2


def test_a_loss_that_is_changed_in_place_after_logging_keeps_its_value() -> None:
    logged, total = LoggedMetrics(), torch.zeros(())
    total += 1
    logged.log({"loss": total})
    total += 1
    logged.close_step(1)
    assert logged.read() == [(1, {"loss": 1.0})]


@pytest.mark.parametrize("value", [torch.zeros(2), torch.zeros(1, dtype=torch.complex64), "much", None, [1.0]])
def test_a_value_that_is_not_a_number_is_refused_where_it_is_logged(value: object) -> None:
    with pytest.raises(TypeError, match="metric 'loss'"):
        LoggedMetrics().log({"loss": value})


def test_a_number_that_no_float_can_hold_is_refused_where_it_is_logged() -> None:
    logged = LoggedMetrics()
    logged.log({"tokens": 10**300})
    with pytest.raises(ValueError, match="metric 'x' is larger than a float can hold"):
        logged.log({"x": 10**400})
    with pytest.raises(ValueError, match="larger than a float"):
        logged.log({"x": Fraction(10**400)})


@pytest.mark.parametrize("name", ["step", "bits"])
def test_a_name_that_records_have_themselves_is_refused_where_it_is_logged(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        LoggedMetrics().log({name: 1})


def test_the_first_value_that_is_nan_is_found() -> None:
    rows = [(1, {"loss": 1.0}), (2, {"other": float("nan")}), (3, {"loss": float("inf")}), (4, {"loss": float("nan")})]
    assert first_non_finite(rows, ("norm", "loss")) == NonFinite(3, "loss", float("inf"))
    assert first_non_finite(rows[:2], ("loss",)) is None
