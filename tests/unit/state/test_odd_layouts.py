"""Buffers whose elements do not lie in memory as they read: a resume gives them back, or no save is made of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.state.tiny import quietly
from unbroken import Run
from unbroken.errors import TensorUnsupported


def holding(buffer: torch.Tensor) -> torch.nn.Module:
    model = torch.nn.Linear(2, 1)
    model.register_buffer("held", buffer)
    return model


def train(directory: Path, model: torch.nn.Module) -> None:
    with Run(directory, settings=quietly(), model=model) as run:
        for _ in run.steps(2):
            pass


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda numbers: numbers.conj(),
    "negative": lambda numbers: numbers.conj().imag,
    "expanded": lambda numbers: numbers.real.unsqueeze(1).expand(6, 4),
    "one element, expanded": lambda numbers: numbers.real[:1].expand(3, 5),
    "transposed": lambda numbers: numbers.real.reshape(2, 3).t(),
}


@pytest.mark.promise("U15")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_resumed_as_it_was_saved(view: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    numbers = torch.arange(1, 7) + 1j * torch.arange(1, 7)
    train(tmp_path, holding(view(numbers)))
    other = holding(view(torch.zeros(6, dtype=torch.complex64)))
    train(tmp_path, other)
    assert torch.equal(other.get_buffer("held"), view(numbers))


@pytest.mark.promise("U15")
def test_windows_that_overlap_are_refused_by_name_and_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TensorUnsupported, match=r"model\.held"):
        train(tmp_path, holding(torch.arange(8.0).unfold(0, 4, 1)))
