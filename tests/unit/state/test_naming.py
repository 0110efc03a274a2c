"""Names as the model's author wrote them, whatever is wrapped around or inside."""

import pytest
import torch
from torch import nn

from unbroken.state.naming import clean, inner_attribute, parameter_names, state_names, unwrapped


def compiled(module: nn.Module) -> nn.Module:
    found = torch.compile(module, backend="eager")
    assert isinstance(found, nn.Module)
    return found


class Impostor(nn.Module):
    """A user's own module that has an attribute as the wrappers have."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)
        self._orig_mod = nn.Linear(1, 1)
        self._fsdp_wrapped_module = nn.Linear(1, 1)


def test_only_the_segments_of_real_wrappers_are_dropped() -> None:
    inside = nn.Sequential(compiled(Impostor()), nn.DataParallel(nn.Linear(1, 1)))
    outside = nn.DataParallel(compiled(inside))
    assert set(state_names(outside).values()) == {
        *(
            f"0.{name}.{kind}"
            for name in ("module", "_orig_mod", "_fsdp_wrapped_module")
            for kind in ("weight", "bias")
        ),
        "1.weight",
        "1.bias",
    }
    assert set(parameter_names(outside).values()) == set(state_names(outside).values())


def test_a_wrapper_is_known_by_its_type_and_unwrapped_to_the_innermost() -> None:
    inner = nn.Linear(1, 1)
    assert unwrapped(nn.DataParallel(compiled(inner))) is inner
    assert inner_attribute(Impostor()) is None
    assert inner_attribute(nn.DataParallel(inner)) == "module"


def test_a_tied_parameter_has_the_first_of_its_names_and_stands_in_the_state_under_each() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    model["head"].weight = model["embed"].weight
    assert list(parameter_names(model).values()) == ["embed.weight"]
    assert set(state_names(model).values()) == {"embed.weight", "head.weight"}


def test_two_names_that_would_become_one_are_refused() -> None:
    class Doubled(nn.Module):
        def state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"module.weight": torch.ones(1), "weight": torch.ones(1)}

    wrapper = nn.DataParallel(nn.Linear(1, 1))
    assert clean(wrapper, "module.weight") == clean(wrapper, "weight") == "weight"
    doubled = Doubled()
    assert state_names(doubled) == {"module.weight": "module.weight", "weight": "weight"}
    wrapper.state_dict = doubled.state_dict  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="would mean two tensors: weight"):
        state_names(wrapper)
