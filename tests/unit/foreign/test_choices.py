"""What has two sources is never chosen silently; a pickled module is read as data; help lines repeat the import."""

import contextlib
import io
import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import unbroken
from tests.unit.foreign.test_import import call, moments
from tests.unit.foreign.test_read import dcp_folder, per_rank, read, same, trained
from tests.unit.state.tiny import adam, bits, model
from unbroken.cli.main import main
from unbroken.errors import ForeignDamaged, ForeignUnknown, NeedsClass
from unbroken.foreign.read import Selection, read_foreign
from unbroken.store.foreign import resolve_foreign

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
State = dict[str, torch.Tensor]


def weights(seed: int) -> State:
    return dict(model(seed).state_dict())


def problems(path: Path, **chosen: Any) -> list[str]:  # noqa: ANN401
    return read_foreign(resolve_foreign(path), Selection(**chosen))[1]


def taken(path: Path, **chosen: Any) -> State:  # noqa: ANN401
    return dict(read(path, **chosen).items["model"].state)


# ---- two sources of one item ----


def test_safetensors_win_over_a_pickle_beside_them_and_the_other_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(weights(1), folder / "model.safetensors")
    torch.save(weights(2), folder / "pytorch_model.bin")
    found = read(folder)
    assert same([dict(found.items["model"].state)], [weights(1)])
    assert found.left_out == {"pytorch_model.bin": "model.safetensors has the weights"}
    assert same([taken(folder, items=("model=pytorch_model.bin",))], [weights(2)])
    # The order of Transformers: one file, then shards.
    first = weights(1).popitem()
    save_file({first[0]: first[1] + 1}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {first[0]: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same([taken(folder)], [weights(1)])
    (folder / "model.safetensors").unlink()
    found = read(folder)
    assert list(found.items["model"].state) == [first[0]] and list(found.left_out) == ["pytorch_model.bin"]


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler"])
def test_two_keys_with_one_item_are_an_error_that_names_both_and_how_to_choose(tmp_path: Path, kind: str) -> None:
    one, other = trained(1), trained(2)
    schedules = [torch.optim.lr_scheduler.StepLR(each["optimizer"], step) for each, step in ((one, 2), (other, 3))]
    keys: dict[str, tuple[tuple[str, Any], tuple[str, Any]]] = {
        "model": (("model", one["model"].state_dict()), ("state_dict", other["model"].state_dict())),
        "optimizer": (("optimizer", one["optimizer"].state_dict()), ("optim", other["optimizer"].state_dict())),
        "scheduler": (("scheduler", schedules[0].state_dict()), ("lr_scheduler", schedules[1].state_dict())),
    }
    first, second = keys[kind]
    path = tmp_path / "step-7.pt"
    torch.save({"net": weights(0), **dict(keys[kind])}, path)
    code, document = call(path, tmp_path / "run")
    assert (code, document["kind"]) == (2, "cannot-import") and not (tmp_path / "run").exists()
    (said,) = document["details"]
    assert f"both {first[0]} and {second[0]}" in said and f"--item {kind}={second[0]}" in said
    # An item that was not asked for cannot be in the way.
    assert problems(path, items=("net",)) == []
    for key, value in (first, second):
        torch.save({kind: value}, tmp_path / "alone-7.pt")
        alone = read_foreign(resolve_foreign(tmp_path / "alone-7.pt"))[0]
        chosen = read(path, items=(f"{kind}={key}",))
        assert same([dict(chosen.items[kind].state)], [dict(alone.items[kind].state)])
        left = second[0] if key == first[0] else first[0]
        assert chosen.left_out[left] == f"{kind} is taken from {key}"
    torch.save(dict([first, (second[0], first[1])]), path)
    assert read(path).left_out == {second[0]: f"has the same bits as {first[0]}"}


def test_equal_numbers_with_other_bits_are_not_the_same(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    zero, nan = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    torch.save({"model": {"a": nan, "b": zero}, "state_dict": {"a": nan.clone(), "b": zero.clone()}}, path)
    assert not problems(path)
    for other in (-zero, zero.double(), zero[:1]):
        torch.save({"model": {"a": nan, "b": zero}, "state_dict": {"a": nan, "b": other}}, path)
        assert len(problems(path)) == 1


def test_an_item_can_be_taken_from_any_key_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    torch.save({"gan": {"generator": {"model": weights(1)}, "critic": {"model": weights(2)}}}, path)
    (said,) = problems(path)
    assert "both gan.generator.model and gan.critic.model" in said
    assert same([taken(path, items=("model=gan.critic.model",))], [weights(2)])
    torch.save({"model": weights(1), "model_ema": weights(2)}, path)
    assert same([taken(path, items=("model=model_ema",))], [weights(2)])
    (said,) = problems(path, items=("model=average",))
    assert said.startswith("model=average: not in the checkpoint")


def test_names_that_are_the_same_without_wrappers_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    torch.save({"model": {"_orig_mod.0.weight": torch.ones(2), "0.weight": torch.zeros(2)}}, path)
    (said,) = problems(path)
    assert "_orig_mod.0.weight and 0.weight would both be 0.weight" in said
    moment = {"step": 1, "exp_avg": torch.ones(2)}
    groups = [{"params": ["a._orig_mod.w", "a.w"]}]
    torch.save({"optimizer": {"state": {"a.w": moment}, "param_groups": groups}, "net": weights(1)}, path)
    assert len(problems(path)) == 1 and not problems(path, items=("net",))


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "_orig_mod.module.", "_orig_mod.", "module."])
def test_names_of_wrappers_are_removed_in_any_order_and_only_whole_ones(tmp_path: Path, prefix: str) -> None:
    path = tmp_path / "step-7.pt"
    torch.save({"model": {f"{prefix}{key}": value for key, value in weights(1).items()}}, path)
    assert same([taken(path)], [weights(1)])
    torch.save({"model": {"my_orig_mod.w": torch.ones(1), "module.w": torch.ones(1)}}, path)
    assert sorted(taken(path)) == ["module.w", "my_orig_mod.w"]


def test_pipeline_stages_that_both_have_a_parameter_must_agree(tmp_path: Path) -> None:
    folder = tmp_path / "step_9"
    for number, seed in enumerate((1, 2)):
        part = model(seed)
        dcp_folder(folder / f"pp{number}", {"model": part, "optimizer": adam(part)})
    (folder / "metadata.json").write_text('{"step": 9}')
    torch.save({"step": 9}, folder / "train_state.pt")
    found = problems(folder)
    assert len(found) == len(weights(1)) and all("of pp1 differs" in each for each in found)


def test_a_lightning_file_keeps_what_a_callback_added(tmp_path: Path) -> None:
    saved = {"pytorch-lightning_version": "2.5", "state_dict": weights(1), "global_step": 7, "epoch": 2}
    more = {"ema_state_dict": weights(2), "hyper_parameters": {"lr": 0.1}, "loops": {"fit": 1}, "note": "mine"}
    torch.save({**saved, **more}, tmp_path / "last.ckpt")
    found = read(tmp_path / "last.ckpt")
    assert found.steps == {7} and found.counters == {"epoch": 2, "note": "mine"}
    assert same([dict(found.items["ema"].state)], [weights(2)])
    assert sorted(found.left_out) == ["hyper_parameters", "loops"]


# ---- files that say less than they seem to ----


def test_a_shard_without_its_index_is_named_and_so_is_the_index(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(weights(1), shard)
    with pytest.raises(ForeignUnknown, match=r"file 1 of 2 .* model\.safetensors\.index\.json"):
        read(shard)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ForeignDamaged) as refused:
        read(folder)
    (said,) = refused.value.problems
    assert said.startswith("model.safetensors.index.json: is missing") and shard.name in said


def test_weights_without_their_optimizer_file_say_so(tmp_path: Path) -> None:
    path = per_rank(tmp_path, trained(), ranks=1)
    (tmp_path / "optim_000100_rank0.pt").unlink()
    with pytest.raises(ForeignDamaged, match="1 problem"):
        read(path)
    (tmp_path / "meta_000100.json").unlink()
    assert "optim_000100_rank0.pt" in read(path).left_out["optimizer"]
    assert "optimizer" not in read(path, items=("model",)).left_out


def test_odd_dictionaries_are_imported_whole_or_listed_as_left_out(tmp_path: Path) -> None:
    path, objects = tmp_path / "step-7.pt", trained(1)
    theirs, state = weights(1), objects["optimizer"].state_dict()
    # Weights with other values among them.
    torch.save({**theirs, "epoch": 3, "step": torch.tensor([7])}, path)
    found = read(path)
    assert same(dict(found.items["model"].state), theirs) and (found.counters, found.steps) == ({"epoch": 3}, {7})
    # Arrays of numpy.
    torch.save({"model": {key: value.numpy() for key, value in theirs.items()}}, path)
    assert same(taken(path), theirs)
    # Moments without the groups that say whose they are, and numbers that are there twice.
    lacking: tuple[dict[str, Any], ...] = ({}, {"param_groups": []})
    for groups in lacking:
        torch.save({"model": theirs, "optimizer": {"state": state["state"], **groups}}, path)
        found = read(path)
        assert list(found.items) == ["model"] and "without its param_groups" in found.left_out["optimizer"]
    twice = [{**group, "params": [0, 0, 1, 2]} for group in state["param_groups"]]
    torch.save({"model": theirs, "optimizer": {**state, "param_groups": twice}}, path)
    assert problems(path) == ["optimizer: param_groups: a parameter is in them twice"]
    # Names that no item of a run can have.
    torch.save({"model": theirs, "my-net": weights(2), "generators": weights(2)}, path)
    found = read(path)
    assert list(found.items) == ["model"] and sorted(found.left_out) == ["generators", "my-net"]
    assert same(dict(read(path, items=("net=my-net",)).items["net"].state), weights(2))
    assert len(problems(path, items=("my-net",))) == 1
    # An object that is no module.
    torch.save({"model": theirs, "optimizer": objects["optimizer"]}, path)
    name = f"{torch.optim.AdamW.__module__}.AdamW"
    assert name in read(path, allowed=(name,)).left_out["optimizer"]


def test_a_zip_that_torch_save_did_not_write_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "mine")
    with pytest.raises(ForeignDamaged, match=r"torch\.save did not write"):
        read(path)


# ---- pickled objects ----


class Net(nn.Module):
    """A module of somebody's own; it counts how often one is made."""

    made = 0

    def __init__(self, seed: int) -> None:
        super().__init__()
        Net.made += 1
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU())
        self.head = nn.Linear(4, 3, bias=False)
        self.tied = self.body
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Net.made += 1
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def test_a_pickled_module_is_read_as_its_weights_and_never_constructed(tmp_path: Path) -> None:
    path, theirs = tmp_path / "step-7.pt", Net(1)
    torch.save({"net": theirs, "best": 0.5}, path)
    made = Net.made
    with pytest.raises(NeedsClass) as refused:
        read(path)
    allowed = tuple(name for _, name in refused.value.classes)
    assert f"{Net.__module__}.Net" in allowed
    options = [word for name in allowed for word in ("--allow-class", name)]
    code, document = call(path, tmp_path / "run", "--item", "model=net", *options)
    assert code == 0 and Net.made == made, document
    other = Net(2)
    unbroken.load(tmp_path / "run", model=other)
    assert bits(other) == bits(theirs)
    torch.save(theirs, path)
    assert same([taken(path, allowed=allowed)], [dict(theirs.state_dict())])


class Odd:
    """A module's submodule that is none."""


def test_a_pickled_module_with_a_part_that_is_none_is_not_imported_in_part(tmp_path: Path) -> None:
    path, theirs = tmp_path / "step-7.pt", nn.Sequential(nn.Linear(2, 2))
    theirs._modules["odd"] = Odd()  # type: ignore[assignment]
    torch.save(theirs, path)
    names = ("torch.nn.modules.container.Sequential", "torch.nn.modules.linear.Linear", f"{Odd.__module__}.Odd")
    with pytest.raises(ForeignDamaged) as refused:
        read(path, allowed=names)
    assert "odd of its pickled module" in refused.value.problems[0]


# ---- what is not taken ----


def test_files_with_tensors_beside_the_weights_are_named_as_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(weights(1), folder / "model.safetensors")
    left = ["adapter_model.safetensors", "model-00001-of-00099.safetensors", "other.safetensors"]
    for name in left:
        save_file(weights(2), folder / name)
    (folder / "optimizer.pt").write_bytes(b"")
    live = model(3)
    found = unbroken.load(folder, model=live)
    assert bits(live) == bits(model(1)) and sorted(found.left_out) == left
    assert "PEFT" in found.left_out[left[0]] and "in no index" in found.left_out[left[1]]
    # The shards that an index names are read, and one of an older save is not.
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weights(1), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, document = call(folder, tmp_path / "run")
    assert code == 0 and sorted(document["left_out"]) == left


def test_tensors_outside_the_prefix_are_named_as_left_out(tmp_path: Path) -> None:
    path = tmp_path / "step-7.pt"
    state = {f"{part}.{name}": value for part in ("net", "ema") for name, value in weights(1).items()}
    torch.save({"model": {**state, "scale": torch.ones(1)}}, path)
    code, document = call(path, tmp_path / "run", "--prefix", "net.")
    assert code == 0 and document["left_out"] == {
        "model: ema.*": f"{len(weights(1))} tensors outside the prefix 'net.'",
        "model: scale": "1 tensor outside the prefix 'net.'",
    }


@pytest.mark.parametrize(("option", "first", "second"), [("--item", "model=net", "model=ema"), ("--tie", "a=b", "a=c")])
def test_one_name_with_two_sources_is_bad_usage(tmp_path: Path, option: str, first: str, second: str) -> None:
    path = tmp_path / "step-7.pt"
    torch.save({"net": weights(1), "ema": weights(2)}, path)
    code, document = call(path, tmp_path / "run", option, first, option, second)
    assert (code, document["kind"]) == (2, "bad-usage") and not (tmp_path / "run").exists()
    assert f"{option} {first} and {option} {second}" in document["message"]
    assert call(path, tmp_path / "run", "--item", "model=net", "--item", "model=net")[0] == 0


# ---- help lines and addresses ----


def test_help_lines_repeat_the_run_and_the_options_that_were_given(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save(weights(number), tmp_path / f"m{number}.pt")
    run = tmp_path / "my run"
    options = ("--item", "model", "--prefix", "a b.", "--dry-run")
    code, document = call(tmp_path, run, *options)
    again = ["unbroken", "import", str(tmp_path / "m2.pt"), str(run), *options]
    assert (code, document["kind"]) == (2, "foreign-ambiguous") and "2 checkpoints" in document["message"]
    assert sorted(shlex.split(document["help"][0]["command"])) == sorted(again)
    code, document = call(tmp_path / "m2.pt", run, "--require-kind", "dcp", *options)
    assert sorted(shlex.split(document["help"][0]["command"])) == sorted(again)
    torch.save({"model": weights(1), "net": Net(1)}, tmp_path / "m2.pt")
    code, document = call(tmp_path / "m2.pt", run, "--step", "7", *options)
    found = shlex.split(document["help"][0]["command"])
    assert found[:4] == again[:4] and {*options, "--step", "7", "--allow-class"} < set(found)


@pytest.mark.parametrize("address", ["file:///tmp/x", "s3://bucket/a", "https://host/model.pt"])
def test_an_address_is_shown_as_it_was_given(tmp_path: Path, address: str) -> None:
    code, document = call(address, tmp_path / "run")
    assert (code, document["kind"]) == (2, "bad-usage") and f"{address} is an address" in document["message"]
    assert ("name the path /tmp/x" in document["message"]) == address.startswith("file")
    torch.save(weights(1), tmp_path / "a.pt")
    code, document = call(tmp_path / "a.pt", address)
    assert (code, document["kind"], document["at"]) == (2, "bad-run-path", address)
    assert "two slashes" not in document["so"]


def test_a_quiet_import_prints_the_result_alone(tmp_path: Path) -> None:
    torch.save({"model": weights(1), "rng": torch.get_rng_state()}, tmp_path / "step-3.pt")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["import", "--quiet", str(tmp_path / "step-3.pt"), str(tmp_path / "run")]) == 0
    (line,) = printed.getvalue().splitlines()
    assert line.startswith("imported ") and "checkpoint-3" in line


def test_two_optimizers_keep_their_moments(tmp_path: Path) -> None:
    """Numbers of one file are not those of another: each optimizer has its own."""
    one, other = trained(1), trained(2)
    saved = {"model": one["model"].state_dict(), "critic": other["model"].state_dict()}
    optimizers = {"optimizer": one["optimizer"].state_dict(), "critic_optimizer": other["optimizer"].state_dict()}
    torch.save({**saved, **optimizers}, tmp_path / "step-3.pt")
    assert call(tmp_path / "step-3.pt", tmp_path / "run")[0] == 0
    first, second = model(3), model(4)
    optimizer, another = adam(first), adam(second)
    unbroken.load(tmp_path / "run", model=first, critic=second, optimizer=optimizer, critic_optimizer=another)
    assert bits(first) == bits(one["model"]) and bits(second) == bits(other["model"])
    assert same(moments(another), moments(other["optimizer"]))
