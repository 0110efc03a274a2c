"""What can be handed over, and where the values of an optimizer go."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.unit.state.tiny import quietly
from unbroken import Run
from unbroken.errors import NotAnItem
from unbroken.state.items import ModuleItem, ObjectItem, OptimizerItem, is_extra, like_parameter, make_items


def test_models_come_first_then_optimizers_then_the_rest() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    items = make_items({"scheduler": scheduler, "optimizer": optimizer, "model": model})
    assert [(item.name, type(item)) for item in items] == [
        ("model", ModuleItem),
        ("optimizer", OptimizerItem),
        ("scheduler", ObjectItem),
    ]


@pytest.mark.parametrize("name", ["rng_state", "generators", "ranks", "counters", "a.b", "two words"])
def test_a_name_that_a_checkpoint_needs_itself_is_refused(name: str) -> None:
    with pytest.raises(NotAnItem):
        make_items({name: nn.Linear(1, 1)})


def test_an_optimizers_state_goes_by_names_and_comes_back_without_a_cast() -> None:
    def make() -> tuple[nn.Linear, OptimizerItem]:
        model = nn.Linear(2, 2).to(torch.bfloat16)
        groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]
        optimizer = torch.optim.AdamW(groups)
        return model, OptimizerItem("optimizer", optimizer, model)

    model, item = make()
    for parameter in model.parameters():
        # A user's optimizer may keep its moments more exactly than the parameter.
        item.optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.rand(parameter.shape)}
    state = item.take()
    assert set(state["state"]) == {"weight", "bias"}
    assert [group["params"] for group in state["param_groups"]] == [["weight"], ["bias"]] == item.groups()
    other, fresh = make()
    fresh.give(state)
    kept = fresh.optimizer.state[other.weight]
    assert kept["exp_avg"].dtype == torch.float32
    assert torch.equal(kept["exp_avg"], item.optimizer.state[model.weight]["exp_avg"])
    assert fresh.optimizer.param_groups[0]["lr"] == 0.5


def test_a_step_count_is_on_the_cpu_unless_the_optimizer_counts_on_the_device() -> None:
    parameter = torch.empty((), device="meta")
    count = ("step", torch.float32, ())
    assert like_parameter(parameter, *count, counts_on_device=False).device.type == "cpu"
    assert like_parameter(parameter, *count, counts_on_device=True).device.type == "meta"
    assert like_parameter(parameter, "exp_avg", torch.float32, (), counts_on_device=False).device.type == "meta"
    assert like_parameter(parameter, "history", torch.float32, (3,), counts_on_device=False).device.type == "meta"


def test_fused_and_capturable_optimizers_count_where_their_parameters_are() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "fused": True}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups)
    assert OptimizerItem("optimizer", optimizer, model).counting_on_device() == {"weight"}


def test_extra_state_is_known_by_its_key() -> None:
    assert is_extra("model.0._extra_state.history")
    assert not is_extra("model.extra_state.weight")


@pytest.mark.promise("U13")
def test_a_generator_comes_after_the_loader_that_draws_from_it(tmp_path: Path) -> None:
    """A loader is put back by drawing its batches again, here from a generator that the script shares with it."""

    class Noise(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> torch.Tensor:
            # A closure, so that the loader does not know it.
            return torch.rand(1, generator=shared) + index

    def drawn(total: int) -> list[float]:
        with Run(tmp_path, settings=quietly(), rng=shared, data=DataLoader(Noise(), batch_size=2)) as run:
            return [next(run.data).sum().item() for _ in run.steps(total)]

    shared = torch.Generator().manual_seed(4)
    first = drawn(2)
    shared = torch.Generator()
    rest = drawn(5)
    reference = torch.Generator().manual_seed(4)
    expected = [sum(torch.rand(1, generator=reference).item() for _ in range(2)) for _ in range(5)]
    noise = [value - offset for value, offset in zip(first + rest, (1, 5, 9, 1, 5), strict=True)]
    assert noise == pytest.approx(expected, abs=1e-5)
