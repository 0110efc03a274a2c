"""What does not fit is refused by name, and starts fresh only where the user accepted it by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from tests.unit.state.tiny import adam, bits, job, quietly
from unbroken import Run
from unbroken.errors import CannotImport, StateDiffers
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.seal import seal


class Mixture(nn.Module):
    """A router over experts: another number of them means other tensors, and some of another shape."""

    def __init__(self, experts: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(3, 4)
        self.router = nn.Linear(4, experts)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))
        self.register_buffer("load", torch.rand(experts))


def objects(experts: int, seed: int) -> dict[str, Any]:
    module = Mixture(experts, seed)
    return {"model": module, "optimizer": adam(module)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    job(tmp_path / "run", 3, **objects(4, seed=0))
    return tmp_path / "run"


@pytest.mark.promise("M19")
@pytest.mark.parametrize("experts", [3, 6])
def test_another_number_of_experts_is_refused_naming_each_tensor_and_nothing_is_loaded(run: Path, experts: int) -> None:
    fresh = objects(experts, seed=1)
    before = bits(fresh["model"])
    with pytest.raises(StateDiffers) as refused, Run(run, settings=quietly(), **fresh):
        pass
    said = "\n".join(refused.value.details())
    assert "model.router.weight" in said and "model.load" in said
    assert bits(fresh["model"]) == before


@pytest.mark.promise("M19")
@pytest.mark.parametrize("experts", [3, 6])
def test_accepted_by_name_routing_starts_cold_and_all_else_is_loaded_and_it_is_reported(
    run: Path, experts: int
) -> None:
    saved = Mixture(4, seed=0)
    with Run(run, settings=quietly(accept=("optimizer",)), model=saved) as held:
        assert held.step == 3
    fresh = objects(experts, seed=1)
    module, optimizer = fresh["model"], fresh["optimizer"]
    cold = {name: value for name, value in bits(module).items() if name.startswith(("router", "load"))}
    accept = ("model.router", "model.load", *(f"model.experts.{n}" for n in range(3, 6)))
    with Run(run, settings=quietly(accept=accept), **fresh) as held:
        assert held.step == 3
    found, before = bits(module), bits(saved)
    assert {name: found[name] for name in cold} == cold
    warm = [name for name in found if name in before and name not in cold]
    assert warm and all(found[name] == before[name] for name in warm)
    assert module.router.weight not in optimizer.state, "its moments start fresh with it"
    assert optimizer.state[module.trunk.weight]["step"] == 3
    notes = str(read_journal(Layout(run))[-3:])
    assert "model.router.weight: starts fresh" in notes
    job(run, 5, quietly(accept=accept, save_steps=2), **fresh)


def test_a_tensor_that_fits_is_loaded_though_it_was_accepted(run: Path) -> None:
    fresh = objects(4, seed=1)
    with Run(run, settings=quietly(accept=("model.router",)), **fresh) as held:
        assert held.step == 3
    saved = Mixture(4, seed=0)
    with Run(run, settings=quietly(accept=("optimizer",)), model=saved):
        pass
    assert bits(fresh["model"]) == bits(saved)


def test_an_accepted_name_that_met_no_difference_is_reported_and_journalled_and_others_are_not(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = objects(6, seed=1)
    accept = ("model.router", "model.load", "model.experts", "model.ruoter", "trunk", "rng_state")
    with caplog.at_level("WARNING"), Run(run, settings=quietly(accept=accept), **fresh):
        pass
    fact = next(fact for fact in read_journal(Layout(run)) if fact.kind == "accept")
    assert fact.values == {"names": list(accept), "unused": ["model.ruoter", "trunk"]}
    said = [text.split("'")[1] for text in caplog.messages if "had no effect" in text]
    assert said == ["model.ruoter", "trunk"]


@pytest.mark.promise("M19")
def test_a_checkpoint_that_is_not_ours_has_nothing_to_reshard_and_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "other" / "step_5"
    folder.mkdir(parents=True)
    torch.save(Mixture(4, seed=0).state_dict(), folder / "model.pt")
    seal(Store(folder.parent), folder.name, at_ns=1)
    with (
        pytest.raises(CannotImport) as refused,
        Run(tmp_path / "run", settings=quietly(load_path=str(folder)), **objects(4, seed=1)),
    ):
        pass
    assert refused.value.path == folder / "model.pt" and not unbroken.checkpoints(tmp_path / "run")
