import json
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from unbroken.state.encode import Json
from unbroken.state.flatten import flatten, unflatten
from unbroken.store.fields import Malformed


def through_disk(item: str, state: object) -> Any:  # noqa: ANN401 - as load_state_dict takes it
    parts = flatten(item, state, allow_pickle=False)
    structure: Json = json.loads(json.dumps(parts.structure, sort_keys=True, allow_nan=False))
    copies = {name: tensor.detach().clone() for name, tensor in parts.tensors.items()}
    return unflatten(structure, copies, item=item, allow_pickle=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def train(network: nn.Module, optimizer: Optimizer, schedule: object = None, steps: int = 3) -> list[float]:
    rates = []
    for step in range(steps):
        optimizer.zero_grad()
        network(torch.ones(5, 3) * (step + 1)).square().sum().backward()
        optimizer.step()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(1.0)
        elif isinstance(schedule, LRScheduler):
            schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


class HalfLife:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return float(0.5 ** (step / self.steps))


Make = Callable[[Optimizer], Any]
SCHEDULES: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, HalfLife(3)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, HalfLife(3)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.3, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.3, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 6)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_every_schedule_of_torch_is_in_this_file() -> None:
    known = {
        name
        for name, found in vars(lr_scheduler).items()
        if isinstance(found, type) and issubclass(found, LRScheduler) and not name.startswith("_")
    }
    assert known - {"LRScheduler", "SWALR"} == SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_resumes_with_the_same_rates(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the order in which chained schedules step
        torch.manual_seed(3)
        network = model()
        optimizer = SGD(network.parameters(), lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        train(network, optimizer, schedule)
        states = [
            through_disk(item, held.state_dict()) for item, held in (("o", optimizer), ("s", schedule), ("m", network))
        ]
        expected = train(network, optimizer, schedule, steps=5)

        again = model()
        other = SGD(again.parameters(), lr=0.1, momentum=0.9)
        resumed = SCHEDULES[name](other)
        for held, state in zip((other, resumed, again), states, strict=True):
            held.load_state_dict(state)
        assert train(again, other, resumed, steps=5) == expected
    for left, right in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_schedule_of_averaged_weights_comes_back_as_it_was() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    other = SWALR(SGD([nn.Parameter(torch.ones(1))], lr=0.1), swa_lr=0.05, anneal_epochs=9, anneal_strategy="linear")
    other.load_state_dict(through_disk("swa", schedule.state_dict()))
    assert other.state_dict() == schedule.state_dict()


def test_a_scaler_comes_back_as_it_was() -> None:
    state = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 7,
    }
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.load_state_dict(through_disk("scaler", state))
    assert through_disk("scaler", scaler.state_dict()) == scaler.state_dict() == state


def test_averaged_weights_come_back_as_they_were() -> None:
    network = model()
    averaged = AveragedModel(network, use_buffers=True)
    for _ in range(3):
        averaged.update_parameters(network)
    other = AveragedModel(model(), use_buffers=True)
    other.load_state_dict(through_disk("ema", averaged.state_dict()))
    assert other.n_averaged.item() == 3
    for left, right in zip(averaged.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("make", [Adam, AdamW])
def test_an_optimizer_comes_back_as_it_was(make: Callable[..., Optimizer]) -> None:
    network = model()
    optimizer = make(network.parameters(), lr=torch.tensor(0.01), betas=(0.9, 0.95))
    train(network, optimizer)
    before = optimizer.state_dict()
    found = through_disk("optimizer", before)
    assert list(found["state"]) == [0, 1, 2, 3, 4, 5]
    assert found["param_groups"][0]["betas"] == (0.9, 0.95)
    assert torch.equal(found["state"][3]["exp_avg_sq"], before["state"][3]["exp_avg_sq"])
    make(model().parameters(), lr=0.5).load_state_dict(found)


def test_tensors_have_the_names_that_torch_gives_them() -> None:
    network = model()
    optimizer = Adam(network.parameters())
    train(network, optimizer)
    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "list": [1, {"a": torch.ones(2)}]}
    ours = {name for item, held in state.items() for name in flatten(item, held, allow_pickle=False).tensors}
    theirs, _ = flatten_state_dict(state)
    assert ours == {name for name, value in theirs.items() if isinstance(value, torch.Tensor)}


def test_two_tensors_on_one_path_get_two_names_and_come_back_in_their_places() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "a.b~2": torch.tensor(3), "c": torch.tensor(4)}
    parts = flatten("x", state, allow_pickle=False)
    assert list(parts.tensors) == ["x.a.b", "x.a.b~2", "x.a.b~2~2", "x.c"]
    found: Any = unflatten(parts.structure, parts.tensors, item="x", allow_pickle=False)
    assert [found["a.b"], found["a"]["b"], found["a.b~2"], found["c"]] == [1, 2, 3, 4]


def test_tensors_are_returned_as_they_are_and_tied_ones_under_both_names() -> None:
    weight = nn.Parameter(torch.ones(2))
    parts = flatten("model", {"embed": weight, "head": weight}, allow_pickle=False)
    assert parts.tensors["model.embed"] is weight and parts.tensors["model.head"] is weight


def test_the_versions_in_a_modules_state_dict_come_back() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    found = through_disk("model", state)
    assert type(found) is OrderedDict and list(found) == list(state)
    assert vars(found)["_metadata"] == vars(state)["_metadata"] == OrderedDict({"": {"version": 2}})


def test_a_loaders_nested_state_and_a_generator_of_torch_come_back() -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    state = {
        "_snapshot": {
            "_snapshot_step": 7,
            "_worker_snapshots": {"worker_0": {"fetcher_state": None, "dataset": [(1, "a")]}},
        },
        "_steps_since_snapshot": 0,
        "rng": generator.get_state(),
    }
    found = through_disk("data", state)
    drawn = torch.rand(5, generator=generator)
    generator.set_state(found.pop("rng"))
    assert torch.equal(torch.rand(5, generator=generator), drawn)
    state.pop("rng")
    assert found == state


def test_a_state_that_is_one_tensor_or_nothing_is_a_state_too() -> None:
    assert torch.equal(through_disk("step", torch.tensor(3)), torch.tensor(3))
    assert through_disk("nothing", {}) == {}


def test_a_skeleton_that_names_a_tensor_which_is_not_there_is_malformed() -> None:
    parts = flatten("model", {"a": torch.ones(1)}, allow_pickle=False)
    with pytest.raises(Malformed, match=r"model\.a"):
        unflatten(parts.structure, {}, item="model", allow_pickle=False)
    with pytest.raises(Malformed):
        unflatten({"tensor": {"tensor": "model.a"}}, parts.tensors, item="model", allow_pickle=False)
