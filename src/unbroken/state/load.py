"""Weights, or any other item, of a checkpoint into live objects, without a run; ``unbroken.load`` is made of it.

Every byte that is used is verified, names must match exactly, and the live tensors must have the fingerprints that were
saved. Nothing is written, nothing is moved to quarantine, and no random generator is set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.errors import NotAnItem, StateDiffers
from unbroken.state.capture import RNG, is_sharded
from unbroken.state.cursor import Cursor
from unbroken.state.items import Item, ModuleItem, make_items
from unbroken.state.restore import CheckpointSource, restore
from unbroken.state.trainer_state import read_trainer_state
from unbroken.world import World


@dataclass(frozen=True)
class Loaded:
    """What ``load`` has read.

    Attributes:
        step: optimizer steps completed when it was saved; None if a checkpoint of another tool does not state it.
        path: the checkpoint's directory, or its file.
        counters: ``run.counters`` of that step.
        metrics: what was logged for that step.
        items: what the checkpoint holds, by name; each can be loaded. Of another tool's those that were asked for.
        notes: what could not be restored as saved, such as values that differed by rank.
        left_out: of a checkpoint of another tool, what cannot be loaded, each with the reason.
    """

    step: int | None
    path: Path
    counters: Mapping[str, object]
    metrics: Mapping[str, float] = field(default_factory=dict)
    items: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)


def require_loadable(items: Mapping[str, object]) -> list[Item]:
    """The objects to load into.

    Raises:
        NotAnItem: an object has no state that could be loaded without a run.
    """
    if "data" in items and not isinstance(items["data"], Cursor):
        lacks = "a meaning without a run: the position in the data is restored by Run(..., data=loader)"
        raise NotAnItem(name="data", type_name=type(items["data"]).__name__, lacks=lacks)
    return make_items(items)


def load_items(
    source: CheckpointSource, wanted: Sequence[Item], *, accept: Sequence[str] = (), allow_pickle: Sequence[str] = ()
) -> Loaded:
    """Load items of one checkpoint, verified; collective for a sharded model.

    Raises:
        StateDiffers: the checkpoint has no such item, or names, types or shapes differ; nothing was loaded.
        NotExact: an item's state differs by rank and cannot be taken as it is.
        DamagedCheckpoint: bytes are not what was written; says whether objects were touched.
        StorageFailed: I/O error.
    """
    store, name, manifest = source.store, source.name, source.manifest
    trainer = read_trainer_state(store, name, manifest)
    path = store.path(name)
    items = {item.name for item in wanted}
    unknown = [each.name for each in wanted if each.name not in trainer.kinds]
    if unknown:
        held = ", ".join(sorted(trainer.kinds))
        changed = tuple(f"{each}: not in the checkpoint, which has {held}" for each in unknown)
        raise StateDiffers(checkpoint=str(path), changed=changed)
    # RNG states are not set here.
    others = (RNG, *(each for each in trainer.kinds if each not in items))
    restored = restore(
        source,
        wanted,
        _world_of(wanted),
        accept=(*accept, *others),
        allow_pickle=tuple(allow_pickle),
        is_partial=True,
    )
    # Items that were not requested are not reported, nor are RNG states, which are not set here.
    silent = ("world ", *(f"accepted: {each}:" for each in others))
    notes = tuple(note for note in restored.notes if not note.startswith(silent))
    return Loaded(restored.step, path, restored.counters, dict(manifest.metrics), tuple(sorted(trainer.kinds)), notes)


def _world_of(items: Sequence[Item]) -> World:
    """All ranks where a model is in shards, which they load and verify together; else this process alone."""
    modules = [item.module for item in items if isinstance(item, ModuleItem)]
    is_shared = any(is_sharded(tensor) for module in modules for tensor in module.state_dict().values())
    return World.current() if is_shared else World(0, 1)
