"""Reading one checkpoint of another tool into items by name: one function per tool.

Everything is read into host memory. Whatever cannot be read is noted, and raised in one error after the last file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.files import LOCAL
from unbroken.foreign.dcp import read_dcp
from unbroken.foreign.items import MODULE, Contents, ForeignItem, missing_ranks
from unbroken.foreign.pickles import ForeignFiles
from unbroken.store.fields import as_whole
from unbroken.store.foreign import (
    ACCELERATE,
    DCP,
    DCP_METADATA,
    FILE,
    GPT_SIMPLE,
    GPT_SIMPLE_WEIGHTS,
    KEMPNERFORGE,
    PER_RANK,
    SAFETENSORS,
    TRAINER_STATE,
    TRANSFORMERS,
    Foreign,
)

_LIGHTNING: Final = "pytorch-lightning_version"
_MODEL_FILE: Final = re.compile(r"(model|pytorch_model)(?:_([0-9]+))?\.(safetensors|bin)")
_OPTIMIZER_FILE: Final = re.compile(r"optimizer(?:_([0-9]+))?\.(?:bin|pt)")
_OBJECT_FILE: Final = re.compile(
    r"(scheduler|scaler|sampler|dl_state_dict|custom_checkpoint)(?:_([0-9]+))?\.(bin|pt|pkl)"
)
_OBJECTS: Final = {"dl_state_dict": "dataloader", "custom_checkpoint": "custom"}
_RNG: Final = "random numbers of another tool's loop"


@dataclass(frozen=True)
class Selection:
    """What the user asked for: which items, with which names.

    Attributes:
        items: the items to import; empty for all.
        prefix: of a model, take the tensors with this prefix and remove it.
        ties: names that a file leaves out because another name has the same tensor.
        allowed: classes whose pickled objects are read as plain data.
    """

    items: Sequence[str] = ()
    prefix: str = ""
    ties: Sequence[tuple[str, str]] = ()
    allowed: Sequence[str] = ()


_EVERYTHING: Final = Selection()


def read_foreign(source: Foreign, selection: Selection = _EVERYTHING) -> tuple[Contents, list[str]]:
    """The contents of a checkpoint, and what does not fit the selection.

    Raises:
        ForeignDamaged: files are missing, damaged, or changed while they were read.
        NeedsClass: pickles need classes that were not allowed.
        PackageMissing: safetensors is not installed.
    """
    files = ForeignFiles(source.path, selection.allowed)
    contents = Contents(only=selection.items)
    _READERS[source.tool](source.path, contents, files)
    files.settle()
    return contents, _select(contents, selection)


def _select(contents: Contents, selection: Selection) -> list[str]:
    problems = []
    if selection.items:
        absent = [name for name in selection.items if name not in contents.items]
        held = ", ".join(sorted(contents.items)) or "nothing"
        problems += [f"{name}: not in the checkpoint, which has {held}" for name in absent]
        contents.items = {name: held for name, held in contents.items.items() if name in selection.items}
    models = [name for name, item in contents.items.items() if item.kind == MODULE]
    for name in models:
        state = contents.items[name].state
        if selection.prefix:
            state = {
                key.removeprefix(selection.prefix): value
                for key, value in state.items()
                if key.startswith(selection.prefix)
            }
            problems += [] if state else [f"{name}: no tensor's name begins with {selection.prefix!r}"]
        for missing, present in selection.ties if name == "model" else ():
            if present in state:
                state = {**state, missing: state[present]}
            else:
                problems.append(f"--tie {missing}={present}: {name} has no tensor {present}")
        contents.items[name] = ForeignItem(MODULE, state)
    if not contents.items and not problems:
        problems.append("it contains neither weights nor an optimizer")
    return problems


# ---- one file ----


def _read_file(path: Path, contents: Contents, files: ForeignFiles) -> None:
    found = files.torch_file(path)
    if isinstance(found, Mapping):
        if _LIGHTNING in found:
            _add_lightning(found, contents)
        else:
            contents.add_dictionary(found)
    elif found is not None:
        files.problems.append(f"{path.name}: it holds a {type(found).__name__}, not a dictionary")


def _add_lightning(found: Mapping[str, Any], contents: Contents) -> None:
    contents.add_weights("model", found.get("state_dict"))
    for key, name, add in (
        ("optimizer_states", "optimizer", contents.add_optimizer),
        ("lr_schedulers", "scheduler", contents.add_object),
    ):
        held = found.get(key) or []
        for number, state in enumerate(held):
            add(name if len(held) == 1 else f"{name}_{number}", state)
    if (step := as_whole(found.get("global_step"))) is not None:
        contents.steps.add(step)
    if (epoch := as_whole(found.get("epoch"))) is not None:
        contents.counters["epoch"] = epoch
    for key in ("callbacks", "loops", "hyper_parameters"):
        if found.get(key):
            contents.left_out[key] = "state of Lightning's own loop"


def _read_safetensors(path: Path, contents: Contents, files: ForeignFiles) -> None:
    contents.has_order = False
    contents.add_weights("model", files.safetensors(path))


def _read_per_rank(path: Path, contents: Contents, files: ForeignFiles) -> None:
    """``model_000100.pt`` and what lies beside it."""
    digits = path.stem.removeprefix("model_")
    contents.steps.add(int(digits))
    if not contents.add_weights("model", files.torch_file(path)) and not files.problems and not files.classes:
        files.problems.append(f"{path.name}: it does not hold the state of a model")
    beside = {node.name for node in LOCAL.list_directory(path.parent)}
    stated = None
    if (meta := f"meta_{digits}.json") in beside:
        stated = files.json(path.parent / meta)
        _add_meta(stated, contents)
    if contents.wants_others and (extra := f"extra_{digits}.pt") in beside:
        _add_extra(files.torch_file(path.parent / extra), contents)
    ranks = {
        int(found[1]): found[0] for name in beside if (found := re.fullmatch(rf"optim_{digits}_rank(\d+)\.pt", name))
    }
    world = as_whole(stated.get("world_size")) if stated else None
    if not contents.wants("optimizer"):
        return
    if ranks or world is not None:
        for rank in missing_ranks(ranks, world):
            files.problems.append(f"optim_{digits}_rank{rank}.pt: is missing")
    states = [files.torch_file(path.parent / ranks[rank]) for rank in sorted(ranks)]
    _add_ranks(states, digits, contents, files)


def _add_ranks(states: Sequence[Any], digits: str, contents: Contents, files: ForeignFiles) -> None:
    """One optimizer of the files of all ranks, where all hold the same; shards of one cannot be put together."""
    contents.world_size = max(len(states), 1)
    if not states or files.problems or files.classes:
        return
    if not all(_is_same(states[0], other) for other in states[1:]):
        contents.left_out["optimizer"] = (
            f"the {len(states)} files optim_{digits}_rank*.pt differ: each has a shard that only its own number of "
            "ranks can use"
        )
    elif not contents.add_optimizer("optimizer", states[0]):
        files.problems.append(f"optim_{digits}_rank0.pt: it does not hold the state of an optimizer")


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


def _add_meta(stated: Mapping[str, Any], contents: Contents) -> None:
    if (step := as_whole(stated.get("step"))) is not None:
        contents.steps.add(step)
    contents.counters.update({key: value for key, value in stated.items() if key not in ("step", "world_size")})


def _add_extra(found: object, contents: Contents) -> None:
    if isinstance(found, Mapping):
        contents.add_dictionary(found)


# ---- folders ----


def _read_dcp(path: Path, contents: Contents, files: ForeignFiles) -> None:
    """A folder of DCP, with ``meta.json`` and ``extra_state.pt`` inside it, or named by their step beside it."""
    found = read_dcp(path, files)
    contents.has_order = False
    if found:
        contents.add_dictionary(found)
    digits = path.absolute().name.rpartition("_")[2]
    for meta in (path / "meta.json", path.parent / f"meta_{digits}.json"):
        if digits.isdecimal() and LOCAL.find(meta) is not None:
            _add_meta(files.json(meta), contents)
            break
    for extra in (
        path / "extra_state.pt",
        path.parent / f"extra_state_{digits}.pt",
        path.parent / f"extra_{digits}.pt",
    ):
        if contents.wants_others and digits.isdecimal() and LOCAL.find(extra) is not None:
            _add_extra(files.torch_file(extra), contents)
            break


def _read_kempnerforge(path: Path, contents: Contents, files: ForeignFiles) -> None:
    """A folder of DCP, or one for each pipeline stage, and the rest in ``train_state.pt``."""
    contents.has_order = False
    stages = [path] if LOCAL.find(path / DCP_METADATA) is not None else _stages(path, files)
    found: dict[str, Any] = {}
    for stage in stages:
        _merge(found, read_dcp(stage, files))
    if found:
        contents.add_dictionary(found)
    rest = files.torch_file(path / "train_state.pt")
    if isinstance(rest, Mapping):
        contents.add_dictionary(rest)


def _stages(path: Path, files: ForeignFiles) -> list[Path]:
    names = {node.name for node in LOCAL.list_directory(path)}
    numbers = {int(name[2:]) for name in names if re.fullmatch(r"pp[0-9]+", name)}
    files.problems += [f"pp{number}: is missing" for number in missing_ranks(numbers, None)]
    return [path / f"pp{number}" for number in sorted(numbers)]


def _merge(into: dict[str, Any], stage: Mapping[str, Any]) -> None:
    """Add one pipeline stage: its parameters are its own, its optimizer has the same groups as the others."""
    for key, value in stage.items():
        held = into.setdefault(key, value)
        if held is not value and key == "optimizer":
            held["state"].update(value["state"])
            for group, more in zip(held["param_groups"], value["param_groups"], strict=True):
                group["params"] = [*group["params"], *more["params"]]
        elif held is not value and isinstance(held, dict):
            held.update(value)


def _read_gpt_simple(path: Path, contents: Contents, files: ForeignFiles) -> None:
    state = files.json(path / TRAINER_STATE)
    if (step := as_whole(state.get("step"))) is not None:
        contents.steps.add(step)
    contents.counters.update({key: state[key] for key in ("tokens_trained",) if key in state})
    contents.add_weights("model", files.torch_file(path / GPT_SIMPLE_WEIGHTS))
    if contents.wants("optimizer") and LOCAL.find(path / "optimizer.bin") is not None:
        contents.add_optimizer("optimizer", files.torch_file(path / "optimizer.bin"))
    held = {node.name for node in LOCAL.list_directory(path)}
    if "rng" in held:
        ranks = [node.name for node in LOCAL.list_directory(path / "rng")]
        contents.world_size = max(len(ranks), 1)
    contents.left_out |= {
        name: why
        for name, why in (
            ("scheduler.bin", "the learning rate is a function of the step"),
            ("dataloader_state", "the position of another data order"),
            ("rng", _RNG),
        )
        if name in held
    }


def _read_folder(path: Path, contents: Contents, files: ForeignFiles) -> None:
    """A checkpoint of Transformers or Accelerate: one file per object, numbered from the second one on."""
    names = sorted(node.name for node in LOCAL.list_directory(path))
    for name in names:
        if found := _MODEL_FILE.fullmatch(name):
            reading = files.safetensors if found[3] == "safetensors" else files.torch_file
            contents.has_order &= found[3] != "safetensors"
            contents.add_weights(_numbered("model", found[2]), reading(path / name))
        elif name.endswith(".index.json"):
            contents.has_order = False
            contents.add_weights("model", _sharded_weights(path, name, files))
        elif found := _OPTIMIZER_FILE.fullmatch(name):
            item = _numbered("optimizer", found[1])
            if contents.wants(item):
                contents.add_optimizer(item, files.torch_file(path / name))
        elif found := _OBJECT_FILE.fullmatch(name):
            item = _numbered(_OBJECTS.get(found[1], found[1]), found[2])
            if contents.wants(item):
                contents.add_object(item, files.torch_file(path / name))
        elif name.startswith(("random_states_", "rng_state")):
            contents.left_out[name] = _RNG
        elif name == "training_args.bin":
            contents.left_out[name] = "the arguments of Transformers' own trainer"
    if TRAINER_STATE in names:
        state = files.json(path / TRAINER_STATE)
        contents.steps |= {step for step in [as_whole(state.get("global_step"))] if step is not None}
        contents.counters |= {key: state[key] for key in ("epoch", "best_metric") if state.get(key) is not None}


def _sharded_weights(path: Path, index: str, files: ForeignFiles) -> dict[str, Any]:
    shards = files.json(path / index).get("weight_map")
    if not isinstance(shards, dict):
        files.problems.append(f"{index}: it has no weight_map")
        return {}
    found: dict[str, Any] = {}
    for name in sorted({str(shard) for shard in shards.values()}):
        if "/" in name or LOCAL.find(path / name) is None:
            files.problems.append(f"{name}: is missing")
            continue
        reading = files.safetensors if name.endswith(".safetensors") else files.torch_file
        found |= reading(path / name) or {}
    files.problems += [f"{key}: in no file, though {index} names it" for key in shards if found and key not in found]
    return found


def _numbered(name: str, number: str | None) -> str:
    return name if number in (None, "0") else f"{name}_{number}"


_READERS: Final[Mapping[str, Callable[[Path, Contents, ForeignFiles], None]]] = {
    FILE: _read_file,
    SAFETENSORS: _read_safetensors,
    PER_RANK: _read_per_rank,
    DCP: _read_dcp,
    KEMPNERFORGE: _read_kempnerforge,
    GPT_SIMPLE: _read_gpt_simple,
    TRANSFORMERS: _read_folder,
    ACCELERATE: _read_folder,
}
