"""Reading what other tools write: bit for bit, nothing executed, every problem in one error."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.unit.state.tiny import learn, tiny
from unbroken.errors import ForeignDamaged, NeedsClass
from unbroken.foreign.items import Contents
from unbroken.foreign.read import Selection, read_foreign
from unbroken.store.foreign import resolve_foreign

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(seed: int = 0) -> dict[str, Any]:
    objects = tiny(seed)
    learn(objects)
    return objects


def read(path: Path, **chosen: Any) -> Contents:  # noqa: ANN401
    contents, problems = read_foreign(resolve_foreign(path), Selection(**chosen))
    assert not problems, problems
    return contents


def same(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def per_rank(folder: Path, objects: dict[str, Any], *, ranks: int = 2, step: int = 100) -> Path:
    """The layout of gathered weights and one optimizer file per rank."""
    torch.save(objects["model"].state_dict(), folder / f"model_{step:06d}.pt")
    for rank in range(ranks):
        torch.save(objects["optimizer"].state_dict(), folder / f"optim_{step:06d}_rank{rank}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "world_size": ranks, "val_loss": 2.5}))
    schedule = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 3)
    torch.save({"scheduler": schedule.state_dict(), "rng": torch.get_rng_state()}, folder / f"extra_{step:06d}.pt")
    return folder / f"model_{step:06d}.pt"


def dcp_folder(folder: Path, objects: dict[str, Any]) -> Path:
    model, optimizer = objects["model"], objects["optimizer"]
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp_save(state, checkpoint_id=folder)
    return folder


@pytest.mark.promise("M1")
def test_files_of_ranks_are_read_bit_for_bit(tmp_path: Path) -> None:
    objects = trained()
    found = read(per_rank(tmp_path, objects))
    assert found.steps == {100} and found.counters == {"val_loss": 2.5} and found.world_size == 2
    assert same(found.items["model"].state, dict(objects["model"].state_dict()))
    saved = objects["optimizer"].state_dict()["state"]
    assert same(found.items["optimizer"].state["state"], {str(number): kept for number, kept in saved.items()})
    assert found.items["scheduler"].state["state"]["step_size"] == 3
    assert "rng" in found.left_out


@pytest.mark.promise("M1")
@pytest.mark.parametrize("name", ["dcp_000100", "dist_ckpt_000100"])
def test_folders_of_dcp_are_read_bit_for_bit_under_both_names(tmp_path: Path, name: str) -> None:
    objects = trained()
    folder = dcp_folder(tmp_path / name, objects)
    (folder / "meta.json").write_text('{"step": 100}')
    torch.save({"scheduler": {"last_epoch": 4}}, folder / "extra_state.pt")
    found = read(tmp_path)
    assert found.steps == {100}
    assert same(found.items["model"].state, dict(objects["model"].state_dict()))
    expected = get_optimizer_state_dict(objects["model"], objects["optimizer"])
    assert found.items["optimizer"].kind == "optimizer"
    assert same(found.items["optimizer"].state["state"], expected["state"])
    assert found.items["scheduler"].state["state"] == {"last_epoch": 4}


def test_a_dictionary_is_sorted_by_what_its_values_are(tmp_path: Path) -> None:
    objects = trained()
    wrapped = {f"module._orig_mod.{key}": value for key, value in objects["model"].state_dict().items()}
    saved = {"model": wrapped, "optimizer": objects["optimizer"].state_dict(), "iter_num": 40, "best_val_loss": 1.5}
    torch.save({**saved, "model_args": {"n_layer": 2}, "hook": [objects["model"].state_dict()]}, tmp_path / "ckpt.pt")
    found = read(tmp_path)
    assert same(found.items["model"].state, dict(objects["model"].state_dict()))
    assert found.steps == {40} and found.counters == {"best_val_loss": 1.5, "model_args": {"n_layer": 2}}
    assert sorted(found.items) == ["model", "optimizer"] and sorted(found.left_out) == ["hook"]
    assert sorted(read(tmp_path, items=("model",)).items) == ["model"]
    assert sorted(read(tmp_path, prefix="0.").items["model"].state) == ["bias", "weight"]
    tied = read(tmp_path, ties=(("head.weight", "2.weight"),)).items["model"].state
    assert tied["head.weight"] is tied["2.weight"]


def test_a_requested_name_that_is_missing_is_named(tmp_path: Path) -> None:
    torch.save(trained()["model"].state_dict(), tmp_path / "step-7.pt")
    source = resolve_foreign(tmp_path)
    for chosen, problem in (
        (Selection(items=("ema",)), "ema: not in the checkpoint, which has model"),
        (Selection(prefix="net."), "model: no tensor's name begins with 'net.'"),
        (Selection(ties=(("a", "b"),)), "--tie a=b: model has no tensor b"),
    ):
        assert read_foreign(source, chosen)[1] == [problem]


@pytest.mark.promise("M1", "M26")
def test_every_missing_or_damaged_file_is_in_one_error(tmp_path: Path) -> None:
    path = per_rank(tmp_path, trained(), ranks=4)
    (tmp_path / "optim_000100_rank1.pt").unlink()
    for name, cut in (("model_000100.pt", 200), ("optim_000100_rank2.pt", 900)):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:cut])
    (tmp_path / "meta_000100.json").write_bytes(b'{"step": 100, "world_size": 4, \xff')
    with pytest.raises(ForeignDamaged) as refused:
        read(path)
    named = sorted(problem.partition(":")[0] for problem in refused.value.problems)
    expected = ["meta_000100.json", "model_000100.pt", "optim_000100_rank1.pt", "optim_000100_rank2.pt"]
    assert named == expected and refused.value.exit_code == 3


def test_files_of_unrequested_items_may_be_missing(tmp_path: Path) -> None:
    path = per_rank(tmp_path, trained(), ranks=4)
    (tmp_path / "optim_000100_rank1.pt").unlink()
    (tmp_path / "extra_000100.pt").write_bytes(b"\x00 cut")
    assert sorted(read(path, items=("model",)).items) == ["model"]
    with pytest.raises(ForeignDamaged, check=lambda each: len(each.problems) == 2):
        read(path)


@pytest.mark.promise("M1")
def test_optimizer_files_that_differ_by_rank_are_shards_and_not_imported(tmp_path: Path) -> None:
    path = per_rank(tmp_path, trained(0))
    torch.save(trained(1)["optimizer"].state_dict(), tmp_path / "optim_000100_rank1.pt")
    found = read(path)
    assert "optimizer" not in found.items and "differ" in found.left_out["optimizer"]


def test_a_flipped_bit_is_noticed_though_torch_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    weight = torch.arange(1000.0)
    torch.save({"weight": weight}, path)
    data = bytearray(path.read_bytes())
    data[bytes(data).index(weight[500:501].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path)["weight"], weight)
    with pytest.raises(ForeignDamaged, check=lambda each: len(each.problems) == 1):
        read(path)


@pytest.mark.promise("M26")
def test_missing_short_and_outside_files_of_dcp_are_all_named(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "dcp_000100", trained())
    (shard,) = folder.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(ForeignDamaged, check=lambda each: len(each.problems) == 1) as refused:
        read(folder)
    assert "bytes, the index needs" in refused.value.problems[0]
    shard.unlink()
    with pytest.raises(ForeignDamaged) as refused:
        read(folder)
    assert refused.value.problems == (f"{shard.name}: is missing",)
    # An index that points at a file of somebody else.
    shard.write_bytes(whole)
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(ForeignDamaged) as refused:
        read(folder)
    assert refused.value.problems == ("../../secret: it is outside the checkpoint",)


class Runs:
    """Makes a file when it is unpickled by pickle itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_pickle_that_would_run_code_is_not_run(tmp_path: Path, is_legacy: bool) -> None:
    path, proof = tmp_path / "step-7.pt", tmp_path / "proof"
    torch.save({"model": Runs(proof)}, path, _use_new_zipfile_serialization=not is_legacy)
    for allowed in ((), ("posix.mkdir",)):
        with pytest.raises(ForeignDamaged) as refused:
            read(path, allowed=allowed)
        assert "posix.mkdir" in refused.value.problems[0]
    folder = dcp_folder(tmp_path / "dcp_000001", trained())
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(proof)))
    with pytest.raises(ForeignDamaged, check=lambda each: len(each.problems) == 1) as refused:
        read(folder)
    assert "posix.mkdir" in refused.value.problems[0]
    assert not proof.exists()
    # The same bytes run it elsewhere: the test would notice.
    pickle.loads(pickle.dumps(Runs(proof)))
    assert proof.exists()


class Options:
    """A class of somebody's own, as configurations are pickled with."""

    made = 0

    def __init__(self, width: int) -> None:
        Options.made += 1
        self.width = width

    def __setstate__(self, state: dict[str, Any]) -> None:
        Options.made += 1
        self.__dict__.update(state)


def test_a_class_is_read_only_if_it_is_named_and_then_as_data(tmp_path: Path) -> None:
    path, name = tmp_path / "step-7.pt", f"{Options.__module__}.Options"
    torch.save({"model": trained()["model"].state_dict(), "options": Options(3)}, path)
    made = Options.made
    with pytest.raises(NeedsClass) as refused:
        read(path)
    assert refused.value.classes == ((path.name, name),)
    assert f"--allow-class {name}" in refused.value.help()[0].command
    found = read(path, allowed=(name,))
    assert found.counters == {"options": {"class": name, "state": {"width": 3}}}
    assert Options.made == made


def test_a_checkpoint_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = per_rank(tmp_path, trained())
    load = torch.load

    def load_beside_a_writer(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        found = load(*arguments, **options)
        (tmp_path / "meta_000100.json").write_text('{"step": 100, "world_size": 2, "more": true}')
        return found

    monkeypatch.setattr(torch, "load", load_beside_a_writer)
    (tmp_path / "extra_000100.pt").unlink()
    with pytest.raises(ForeignDamaged) as refused:
        read(path)
    assert refused.value.problems == ("meta_000100.json: changed while it was read; let its writer finish first",)


def test_the_files_of_the_other_tool_are_never_touched(tmp_path: Path) -> None:
    per_rank(tmp_path, trained())
    dcp_folder(tmp_path / "dcp_000100", trained())
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*") if path.is_file()}
    read(tmp_path / "model_000100.pt")
    read(tmp_path / "dcp_000100")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before


def test_pipeline_stages_of_kempnerforge_are_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "step_9"
    whole = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for number, part in enumerate((nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]}))):
        optimizer = torch.optim.AdamW(part.parameters())
        learn({"optimizer": optimizer})
        dcp_folder(folder / f"pp{number}", {"model": part, "optimizer": optimizer})
    (folder / "metadata.json").write_text('{"step": 9}')
    torch.save({"step": 9, "tokens_seen": 12}, folder / "train_state.pt")
    found = read(tmp_path)
    assert found.steps == {9} and found.counters == {"tokens_seen": 12}
    assert same(found.items["model"].state, dict(whole.state_dict()))
    (group,) = found.items["optimizer"].state["param_groups"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    shutil.move(folder / "pp0", folder / "pp2")
    (folder / ".metadata").write_bytes(io.BytesIO().getvalue())
    with pytest.raises(ForeignDamaged):
        read(folder)
