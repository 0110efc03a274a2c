"""One tensor under two names of an optimizer's or an object's state is one tensor after a resume, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.state.tiny import job, model, quietly
from unbroken.errors import NotExact

pytestmark = pytest.mark.promise("C18")


class Averaging(torch.optim.Optimizer):
    """Writes through one name and reads through the others: another parameter's, and a weight of the model."""

    def __init__(self, parameters: Any) -> None:  # noqa: ANN401
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401
        del closure
        parameters = self.param_groups[0]["params"]
        shared = self.state.get(parameters[0], {}).get("sum")
        for parameter in parameters:
            state = self.state[parameter]
            shared = torch.zeros(2) if shared is None else shared
            state.setdefault("sum", shared).add_(1)
            state.setdefault("anchor", parameters[0].data)
            state["seen"] = state["anchor"].sum()
            parameter.data.add_(parameter.grad, alpha=-0.1 / float(state["sum"][0]))


class Two:
    """One tensor under two names, which its loading keeps, or copies."""

    def __init__(self, *, copies: bool) -> None:
        self.a = self.b = torch.zeros(3)
        self._copies = copies

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"a": self.a, "b": self.b}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.a, self.b = [state[name].clone() if self._copies else state[name] for name in ("a", "b")]


def trained(directory: Path, total: int) -> list[Any]:
    torch.manual_seed(0)
    module = model()
    optimizer = Averaging(module.parameters())
    job(directory, total, model=module, optimizer=optimizer)
    return [[p.tolist() for p in module.parameters()], [state["seen"].item() for state in optimizer.state.values()]]


def test_an_optimizers_tensor_under_several_names_stays_one(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", 6)
    trained(tmp_path / "run", 3)
    assert trained(tmp_path / "run", 6) == whole


def test_an_objects_tensor_under_two_names_stays_one_where_its_loading_keeps_it(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, two=Two(copies=False))
    two = Two(copies=False)
    two.b = torch.zeros(3)
    job(tmp_path / "run", 4, two=two)
    assert two.a is two.b


def test_an_object_whose_loading_makes_two_of_one_is_refused_by_name(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, two=Two(copies=True))
    with pytest.raises(NotExact) as refused:
        job(tmp_path / "run", 4, two=Two(copies=True))
    [(name, what)] = refused.value.differences
    assert name == "two" and "two.state.a, two.state.b" in what
    assert job(tmp_path / "run", 4, quietly(accept=("two",)), two=Two(copies=True)).step == 4
