"""A checkpoint of another tool as one of ours, for the time of one load: in a store that is removed afterwards.

So it is restored by the same code as every other checkpoint, with the same checks, into the same kinds of objects. Its
names are mapped as the live objects ask for, and it is given the second names of their tied tensors.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from unbroken.errors import (
    CannotImport,
    CheckpointUnknown,
    ForeignUnknown,
    Help,
    NotAStore,
    NotRestored,
    NoUsableCheckpoint,
    PathMissing,
    RankFailed,
    StateDiffers,
    UnbrokenError,
)
from unbroken.errors.foreign import ImportCall
from unbroken.foreign.items import MODULE, Contents, ForeignItem, is_same
from unbroken.foreign.read import NO_STEP, Selection, read_foreign, stated_steps
from unbroken.foreign.write import commit_contents
from unbroken.mirror.address import is_url
from unbroken.state.items import Item, ModuleItem, State
from unbroken.state.naming import clean, is_flat_sharded
from unbroken.store.directory import Store
from unbroken.store.foreign import Foreign, resolve_foreign
from unbroken.store.manifest import Manifest
from unbroken.store.names import OWN_PARTS

_TRAINS: Final = "state the step; then load from that run"
_UNTIE: Final = "untie them in the model, or choose another checkpoint"
_OTHER_DTYPE: Final = re.compile(r"(?P<item>[^.:]+)\.[^:]+: torch\.(?P<dtype>\w+) in the checkpoint, torch\.\w+ here")
_CASTS: Final = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}
_OPTIONS: Final = "make a run of it, with --item, --prefix or --tie"


@runtime_checkable
class MapsForeign(Protocol):
    """A model that knows other tools' names for its parts, as the model of ``unbroken train`` does."""

    def map_foreign(self, source: Foreign, contents: Contents) -> list[str]:
        """Give what was read the names of this model; returns every problem, and then nothing was changed."""


@dataclass(frozen=True)
class Staged:
    """Where it is staged, and what it is: ``step`` is None if nothing states it, ``left_out`` was not imported."""

    store: Store
    name: str
    manifest: Manifest
    source: Foreign
    step: int | None
    left_out: dict[str, str] = field(default_factory=dict)

    def told(self, refused: UnbrokenError) -> UnbrokenError:
        """An error of the restore, with the path of the other tool in place of the one that is removed."""
        if isinstance(refused, RankFailed):
            return RankFailed(rank=refused.rank, cause=self.told(refused.cause))
        if isinstance(refused, NotRestored):
            return replace(refused, checkpoint=str(self.source.path))
        if not isinstance(refused, StateDiffers):
            return refused
        remedy = _without_import(refused)
        importing = ImportCall().again(self.source.path) if remedy is None else None
        return replace(refused, checkpoint=str(self.source.path), importing=importing, remedy=remedy)


# Raised for a reference that names no checkpoint of ours.
NOT_OURS: Final = (NotAStore, NoUsableCheckpoint, CheckpointUnknown)


def foreign_at(reference: str | os.PathLike[str], refused: UnbrokenError) -> Foreign:
    """The checkpoint of another tool that a reference names which names none of ours; ``out@500`` names a step.

    Raises:
        UnbrokenError: ``refused``, if it is of no known tool either, or a checkpoint of ours is meant.
        ForeignAmbiguous: several checkpoints are there, and none is clearly the newest.
        ForeignUnknown: it is known what it is, and that it cannot be read.
        StorageFailed: I/O error.
    """
    if getattr(refused, "skipped", ()) or getattr(refused, "known", ()) or is_url(os.fspath(reference)):
        raise refused
    path, step = Path(reference), None
    place, at, wanted = os.fspath(reference).rpartition("@")
    if at and place and not path.exists():
        path, step = (Path(place), int(wanted)) if wanted.isdecimal() else (Path(place) / wanted, None)
    try:
        return resolve_foreign(path, step=step)
    except PathMissing:
        raise refused from None
    except ForeignUnknown as unknown:
        raise (unknown if unknown.is_recognised or step is not None else refused) from None


def is_sealed_foreign(manifest: Manifest) -> bool:
    """Whether a checkpoint has a manifest of ours and the files of another tool."""
    return not any(part.name in OWN_PARTS for part in manifest.parts)


def stage(
    source: Foreign, store: Store, items: Sequence[Item], *, only: Collection[str] = (), needs_step: bool = False
) -> Staged:
    """Read a checkpoint and commit it into an empty store, as the items need it.

    Args:
        source: the checkpoint of the other tool.
        store: where it is staged.
        items: the live items, whose names and ties it is given.
        only: the items to read; files of others need not be there. Empty for all.
        needs_step: whether its step has to be known.

    Raises:
        StateDiffers: it has no such item, or other values for the names of a tied tensor.
        CannotImport: it does not fit the model, or its step is needed and nothing states it.
        ForeignDamaged: files are missing, damaged, or changed while they were read.
        NeedsClass: pickles need classes that are not read by default.
        PackageMissing: safetensors is not installed.
        NoRoom: there is not enough room for a copy of it.
        StorageFailed: I/O error.
    """
    contents, problems = read_foreign(source, Selection(items=tuple(only)))
    absent = [f"{name}: {contents.left_out[name]}" for name in only if name in contents.left_out]
    if any(name not in contents.items for name in only) and contents.items:
        raise StateDiffers(
            checkpoint=str(source.path), changed=(*problems, *absent), importing=ImportCall().again(source.path)
        )
    steps = stated_steps(source, contents)
    step = next(iter(steps)) if len(steps) == 1 else None
    remedy = None
    if needs_step and step is None:
        problems.append(NO_STEP if not steps else f"its files state different steps: {sorted(steps)}")
        remedy = Help(ImportCall().again(source.path, "--step", "1000"), _TRAINS)
    models = [item for item in items if isinstance(item, ModuleItem) and item.name in contents.items]
    for item in models:
        if item.name == "model" and isinstance(item.module, MapsForeign) and not problems:
            problems += item.module.map_foreign(source, contents)
    if problems:
        raise CannotImport(path=source.path, problems=tuple(problems), remedy=remedy or _remedy(source))
    if untied := [each for item in models for each in _untied(item, contents.items[item.name].state)]:
        raise StateDiffers(checkpoint=str(source.path), changed=tuple(untied), remedy=_UNTIE)
    for item in models:
        contents.items[item.name] = ForeignItem(MODULE, _with_ties(item, contents.items[item.name].state))
    name = commit_contents(store, source, contents, step=step or 0)
    return Staged(store, name, store.read_manifest(name), source, step, dict(contents.left_out))


def _remedy(source: Foreign) -> Help:
    return Help(ImportCall().again(source.path), _OPTIONS)


def _tied(item: ModuleItem) -> list[list[str]]:
    """The names of each parameter of a model; more than one where it is tied."""
    tied: dict[int, list[str]] = {}
    for raw, parameter in item.module.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(clean(item.module, raw))
    return list(tied.values())


def _untied(item: ModuleItem, state: State) -> list[str]:
    """The names of tied tensors for which a model's state has different values: no one tensor can hold both."""
    if is_flat_sharded(item.module):
        return []
    complaints = []
    for names in _tied(item):
        held = [name for name in names if name in state]
        complaints += [
            f"{item.name}.{held[0]} and {item.name}.{other}: different values in the checkpoint, one tied tensor here"
            for other in held[1:]
            if not is_same(state[held[0]], state[other])
        ]
    return complaints


def _without_import(refused: StateDiffers) -> str | None:
    """What makes objects fit that an import would not; None where names differ, which an import can map."""
    if refused.missing and refused.unexpected:
        return None
    kinds = [_OTHER_DTYPE.fullmatch(each) for each in refused.changed]
    casts = {f"{each['item']}.{_CASTS[each['dtype']]}()" for each in kinds if each and each["dtype"] in _CASTS}
    if len(casts) == 1 and all(kinds) and not refused.missing and not refused.unexpected:
        return f"for the types of the checkpoint, call {casts.pop()} before loading"
    return "to keep what the objects have, pass the names below in accept="


def _with_ties(item: ModuleItem, state: State) -> State:
    """A model's state with every name of a tied tensor of which the file has one; safetensors keeps one alone."""
    if is_flat_sharded(item.module):
        return state
    found = dict(state)
    for names in _tied(item):
        held = [name for name in names if name in state]
        found |= {name: state[held[0]] for name in names if held and name not in state}
    return found
