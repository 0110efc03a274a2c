"""Finding a checkpoint of another tool by the names it uses; reads names and JSON, never a pickle, and writes nothing.

A reference may be a file, a checkpoint folder, or a folder that contains checkpoints. What is named explicitly is
taken; in a folder of checkpoints the newest step is taken, and anything that is not clearly the newest is an error.
There are two kinds: ``dcp``, a folder of torch's Distributed Checkpoint, and ``model``, gathered files. Where one step
has both, ``dcp`` is taken, unless the other is named or required.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from unbroken.disk import NodeKind
from unbroken.errors import (
    ForeignAmbiguous,
    ForeignKind,
    ForeignUnknown,
    PathMissing,
    StorageFailed,
)
from unbroken.errors.tree import quoted
from unbroken.files import LOCAL, Files
from unbroken.store.envelope import begins_one
from unbroken.store.fields import as_whole, parsed
from unbroken.store.names import CHECKPOINTS, FINAL, MANIFEST, OWN_PARTS, step_in_name

Kind = Literal["model", "dcp"]
KINDS: Final[tuple[Kind, ...]] = ("model", "dcp")
GPT_SIMPLE: Final = "gpt-simple"
KEMPNERFORGE: Final = "kempnerforge"
TRANSFORMERS: Final = "transformers"
ACCELERATE: Final = "accelerate"
# Files of one rank each beside a gathered model: model_000100.pt, optim_000100_rank0.pt, meta_000100.json.
PER_RANK: Final = "per-rank files"
DCP: Final = "torch-dcp"
# One file: weights, or a dictionary with weights in it. Lightning's .ckpt is such a file.
FILE: Final = "torch file"
SAFETENSORS: Final = "safetensors"

DCP_METADATA: Final = ".metadata"
TRAINER_STATE: Final = "trainer_state.json"
GPT_SIMPLE_WEIGHTS: Final = "model/pytorch_model.bin"
_JSON_LIMIT_BYTES: Final = 64 << 20
_MODEL_FILE: Final = re.compile(r"model_([0-9]{6,18})\.pt")
_DCP_FOLDER: Final = re.compile(r"(?:dcp|dist_ckpt)_([0-9]{6,18})")
_WEIGHTS: Final = re.compile(r"(?:model|pytorch_model)(?:-[0-9]+-of-[0-9]+)?\.(?:safetensors|bin)(?:\.index\.json)?")
# One of several files with the weights of one model; only their index says that none is missing.
SHARD: Final = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.safetensors|\.bin)")
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".tar")


@dataclass(frozen=True)
class Foreign:
    """One checkpoint of another tool: a file or a folder.

    ``step`` is None where neither a name nor JSON states it. ``is_named`` is False if it was chosen in a folder.
    """

    path: Path
    tool: str
    kind: Kind
    step: int | None = None
    is_named: bool = True


def resolve_foreign(
    path: Path, *, require_kind: Kind | None = None, step: int | None = None, files: Files = LOCAL
) -> Foreign:
    """The checkpoint at a path, or the newest one in a folder.

    Args:
        path: a file, a checkpoint folder, or a folder that contains checkpoints.
        require_kind: the only kind that may be taken.
        step: take this step of a folder that contains checkpoints.
        files: the file system.

    Raises:
        PathMissing: there is nothing at the path.
        ForeignUnknown: nothing there is recognised.
        ForeignAmbiguous: several checkpoints are there, and none is clearly the newest.
        ForeignKind: what is there is of another kind.
        StorageFailed: I/O error.
    """
    if (node := files.find(path)) is None:
        raise PathMissing(path=path, purpose="checkpoint to import")
    if node.kind is NodeKind.OTHER:
        raise ForeignUnknown(path=path, reason=f"{path.name} is neither a file nor a directory")
    named = _one(path, files)
    if named is not None:
        if require_kind not in (None, named.kind):
            raise ForeignKind(path=path, required=str(require_kind), found=(_described(named),))
        _require_alone(path, named, files)
        return named
    if not _is_directory(path, files):
        raise ForeignUnknown(path=path, reason=f"{path.name} has the name of no file that torch or safetensors writes")
    inner = path / CHECKPOINTS
    found = _inside(path, files) or (_inside(inner, files) if _is_directory(inner, files) else [])
    found = found or _single_files(path, files)
    if not found:
        raise ForeignUnknown(path=path)
    return _newest(path, found, require_kind, step)


def _require_alone(path: Path, named: Foreign, files: Files) -> None:
    """Raise where the weights of a finished training lie in the folder that also has its checkpoints."""
    if named.tool == TRANSFORMERS and named.step is None and (found := _inside(path, files)):
        candidates = tuple(each.path for each in found)
        raise ForeignAmbiguous(path=path, candidates=candidates, reason="weights of its own beside them")


def import_command(path: Path, files: Files = LOCAL) -> str | None:
    """The command that imports what is at a path; None if it is no checkpoint of a known tool."""
    try:
        resolve_foreign(path, files=files)
    except (ForeignUnknown, ForeignAmbiguous, ForeignKind, PathMissing, StorageFailed):
        return None
    return f"unbroken import {quoted(path)} runs/imported"


def import_from_store(root: Path, files: Files = LOCAL) -> str | None:
    """The command that imports what is in a store that has no checkpoint of ours; None if there is nothing to import.

    Other tools, too, keep theirs in a folder called ``checkpoints``.
    """
    if files is not LOCAL:
        return None
    return import_command(root.parent if root.name == CHECKPOINTS else root, files)


# ---- one checkpoint ----


def index_of(shard: str) -> str:
    """The name of the index of a file with a part of the weights."""
    return SHARD.sub(r"\1\4.index.json", shard)


def _one(path: Path, files: Files) -> Foreign | None:
    """The checkpoint that a path is or belongs to; None for a folder of checkpoints and for what is not recognised."""
    if _is_directory(path, files):
        return _folder(path, files)
    if path.name == DCP_METADATA or path.suffix == ".distcp":
        return _folder(path.parent, files)
    if found := _MODEL_FILE.fullmatch(path.name):
        return Foreign(path, PER_RANK, "model", int(found[1]))
    if found := SHARD.fullmatch(path.name):
        reason = f"it is file {int(found[2])} of {int(found[3])} of one model; import the directory with all of them"
        raise ForeignUnknown(path=path, reason=f"{reason} and {index_of(path.name)}", is_recognised=True)
    if path.suffix == ".safetensors":
        return Foreign(path, SAFETENSORS, "model", step_in_name(path.name))
    if path.suffix in _TORCH_SUFFIXES:
        return Foreign(path, FILE, "model", step_in_name(path.name))
    return None


def _folder(path: Path, files: Files) -> Foreign | None:
    names = {node.name for node in files.list_directory(path)}
    # "." and ".." have no step in their names; the folders they stand for may.
    called = path.absolute().name if path.name not in ("", "..") else path.resolve().name
    # A sealed folder of another tool has our manifest too, and none of our parts.
    if MANIFEST in names and begins_one(files, path / MANIFEST) and files.find(path / OWN_PARTS[0]) is not None:
        reason = "it is a checkpoint of unbroken already; use it as it is, or set training.load_path to it"
        raise ForeignUnknown(path=path, reason=reason, is_recognised=True)
    if any(name.endswith("_optim_states.pt") for name in names):
        reason = "it is of DeepSpeed ZeRO; run its zero_to_fp32.py, then import the file which that writes"
        raise ForeignUnknown(path=path, reason=reason, is_recognised=True)
    for tool, kind, is_one in _TOOLS:
        if is_one(names, path, files):
            step = _step_of_folder(path, called, names, files)
            # The number that Accelerate itself gives a folder counts saves.
            is_count = tool == ACCELERATE and called.startswith("checkpoint_")
            return Foreign(path, tool, kind, None if is_count else step)
    return None


def _is_gpt_simple(names: set[str], path: Path, files: Files) -> bool:
    return TRAINER_STATE in names and files.find(path / GPT_SIMPLE_WEIGHTS) is not None


def _is_kempnerforge(names: set[str], path: Path, files: Files) -> bool:
    if not {"train_state.pt", "metadata.json"} <= names:
        return False
    return DCP_METADATA in names or files.find(path / "pp0" / DCP_METADATA) is not None


def _is_dcp(names: set[str], path: Path, files: Files) -> bool:
    return DCP_METADATA in names


def _is_accelerate(names: set[str], path: Path, files: Files) -> bool:
    return "random_states_0.pkl" in names and _has_weights(names)


def _is_transformers(names: set[str], path: Path, files: Files) -> bool:
    is_indexed = any(index_of(name) in names for name in names if SHARD.fullmatch(name))
    return _has_weights(names) and (is_indexed or bool(names & {TRAINER_STATE, "config.json"}))


def _has_weights(names: Iterable[str]) -> bool:
    return any(_WEIGHTS.fullmatch(name) for name in names)


_TOOLS: Final[tuple[tuple[str, Kind, Callable[[set[str], Path, Files], bool]], ...]] = (
    (GPT_SIMPLE, "model", _is_gpt_simple),
    (KEMPNERFORGE, "dcp", _is_kempnerforge),
    (DCP, "dcp", _is_dcp),
    (ACCELERATE, "model", _is_accelerate),
    (TRANSFORMERS, "model", _is_transformers),
)


def _step_of_folder(path: Path, called: str, names: set[str], files: Files) -> int | None:
    for name in (TRAINER_STATE, "metadata.json", "meta.json"):
        if name in names:
            stated = read_json(path / name, files)
            for key in ("global_step", "step"):
                if (step := as_whole(stated.get(key))) is not None:
                    return step
    if found := _DCP_FOLDER.fullmatch(called):
        return int(found[1])
    return step_in_name(called)


def read_json(path: Path, files: Files = LOCAL) -> dict[str, Any]:
    """A JSON object of another tool; empty if it cannot be read as one."""
    try:
        found = parsed(files.read_bytes(path, limit_bytes=_JSON_LIMIT_BYTES))
    except (ValueError, StorageFailed):
        return {}
    return found if isinstance(found, dict) else {}


# ---- a folder of checkpoints ----


def _inside(path: Path, files: Files) -> list[Foreign]:
    """The checkpoints directly in a folder; links are not followed, so that ``latest`` does not count twice."""
    found = []
    nodes = {node.name: node.kind for node in files.list_directory(path)}
    for name, node in sorted(nodes.items()):
        if node is NodeKind.DIRECTORY and not name.startswith("."):
            one = _folder(path / name, files)
            if one is not None and not _is_unfinished(name, path, nodes, files):
                found.append(one)
        elif node is NodeKind.FILE and (_MODEL_FILE.fullmatch(name) or name.endswith(".ckpt")):
            one = _one(path / name, files)
            found += [one] if one is not None else []
    return [replace(each, is_named=False) for each in found]


def _single_files(path: Path, files: Files) -> list[Foreign]:
    """Files of torch in a folder that has nothing else: looked for last, since any tool writes such files too."""
    names = [node.name for node in files.list_directory(path) if node.kind is NodeKind.FILE]
    found = [_one(path / name, files) for name in sorted(names) if name.endswith((*_TORCH_SUFFIXES, ".safetensors"))]
    return [replace(each, is_named=False) for each in found if each is not None]


def _is_unfinished(name: str, parent: Path, nodes: Iterable[str], files: Files) -> bool:
    """Whether a folder of the dual layout has no meta yet, which its writer writes last; others write none."""
    found = _DCP_FOLDER.fullmatch(name)
    if found is None:
        return name.endswith(".partial")
    return f"meta_{found[1]}.json" not in nodes and files.find(parent / name / "meta.json") is None


def _newest(parent: Path, found: Sequence[Foreign], require_kind: Kind | None, step: int | None) -> Foreign:
    paths = tuple(each.path for each in found)
    if len({each.tool for each in found} - {DCP, PER_RANK}) + bool({each.tool for each in found} & {DCP, PER_RANK}) > 1:
        raise ForeignAmbiguous(path=parent, candidates=paths, reason="they are of different tools")
    if len(found) > 1 and any(each.step is None for each in found):
        raise ForeignAmbiguous(path=parent, candidates=paths, reason="not all of them state their step")
    wanted = step if step is not None else max((each.step or 0 for each in found), default=0)
    newest = [each for each in found if each.step in (None, wanted)]
    if not newest:
        steps = ", ".join(str(each.step) for each in sorted(found, key=lambda each: each.step or 0))
        raise ForeignUnknown(path=parent, reason=f"it has no step {step}; it has {steps}")
    fitting = [each for each in newest if require_kind in (None, each.kind)]
    if not fitting:
        raise ForeignKind(path=parent, required=str(require_kind), found=tuple(map(_described, found)))
    # Both kinds at one step: the folder of DCP is looked for first.
    fitting = [each for each in fitting if each.kind == "dcp"] or fitting
    best = max(fitting, key=_finality)
    same = [each.path for each in fitting if _finality(each) == _finality(best)]
    if len(same) > 1:
        raise ForeignAmbiguous(path=parent, candidates=tuple(same), reason=f"all are of step {wanted}")
    return best


def _finality(each: Foreign) -> int:
    """GPT-Simple may save one step three times; the last one written has the longest history."""
    return 2 if each.path.name == FINAL else 1 if each.path.name.endswith("-shutdown") else 0


def _described(each: Foreign) -> tuple[str, str, str]:
    return str(each.path), "unknown" if each.step is None else str(each.step), each.kind


def _is_directory(path: Path, files: Files) -> bool:
    found = files.find(path)
    return found is not None and (found.kind is NodeKind.DIRECTORY or (found.kind is NodeKind.LINK and path.is_dir()))
