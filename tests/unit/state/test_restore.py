"""What was saved comes back bit for bit, or an error names what does not."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.unit.state.tiny import adam, bits, job, model, quietly, tiny
from unbroken import Run
from unbroken.errors import NeedsPickle, NotExact, StateDiffers
from unbroken.records.journal import read_journal
from unbroken.records.layout import Layout


class Zoo(nn.Module):
    """Parameters and buffers of every dtype and layout, two of them tied."""

    def __init__(self, fill: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
            noise = torch.randn(3, 5, generator=generator).to(dtype) if fill else torch.zeros(3, 5, dtype=dtype)
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(noise))
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool, torch.float8_e4m3fn):
            noise = torch.randint(0, 2, (4,), generator=generator).to(dtype)
            self.register_buffer(f"of_{str(dtype)[6:]}", noise if fill else torch.zeros_like(noise))
        self.turned = nn.Parameter((torch.randn(4, 6, generator=generator) * float(fill)).t())
        self.strided = nn.Parameter((torch.randn(4, 6, generator=generator) * float(fill))[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(-0.0 if fill else 1.0))
        self.odd = nn.Parameter(torch.tensor([float("nan"), float("inf"), -0.0]) if fill else torch.zeros(3))
        self.tied = self.turned


@pytest.mark.promise("M13")
def test_every_dtype_and_layout_comes_back_bit_by_bit(tmp_path: Path) -> None:
    saved, fresh = Zoo(fill=True), Zoo(fill=False)
    assert bits(saved) != bits(fresh)
    job(tmp_path / "run", 2, model=saved)
    with Run(tmp_path / "run", settings=quietly(), model=fresh) as run:
        assert run.step == 2
    assert bits(saved) == bits(fresh)
    assert fresh.tied is fresh.turned
    assert fresh.turned.stride() == saved.turned.stride()


@pytest.mark.promise("M14", "M15")
def test_the_optimizer_the_step_and_objects_of_ones_own_make_the_round_trip(tmp_path: Path) -> None:
    objects = tiny()
    job(tmp_path / "run", 5, **objects)
    again = tiny(seed=9)
    with Run(tmp_path / "run", settings=quietly(), **again) as run:
        assert run.step == 5
    before, after = objects["optimizer"].state_dict(), again["optimizer"].state_dict()
    assert before["param_groups"] == after["param_groups"]
    for number, kept in before["state"].items():
        assert all(torch.equal(kept[key], after["state"][number][key]) for key in kept)
        assert {kept[key].dtype for key in kept} == {after["state"][number][key].dtype for key in kept}


def wrapped_ways() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def compiled(module: nn.Module) -> nn.Module:
        found = torch.compile(module, backend="eager")
        assert isinstance(found, nn.Module)
        return found

    return {
        "plain": lambda module: module,
        "compiled": compiled,
        "data parallel around compiled": lambda module: nn.DataParallel(compiled(module)),
        "compiled around data parallel": lambda module: compiled(nn.DataParallel(module)),
    }


class Named(nn.Module):
    """Its author calls layers as wrappers call theirs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})


@pytest.mark.promise("C18", "G5")
def test_weights_saved_in_any_wrapping_load_into_any_other_and_a_layer_called_module_keeps_its_name(
    tmp_path: Path,
) -> None:
    ways = wrapped_ways()
    for there in ways:
        source = Named(1)
        wrapped = ways[there](source)
        job(tmp_path / there, 2, model=wrapped, optimizer=adam(wrapped))
        for here in ways:
            target = Named(2)
            other = ways[here](target)
            with Run(tmp_path / there, settings=quietly(), model=other, optimizer=adam(other)) as run:
                tensors = set(read_tensors(run))
            assert bits(source) == bits(target), (there, here)
            assert "model.module.module.weight" in tensors
            assert "model.module._orig_mod.bias" in tensors
            assert sum(name.startswith("model.") for name in tensors) == 4


def read_tensors(run: Run) -> list[str]:
    from unbroken.store.directory import Store

    store = Store(run.directory / "checkpoints")
    assert run.resumed_from is not None
    return list(store.read_manifest(Path(run.resumed_from).name).tensors)


@pytest.mark.promise("C18", "G5")
def test_another_architecture_is_refused_key_by_key_and_nothing_is_touched(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    other = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1, bias=False), nn.Linear(1, 1))
    objects: dict[str, Any] = {"model": other, "optimizer": adam(other)}
    before = bits(other)
    with pytest.raises(StateDiffers) as refused, Run(tmp_path / "run", settings=quietly(), **objects):
        pass
    assert {"model.3.bias", "model.3.weight"} <= set(refused.value.missing)
    assert "model.2.bias" in refused.value.unexpected
    assert "model.0.weight" in {each.split(":")[0] for each in refused.value.changed}
    assert bits(other) == before
    assert not objects["optimizer"].state
    assert refused.value.exit_code == 6
    # Nothing was quarantined, and the right model resumes.
    assert job(tmp_path / "run", 4, **tiny(seed=3)).step == 4


def test_parameters_in_other_groups_another_optimizer_and_another_dtype_are_refused(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    grouped = model()
    optimizer = torch.optim.AdamW([{"params": grouped[2].parameters()}, {"params": grouped[0].parameters()}], lr=1e-2)
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, model=grouped, optimizer=optimizer)
    assert refused.value.changed == ("optimizer: its parameters are in other groups, or in another order",)
    same = model()
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, model=same, optimizer=torch.optim.SGD(same.parameters(), lr=1e-2, momentum=0.9))
    assert len(refused.value.changed) == 1
    assert refused.value.changed[0].startswith("optimizer: SGD has dampening, momentum, nesterov; the checkpoint's")
    half = model().half()
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, model=half, optimizer=adam(half))
    assert "model.0.bias" in {each.split(":")[0] for each in refused.value.changed}


@pytest.mark.promise("M23")
def test_a_model_without_memory_is_refused_by_name(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, model=model())
    with torch.device("meta"):
        template = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with pytest.raises(StateDiffers) as refused:
        job(tmp_path / "run", 4, model=template)
    assert any(line.startswith("model.2.weight: has no memory here") for line in refused.value.changed)


@pytest.mark.promise("M17", "M22")
def test_an_item_on_one_side_only_needs_to_be_accepted_by_name(tmp_path: Path) -> None:
    job(tmp_path / "run", 2, **tiny())
    with pytest.raises(NotExact) as refused:
        job(tmp_path / "run", 4, model=model(1))
    assert [name for name, _ in refused.value.differences] == ["optimizer"]
    with pytest.raises(NotExact) as refused:
        job(tmp_path / "run", 4, **tiny(1), extra=nn.Linear(1, 1))
    assert [name for name, _ in refused.value.differences] == ["extra"]
    run = job(tmp_path / "run", 4, quietly(accept=("optimizer",)), model=model(1))
    assert run.step == 4
    [resumed] = [fact for fact in read_journal(Layout(tmp_path / "run")) if fact.kind == "resume"][1:]
    assert [note.split(":")[:2] for note in resumed.values["notes"]] == [["accepted", " optimizer"]]
    [accepted] = [fact for fact in read_journal(Layout(tmp_path / "run")) if fact.kind == "accept"]
    assert accepted.values["names"] == ["optimizer"]


class Amax(nn.Module):
    """Keeps its scaling history outside parameters and buffers, as 8-bit layers do; a fresh one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.history: torch.Tensor | None = None
        self.recipe = "none"

    def get_extra_state(self) -> dict[str, Any]:
        return {"history": self.history, "recipe": self.recipe}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.history, self.recipe = state["history"], state["recipe"]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


@pytest.mark.promise("M24")
def test_the_extra_state_of_a_module_comes_back_and_a_missing_one_is_loud(tmp_path: Path) -> None:
    saved, fresh = Amax(), Amax()
    saved.history, saved.recipe = torch.randn(16), "delayed"
    job(tmp_path / "run", 2, model=nn.Sequential(saved))
    with Run(tmp_path / "run", settings=quietly(), model=nn.Sequential(fresh)):
        pass
    assert fresh.history is not None and torch.equal(fresh.history, saved.history)
    assert fresh.recipe == "delayed"
    job(tmp_path / "plain", 2, model=nn.Sequential(Plain()))
    for there, here, field in (("run", Plain(), "unexpected"), ("plain", Amax(), "missing")):
        with pytest.raises(StateDiffers) as refused:
            job(tmp_path / there, 4, model=nn.Sequential(here))
        assert getattr(refused.value, field) == ("model.0._extra_state",)


@pytest.mark.promise("C15")
def test_a_run_that_turns_mixed_precision_on_starts_a_fresh_scaler_and_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job(tmp_path / "none", 2, **tiny())
    job(tmp_path / "off", 2, **tiny(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    for there in ("none", "off"):
        caplog.clear()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with caplog.at_level(logging.WARNING):
            job(tmp_path / there, 4, **tiny(1), scaler=scaler)
        assert scaler.get_scale() == 8.0
        assert "scaler" in caplog.text
    # From then on it is part of the run.
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    job(tmp_path / "off", 6, **tiny(1), scaler=other)
    assert other.get_scale() == 8.0


@pytest.mark.promise("C16")
def test_an_average_evaluates_to_the_same_bits_after_a_resume(tmp_path: Path) -> None:
    def objects(seed: int) -> dict[str, Any]:
        made = tiny(seed)
        average = AveragedModel(made["model"])
        return {**made, "swa": average, "swa_scheduler": SWALR(made["optimizer"], swa_lr=0.05, anneal_epochs=3)}

    saved, fresh = objects(0), objects(1)

    def average(run: Run, step: int) -> None:
        saved["swa"].update_parameters(saved["model"])
        saved["swa_scheduler"].step()

    job(tmp_path / "run", 4, body=average, **saved)
    sample = torch.randn(5, 3)
    before = saved["swa"](sample)
    with Run(tmp_path / "run", settings=quietly(), **fresh):
        pass
    assert torch.equal(fresh["swa"](sample), before)
    assert int(fresh["swa"].n_averaged) == 4
    assert fresh["swa_scheduler"].state_dict() == saved["swa_scheduler"].state_dict()


class Opaque:
    def __init__(self) -> None:
        self.value: object = {Secret()}

    def state_dict(self) -> dict[str, object]:
        return {"value": list(self.value) if isinstance(self.value, set) else self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


class Secret:
    pass


def test_an_object_that_needs_pickle_is_refused_at_once_and_allowed_by_name(tmp_path: Path) -> None:
    with pytest.raises(NeedsPickle) as refused:
        job(tmp_path / "run", 2, thing=Opaque())
    assert refused.value.item == "thing"
    assert not (tmp_path / "run" / "checkpoints").exists()
    job(tmp_path / "run", 2, quietly(allow_pickle=("thing",)), thing=Opaque())
    # Reading a pickle is what is dangerous: it must be allowed there too.
    with pytest.raises(NeedsPickle):
        job(tmp_path / "run", 4, thing=Empty())
    opened = Empty()
    job(tmp_path / "run", 4, quietly(allow_pickle=("thing",)), thing=opened)
    assert isinstance(opened.value[0], Secret)


class Empty:
    value: Any = None

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
