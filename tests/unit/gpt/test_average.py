"""The average of the weights: what it is, that its bits do not depend on the shard, that it can stand in for them."""

import pytest
import torch
from torch import nn

from unbroken.gpt.average import WeightAverage


class Many(nn.Module):
    """One parameter, cut into several."""

    def __init__(self, whole: torch.Tensor, cuts: tuple[int, ...]) -> None:
        super().__init__()
        spans = zip((0, *cuts), (*cuts, len(whole)), strict=True)
        self.parts = nn.ParameterList([nn.Parameter(whole[start:end].clone()) for start, end in spans])


def averaged(cuts: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    model = Many(torch.randn(1003, generator=generator), cuts)
    average = WeightAverage(model, 0.97)
    for _ in range(6):
        whole = torch.randn(1003, generator=generator)
        for part, new in zip(model.parts, torch.tensor_split(whole, cuts), strict=True):
            part.data.copy_(new)
        average.update()
    return torch.cat(list(average.state_dict().values()))


@pytest.mark.parametrize("cuts", [(3,), (101, 555), (7, 9, 500, 777)], ids=str)
def test_it_has_the_same_bits_however_the_weights_are_cut(cuts: tuple[int, ...]) -> None:
    assert torch.equal(averaged(cuts), averaged(()))


def test_it_keeps_a_share_of_itself_at_every_step_and_is_called_as_the_weights_are() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    average = WeightAverage(model, 0.75)
    assert average.state_dict().keys() == model.state_dict().keys()
    assert not list(average.parameters()), "an optimizer must not find it"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update()
    for name, tensor in average.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + 0.25)


def test_inside_the_model_computes_with_it_and_afterwards_each_has_its_own_bits_even_after_an_error() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(4.0)
    own, mean = model.weight.detach().clone(), average.state_dict()["weight"].clone()

    def look() -> None:
        with average.exchanged():
            assert torch.equal(model.weight, mean) and torch.equal(average.state_dict()["weight"], own)
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert torch.equal(model.weight, own) and torch.equal(average.state_dict()["weight"], mean)


def test_it_knows_whether_it_came_from_a_checkpoint_and_starts_over_on_request() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(4.0)
    assert not average.is_restored
    average.begin()
    assert torch.equal(average.state_dict()["weight"], model.weight)
    average.load_state_dict(average.state_dict())
    assert average.is_restored
