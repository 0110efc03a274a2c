"""``unbroken.load`` and ``load_path`` take a checkpoint of another tool: read as data, checked like our own."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unbroken
from tests.unit.foreign.test_import import moments, same
from tests.unit.foreign.test_read import dcp_folder, per_rank, trained
from tests.unit.state.tiny import adam, bits, job, learn, model, quietly, tiny
from unbroken.errors import (
    CannotImport,
    ForeignAmbiguous,
    ForeignDamaged,
    ForeignUnknown,
    NeedsClass,
    NotAStore,
    NotExact,
    StateDiffers,
)
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.seal import seal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """A folder for temporary files of its own, which is empty again after each load."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("unbroken-*"))


@pytest.mark.promise("M5")
def test_a_file_a_folder_and_its_parent_are_loaded_without_an_import(tmp_path: Path) -> None:
    first, second = trained(1), trained(2)
    per_rank(tmp_path, first)
    dcp_folder(tmp_path / "dcp_000200", second)
    (tmp_path / "meta_000200.json").write_text('{"step": 200, "val_loss": 1.5}')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for reference, objects, step in (
        ("model_000100.pt", first, 100),
        ("dcp_000200", second, 200),
        ("", second, 200),
    ):
        module = model(5)
        optimizer = adam(module)
        found = unbroken.load(tmp_path / reference, model=module, optimizer=optimizer)
        assert found.step == step and found.items == ("model", "optimizer")
        assert bits(module) == bits(objects["model"]) and same(moments(optimizer), moments(objects["optimizer"]))
    assert found.counters == {"val_loss": 1.5}
    module = model(5)
    assert unbroken.load(f"{tmp_path}@100", model=module).path == tmp_path / "model_000100.pt"
    assert bits(module) == bits(first["model"])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


class Tied(nn.Module):
    """An output layer that is its embedding, as in most small language models."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_alone_need_no_step_and_a_tied_tensor_no_second_name(tmp_path: Path) -> None:
    theirs, ours = Tied(1), Tied(2)
    save_file({"embedding.weight": theirs.embedding.weight.detach()}, tmp_path / "model.safetensors")
    found = unbroken.load(tmp_path / "model.safetensors", model=ours)
    assert found.step is None and found.path == tmp_path / "model.safetensors"
    assert bits(ours) == bits(theirs) and ours.head.weight is ours.embedding.weight


def test_different_values_for_a_tied_tensor_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    path, ours, theirs = tmp_path / "untied.pt", Tied(2), Tied(1)
    state = {**theirs.state_dict(), "head.weight": theirs.embedding.weight.detach() + 1}
    torch.save(state, path)
    before = bits(ours)
    with pytest.raises(StateDiffers, match="one tied tensor here") as refused:
        unbroken.load(path, model=ours)
    assert refused.value.checkpoint == str(path) and bits(ours) == before
    (said,) = refused.value.changed
    assert "embedding.weight" in said and "head.weight" in said
    torch.save({**state, "head.weight": state["embedding.weight"].clone()}, path)
    unbroken.load(path, model=ours)
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float16, "half"), (torch.bfloat16, "bfloat16")])
def test_weights_of_another_type_are_refused_with_the_call_that_makes_them_fit(
    tmp_path: Path, dtype: torch.dtype, cast: str
) -> None:
    path, ours, theirs = tmp_path / "low.pt", model(5), model(1).to(dtype)
    torch.save(theirs.state_dict(), path)
    with pytest.raises(StateDiffers) as refused:
        unbroken.load(path, model=ours)
    assert f"call model.{cast}() before loading" in str(refused.value.so())
    assert not any("unbroken import" in each.command for each in refused.value.help())
    getattr(ours, cast)()
    unbroken.load(path, model=ours)
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("kind", ["extra", "missing"])
def test_extra_or_missing_tensors_are_refused_and_can_be_accepted_by_name(tmp_path: Path, kind: str) -> None:
    path, ours, theirs = tmp_path / "other.pt", model(5), model(1)
    state, kept = dict(theirs.state_dict()), bits(model(5))
    name = next(iter(state))
    if kind == "missing":
        del state[name]
    else:
        name, state["9.weight"] = "9.weight", torch.ones(2)
    torch.save(state, path)
    with pytest.raises(StateDiffers, match=name) as refused:
        unbroken.load(path, model=ours)
    assert "in accept=" in str(refused.value.so()) and bits(ours) == kept
    assert not any("unbroken import" in each.command for each in refused.value.help())
    unbroken.load(path, model=ours, accept=(f"model.{name}",))
    assert all(torch.equal(ours.state_dict()[each], state[each]) for each in state if each != name)


@pytest.mark.parametrize("held", [[{"w": torch.ones(2)}], torch.ones(3)])
def test_a_file_without_named_weights_is_not_called_damaged(tmp_path: Path, held: object) -> None:
    torch.save(held, tmp_path / "held.pt")
    with pytest.raises(CannotImport, match="no weights by name in it"):
        unbroken.load(tmp_path / "held.pt", model=model())


def test_what_does_not_fit_names_the_other_tools_path_and_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    torch.save({"state_dict": model(1).state_dict(), "rng_state": torch.get_rng_state()}, path)
    wide, narrow = model(5, width=6), model(5)
    before = bits(wide), bits(narrow)
    with pytest.raises(StateDiffers) as refused:
        unbroken.load(path, model=wide)
    assert refused.value.checkpoint == str(path) and str(refused.value.changed[0]) in str(refused.value)
    assert "accept=" in str(refused.value.so())
    with pytest.raises(StateDiffers) as refused:
        unbroken.load(path, model=nn.Linear(2, 2))
    assert f"unbroken import {path} " in refused.value.help()[0].command
    with pytest.raises(StateDiffers, match="optimizer: not in the checkpoint, which has model"):
        unbroken.load(path, model=narrow, optimizer=adam(narrow))
    torch.save({"state_dict": model(1).state_dict(), "model": model(2).state_dict()}, path)
    with pytest.raises(CannotImport, match="both state_dict and model"):
        unbroken.load(path, model=narrow)
    torch.save(narrow, path)
    with pytest.raises(NeedsClass):
        unbroken.load(path, model=narrow)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ForeignDamaged):
        unbroken.load(path, model=narrow)
    assert (bits(wide), bits(narrow)) == before


def test_a_path_without_any_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    module = model()
    with pytest.raises(NotAStore):
        unbroken.load(tmp_path, model=module)
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("")
    with pytest.raises(ForeignUnknown, match="zero_to_fp32"):
        unbroken.load(tmp_path / "zero", model=module)
    (tmp_path / "two").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save(module.state_dict(), tmp_path / "two" / name)
    with pytest.raises(ForeignAmbiguous):
        unbroken.load(tmp_path / "two", model=module)


def test_a_sealed_folder_of_another_tool_is_loaded_too(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoint-7"
    folder.mkdir(parents=True)
    save_file(dict(model(1).state_dict()), folder / "model.safetensors")
    (folder / "trainer_state.json").write_text('{"global_step": 7}')
    seal(Store(folder.parent), folder.name, at_ns=1)
    module = model(5)
    for reference in (folder, folder.parent):
        assert unbroken.load(reference, model=module).step == 7
    assert bits(module) == bits(model(1))


@pytest.mark.promise("M5")
def test_a_run_starts_from_a_checkpoint_of_another_tool_and_keeps_nothing_of_it(tmp_path: Path) -> None:
    """The same bits after two more steps as the objects that were trained on; then its own checkpoints are used."""
    objects = trained()
    per_rank(tmp_path, objects, step=4)
    (tmp_path / "extra_000004.pt").unlink()
    source, run = tmp_path / "model_000004.pt", tmp_path / "run"
    with pytest.raises(NotExact) as refused:
        job(run, 6, quietly(load_path=str(source)), **tiny(9))
    assert [name for name, _ in refused.value.differences] == ["rng_state"]
    wide: dict[str, Any] = {"model": (wider := model(9, width=7)), "optimizer": adam(wider)}
    with pytest.raises(StateDiffers) as other:
        job(run, 6, quietly(load_path=str(source), accept=("rng_state",)), **wide)
    assert other.value.checkpoint == str(source)
    assert not [path for path in run.rglob("*") if path.name.startswith(".tmp-")]
    resumed = tiny(9)
    torch.manual_seed(3)
    started_at = []

    def note(run: unbroken.Run, step: int) -> None:
        del step
        started_at.append(run.resumed_from)

    assert job(run, 6, quietly(load_path=str(source), accept=("rng_state",)), body=note, **resumed).step == 6
    assert set(started_at) == {str(source)}
    torch.manual_seed(3)
    for _ in range(2):
        learn(objects)
    assert bits(resumed["model"]) == bits(objects["model"])
    assert same(moments(resumed["optimizer"]), moments(objects["optimizer"]))
    event = read_history(Layout(run)).of_kind("resume")[-1].values
    assert event["imported_from"] == str(source) and event["step"] == 4
    # From now on it has checkpoints of its own.
    shutil.rmtree(tmp_path / "run" / "metrics")
    source.unlink()
    again = tiny(8)
    assert job(run, 6, quietly(load_path=str(source)), **again).step == 6
    assert bits(again["model"]) == bits(resumed["model"])


def test_a_run_does_not_guess_the_step_of_another_tool(tmp_path: Path) -> None:
    torch.save({"model": model(1).state_dict()}, tmp_path / "weights.pt")
    module = model(5)
    with pytest.raises(CannotImport) as refused:
        job(tmp_path / "run", 2, quietly(load_path=str(tmp_path / "weights.pt")), model=module)
    assert "--step 1000" in refused.value.help()[0].command
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".tmp-")]
    assert not list((tmp_path / "run" / "checkpoints").iterdir()) and bits(module) == bits(model(5))
