"""What ``validate`` says about the size of a model."""

import pytest

from unbroken.cli.validate import _model_line
from unbroken.config import from_preset


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "1.1 M parameters (1,098,880)"),
        (["model.n_embd=32", "model.n_layer=1"], "41,056 parameters"),
    ],
)
def test_a_number_of_parameters_is_reported_once_where_its_short_form_is_no_shorter(
    overrides: list[str], line: str
) -> None:
    assert _model_line(from_preset("tiny", overrides).config) == line
