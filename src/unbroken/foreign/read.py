"""Reading one checkpoint of another tool into items by name: one function per tool.

Everything is read into host memory. Whatever cannot be read is noted, and raised in one error after the last file.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.files import LOCAL
from unbroken.foreign.dcp import read_dcp
from unbroken.foreign.items import MODULE, Contents, ForeignItem, is_same, missing_ranks
from unbroken.foreign.pickles import ForeignFiles
from unbroken.quoting.amounts import plural
from unbroken.state.items import RESERVED
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
    SHARD,
    TRAINER_STATE,
    TRANSFORMERS,
    Foreign,
    index_of,
)

_LIGHTNING: Final = "pytorch-lightning_version"
_LIGHTNINGS_OWN: Final = (
    *("callbacks", "loops", "hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)
_MODEL_FILE: Final = re.compile(r"(?:model|pytorch_model)(?:_([0-9]+))?((?:\.safetensors|\.bin)(?:\.index\.json)?)")
_OPTIMIZER_FILE: Final = re.compile(r"optimizer(?:_([0-9]+))?\.(?:bin|pt)")
_OBJECT_FILE: Final = re.compile(
    r"(scheduler|scaler|sampler|dl_state_dict|custom_checkpoint)(?:_([0-9]+))?\.(bin|pt|pkl)"
)
_OBJECTS: Final = {"dl_state_dict": "dataloader", "custom_checkpoint": "custom"}
# In the order in which Transformers and Accelerate look for the weights of one model.
_WEIGHTS_ORDER: Final = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
_TENSOR_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth")
_RNG: Final = "random numbers of another tool's loop"


@dataclass(frozen=True)
class Selection:
    """What the user asked for: which items, with which names.

    Attributes:
        items: the items to import, empty for all; ``NAME=KEY`` takes an item from this key or file.
        prefix: of a model, take the tensors with this prefix and remove it.
        ties: names that a file leaves out because another name has the same tensor.
        allowed: classes whose pickled objects are read as plain data.
    """

    items: Sequence[str] = ()
    prefix: str = ""
    ties: Sequence[tuple[str, str]] = ()
    allowed: Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The items to import."""
        return tuple(each.partition("=")[0] for each in self.items)

    @property
    def chosen(self) -> dict[str, str]:
        """By item, the key or file to take it from."""
        pairs = (each.partition("=") for each in self.items if "=" in each)
        return {name: source for name, _, source in pairs}


_EVERYTHING: Final = Selection()
NO_STEP: Final = "neither its files nor its name state the step"


def read_foreign(source: Foreign, selection: Selection = _EVERYTHING) -> tuple[Contents, list[str]]:
    """The contents of a checkpoint, and what does not fit the selection.

    Raises:
        ForeignDamaged: files are missing, damaged, or changed while they were read.
        NeedsClass: pickles need classes that were not allowed.
        PackageMissing: safetensors is not installed.
    """
    files = ForeignFiles(source.path, selection.allowed)
    contents = Contents(selection.names, selection.chosen)
    _READERS[source.tool](source.path, contents, files)
    files.settle()
    return contents, _select(contents, selection)


def stated_steps(source: Foreign, contents: Contents) -> set[int]:
    """The steps that its files state, or else its name."""
    return set(contents.steps) or ({source.step} if source.step is not None else set())


def _select(contents: Contents, selection: Selection) -> list[str]:
    problems = list(dict.fromkeys(contents.problems))
    if selection.items:
        unfit = [name for name in selection.names if name in RESERVED or not name.isidentifier()]
        problems += [f"--item {name}: no item of a run can have this name" for name in unfit]
        absent = [name for name in selection.names if name not in contents.items and name not in unfit]
        held = ", ".join(sorted(contents.items)) or "nothing"
        for name in absent:
            source = selection.chosen.get(name)
            called = name if source is None else f"{name}={source}"
            problems.append(f"{called}: not in the checkpoint, which has {held}")
        contents.items = {name: held for name, held in contents.items.items() if name in selection.names}
    models = [name for name, item in contents.items.items() if item.kind == MODULE]
    for name in models:
        state = contents.items[name].state
        if selection.prefix:
            contents.left_out |= _outside(selection.prefix, name, state)
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
        problems += [f"not imported: {name} ({why})" for name, why in sorted(contents.left_out.items())]
    return problems


def _outside(prefix: str, item: str, state: Mapping[str, Any]) -> dict[str, str]:
    """The tensors without the prefix, by the first part of their names, each with why they are left out."""
    parts = Counter(
        f"{first}.*" if dot else first
        for first, dot, _ in (name.partition(".") for name in state if not name.startswith(prefix))
    )
    return {
        f"{item}: {part}": f"{plural(number, 'tensor')} outside the prefix {prefix!r}" for part, number in parts.items()
    }


# ---- one file ----


def _read_file(path: Path, contents: Contents, files: ForeignFiles) -> None:
    found = files.torch_file(path)
    if isinstance(found, Mapping):
        if _LIGHTNING in found:
            _add_lightning(found, contents)
        else:
            contents.add_dictionary(found)
    elif found is not None:
        contents.problems.append(f"{path.name}: no weights by name in it; it holds a {type(found).__name__}")


def _add_lightning(found: Mapping[str, Any], contents: Contents) -> None:
    contents.add_weights("model", found.get("state_dict"), "state_dict")
    for key, name, add in (
        ("optimizer_states", "optimizer", contents.add_optimizer),
        ("lr_schedulers", "scheduler", contents.add_object),
    ):
        held = found.get(key) or []
        for number, state in enumerate(held):
            add(name if len(held) == 1 else f"{name}_{number}", state, f"{key}.{number}")
    contents.left_out |= {key: "state of Lightning's own loop" for key in _LIGHTNINGS_OWN if found.get(key)}
    # What a callback or the module itself has added.
    known = {"state_dict", "optimizer_states", "lr_schedulers", _LIGHTNING, *_LIGHTNINGS_OWN}
    contents.add_entries({key: value for key, value in found.items() if key not in known})


def _read_safetensors(path: Path, contents: Contents, files: ForeignFiles) -> None:
    contents.has_order = False
    contents.add_weights("model", files.safetensors(path), path.name)


def _read_per_rank(path: Path, contents: Contents, files: ForeignFiles) -> None:
    """``model_000100.pt`` and what lies beside it."""
    digits = path.stem.removeprefix("model_")
    contents.steps.add(int(digits))
    if (
        not contents.add_weights("model", files.torch_file(path), path.name)
        and not files.problems
        and not files.classes
    ):
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
    if not ranks and world is None:
        contents.left_out["optimizer"] = f"no file optim_{digits}_rank0.pt is beside {path.name}"
    else:
        for rank in missing_ranks(ranks, world):
            files.problems.append(f"optim_{digits}_rank{rank}.pt: is missing")
    states = [files.torch_file(path.parent / ranks[rank]) for rank in sorted(ranks)]
    _add_ranks(states, digits, contents, files)


def _add_ranks(states: Sequence[Any], digits: str, contents: Contents, files: ForeignFiles) -> None:
    """One optimizer of the files of all ranks, where all hold the same; shards of one cannot be put together."""
    contents.world_size = max(len(states), 1)
    if not states or files.problems or files.classes:
        return
    if not all(is_same(states[0], other) for other in states[1:]):
        contents.left_out["optimizer"] = (
            f"the {len(states)} files optim_{digits}_rank*.pt differ: each has a shard that only its own number of "
            "ranks can use"
        )
    elif not contents.add_optimizer("optimizer", states[0], f"optim_{digits}_rank0.pt"):
        files.problems.append(f"optim_{digits}_rank0.pt: it does not hold the state of an optimizer")


def _add_meta(stated: Mapping[str, Any], contents: Contents) -> None:
    if (step := as_whole(stated.get("step"))) is not None:
        contents.steps.add(step)
    for key, value in stated.items():
        if key not in ("step", "world_size"):
            contents.add_counter(key, value)


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
        _merge(found, read_dcp(stage, files), stage.name, contents)
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


def _merge(into: dict[str, Any], stage: Mapping[str, Any], called: str, contents: Contents) -> None:
    """Add one pipeline stage: its parameters are its own, its optimizer has the same groups as the others."""
    for key, value in stage.items():
        held = into.setdefault(key, value)
        if held is value or not isinstance(held, dict):
            continue
        mine, more = (held["state"], value["state"]) if key == "optimizer" else (held, value)
        twice = [name for name in more if name in mine and not is_same(mine[name], more[name])]
        contents.problems += [f"{key}: {name} of {called} differs from that of an earlier stage" for name in twice]
        mine.update(more)
        if key == "optimizer":
            for group, others in zip(held["param_groups"], value["param_groups"], strict=True):
                group["params"] = list(dict.fromkeys([*group["params"], *others["params"]]))


def _read_gpt_simple(path: Path, contents: Contents, files: ForeignFiles) -> None:
    state = files.json(path / TRAINER_STATE)
    if (step := as_whole(state.get("step"))) is not None:
        contents.steps.add(step)
    contents.counters.update({key: state[key] for key in ("tokens_trained",) if key in state})
    contents.add_weights("model", files.torch_file(path / GPT_SIMPLE_WEIGHTS), GPT_SIMPLE_WEIGHTS)
    if contents.wants("optimizer") and LOCAL.find(path / "optimizer.bin") is not None:
        contents.add_optimizer("optimizer", files.torch_file(path / "optimizer.bin"), "optimizer.bin")
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
    _add_models(path, names, contents, files)
    for name in names:
        if found := _OPTIMIZER_FILE.fullmatch(name):
            item = _numbered("optimizer", found[1])
            if contents.wants(item, name):
                contents.add_optimizer(item, files.torch_file(path / name), name)
        elif found := _OBJECT_FILE.fullmatch(name):
            item = _numbered(_OBJECTS.get(found[1], found[1]), found[2])
            if contents.wants(item, name):
                contents.add_object(item, files.torch_file(path / name), name)
        elif name.startswith(("random_states_", "rng_state")):
            contents.left_out[name] = _RNG
        elif name == "training_args.bin":
            contents.left_out[name] = "the arguments of Transformers' own trainer"
        elif not files.has_read(path / name) and (why := _why_unread(name, contents)) is not None:
            contents.left_out[name] = why
    if TRAINER_STATE in names:
        state = files.json(path / TRAINER_STATE)
        contents.steps |= {step for step in [as_whole(state.get("global_step"))] if step is not None}
        for key in ("epoch", "best_metric"):
            if state.get(key) is not None:
                contents.add_counter(key, state[key])


def _add_models(path: Path, names: Sequence[str], contents: Contents, files: ForeignFiles) -> None:
    """The weights of each model; of several files for one the first in the order of Transformers, or the chosen one."""
    forms: dict[str, dict[str, str]] = {}
    for name in names:
        if found := _MODEL_FILE.fullmatch(name):
            forms.setdefault(_numbered("model", found[1]), {})[found[2]] = name
    for item, files_of_it in forms.items():
        held = [files_of_it[form] for form in _WEIGHTS_ORDER if form in files_of_it]
        chosen = [name for name in held if name in contents.chosen.values()]
        taken = chosen or held[:1]
        contents.left_out |= {name: f"{taken[0]} has the weights" for name in held if name not in taken}
        for name in taken:
            contents.has_order &= name.endswith(".bin")
            contents.add_weights(item, _weights_file(path, name, files), name)
    if not forms:
        first = next(name for name in names if SHARD.fullmatch(name))
        files.problems.append(f"{index_of(first)}: is missing; {first} is one part of the weights alone")


def _why_unread(name: str, contents: Contents) -> str | None:
    """Why a file with tensors was not read; None for other files, and for shards of an index that is left out too."""
    if not name.endswith(_TENSOR_SUFFIXES) or _MODEL_FILE.fullmatch(name):
        return None
    if name.startswith("adapter_"):
        return "an adapter of PEFT, which is not merged into the weights"
    if not SHARD.fullmatch(name):
        return "not a file that Transformers or Accelerate names"
    return None if index_of(name) in contents.left_out else "a shard that is in no index"


def _weights_file(path: Path, name: str, files: ForeignFiles) -> Any:  # noqa: ANN401 -- what the file holds
    if name.endswith(".index.json"):
        return _sharded_weights(path, name, files)
    return files.safetensors(path / name) if name.endswith(".safetensors") else files.torch_file(path / name)


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
        held = _weights_file(path, name, files) or {}
        found |= {key: value for key, value in held.items() if shards.get(key, name) == name}
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
