"""From a checkpoint back to live objects: all of it, exactly, or an error that names what is not.

Nothing is touched before names, types and shapes fit. Then every destination is filled with a pattern no training
produces, read with its checksums verified and loaded into its object. The live tensors' fingerprints must equal
the saved ones: a tensor that was never written, or that a load zeroed, is found.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch

from unbroken.errors import (
    DamagedCheckpoint,
    ManifestDamaged,
    NotExact,
    NotRestored,
    RankFailed,
    StateDiffers,
    StorageFailed,
    UnbrokenError,
)
from unbroken.state import payload
from unbroken.state.capture import NO_RNG, RNG, is_sharded, own_prefix
from unbroken.state.cursor import Cursor
from unbroken.state.destinations import Looked, find_destinations
from unbroken.state.encode import Json, decode
from unbroken.state.fingerprint import fingerprints
from unbroken.state.flatten import flatten, unflatten
from unbroken.state.fresh import FreshTensors
from unbroken.state.index import Index
from unbroken.state.items import Item, ModuleItem, ObjectItem, State, is_optional
from unbroken.state.naming import changes_buckets
from unbroken.state.numbered import name_parameters
from unbroken.state.pieces import local_tensors
from unbroken.state.read import read, verify_unread
from unbroken.state.rng import OwnRng
from unbroken.state.ties import require_kept_ties, with_ties
from unbroken.state.trainer_state import TrainerState, decode_counters, read_rank_values, read_trainer_state
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Manifest
from unbroken.world import World

_SENTINEL = 0xA5


@dataclass(frozen=True)
class Restored:
    """What a resume brought back, and what it could not bring back exactly; ``world`` is how many ranks saved it.

    ``accepted`` are the items and tensors that differed and were let pass because the user accepted them;
    ``hyperparameters`` are the values the script constructed its objects with when the run began.
    """

    step: int
    counters: Mapping[str, object]
    rng_state: State
    notes: tuple[str, ...]
    world: int = 1
    accepted: tuple[str, ...] = ()
    hyperparameters: Mapping[str, str] | None = None


@dataclass(frozen=True)
class CheckpointSource:
    """One checkpoint to restore from."""

    store: Store
    name: str
    manifest: Manifest


def restore(
    source: CheckpointSource,
    items: Sequence[Item],
    world: World,
    *,
    accept: Collection[str] = (),
    allow_pickle: Collection[str] = (),
    is_partial: bool = False,
) -> Restored:
    """Load a checkpoint into the items; the RNG states are returned, to be set when nothing draws from them any more.

    ``is_partial`` reads and verifies what the items need and nothing else. Collective. Which rank saved what does not
    matter for modules and optimizers: they are resharded.

    Raises:
        StateDiffers: names, types or shapes do not fit; nothing was loaded.
        NotExact: an item is missing on one side, or cannot be split over this world, and it was not accepted.
        DamagedCheckpoint: bytes are not what was written, or contradict their fingerprint; says whether the objects
            are still as they were.
        StorageFailed: I/O error; says the same.
        NotRestored: the live state is not what was saved; the objects are no longer as they were.
    """
    # Every phase ends on all ranks or on none: a rank that leaves alone would leave the others waiting for ever.
    # The older FSDP communicates with the other ranks in state_dict(), so whatever one rank alone may fail at,
    # reading, comes before.
    record = world.all_or_none(lambda: _read_record(source, items, world, accept, allow_pickle))
    plan = world.all_or_none(lambda: _plan(source, record, world, accept))
    if not is_partial:
        verify_unread(source.store, source.name, source.manifest, plan.index, plan.places, world)
    for tensor in plan.places.values():
        _fill(tensor)
    try:
        payload.read(source.store, source.name, source.manifest, plan.index, plan.places, world)
        world.all_or_none(lambda: _give(plan, accept, allow_pickle))
        _verify_live(source, plan, world)
    except Exception as refused:
        raise _half_loaded(refused) from refused
    rng_state = unflatten(plan.structures[RNG], plan.places, item=RNG, allow_pickle=False)
    trainer = plan.trainer
    counters = decode_counters(trainer.counters)
    accepted = (*record.accepted, *plan.fresh.tensors())
    return Restored(
        trainer.step,
        counters,
        cast("State", rng_state),
        plan.notes,
        trainer.world_size,
        accepted,
        trainer.hyperparameters,
    )


def _half_loaded(refused: Exception) -> Exception:
    """The same error, with a note that the objects passed to the run are changed."""
    if isinstance(refused, RankFailed):
        return RankFailed(rank=refused.rank, cause=cast("UnbrokenError", _half_loaded(refused.cause)))
    if isinstance(refused, StorageFailed | DamagedCheckpoint):
        return replace(refused, is_half_loaded=True)
    if not isinstance(refused, NotRestored):
        refused.add_note("the objects passed to the run are partly loaded; do not train with them")
    return refused


@dataclass(frozen=True)
class _Plan:
    trainer: TrainerState
    items: tuple[Item, ...]
    structures: Mapping[str, Json]
    names: Mapping[str, tuple[str, ...]]
    index: Index
    places: Mapping[str, torch.Tensor]
    # Tensors that are stored under another name, of which this rank has a value of its own or which are numbered: the
    # name in the object to the name in the checkpoint.
    own_names: Mapping[str, str]
    notes: tuple[str, ...]
    fresh: FreshTensors

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors by the names that the structures use; empty ones for those that start fresh."""
        nothing = {name: torch.empty(0) for name in self.fresh.names}
        values = {**nothing, **self.places, **{name: self.places[own] for name, own in self.own_names.items()}}
        return with_ties(values, self.items, self.names, self.own_names, self.index)


@dataclass(frozen=True)
class _Record:
    trainer: TrainerState
    items: tuple[Item, ...]
    structures: Mapping[str, Json]
    looked: Mapping[str, Looked]
    index: Index
    # With the names of the live parameters for those that an imported optimizer numbers, and their stored names.
    named_index: Index
    stored_names: Mapping[str, str]
    notes: tuple[str, ...]
    accepted: tuple[str, ...]


def _read_record(
    source: CheckpointSource,
    items: Sequence[Item],
    world: World,
    accept: Collection[str],
    allow_pickle: Collection[str],
) -> _Record:
    trainer = read_trainer_state(source.store, source.name, source.manifest)
    structures, differences, notes = _structures(source, trainer, items, world, accept)
    notes += [f"accepted: {name}: {what}" for name, what in differences]
    wanted = tuple(item for item in items if item.name in structures)
    index = payload.read_index(source.store, source.name, source.manifest)
    where = str(source.store.path(source.name))
    named = name_parameters(where, wanted, trainer.kinds, structures, index)
    trainer, structures = replace(trainer, kinds=named.kinds), dict(named.structures)
    try:
        looked = {name: _look(name, structure, name in allow_pickle) for name, structure in structures.items()}
    except Malformed as wrong:
        raise ManifestDamaged(path=source.store.path(source.name), complaint=str(wrong)) from wrong
    _require_kinds(source, trainer, wanted, looked)
    moved = _moved_positions(wanted, looked, accept)
    notes += [f"accepted: {name}: {what}" for name, what in moved]
    differences += moved
    unscaled = {item.name for item in wanted if _is_live_scaler(item) and not looked[item.name][1]["state"]}
    notes += [f"{name}: was switched off in the checkpoint, starts fresh" for name in sorted(unscaled)]
    wanted = tuple(item for item in wanted if item.name not in unscaled)
    notes += _bucket_notes(wanted, world)
    accepted = tuple(name for name, _ in differences)
    return _Record(trainer, wanted, structures, looked, index, named.index, named.stored, tuple(notes), accepted)


def _bucket_notes(items: Sequence[Item], world: World) -> list[str]:
    if world.size < 3:
        return []
    return [
        f"{item.name}: DDP sums the first step of a job in other buckets than later ones, so that the last bits of "
        f"{world.size} ranks may differ; find_unused_parameters=True keeps the buckets as they are"
        for item in items
        if isinstance(item, ModuleItem) and changes_buckets(item.module)
    ]


def _require_kinds(
    source: CheckpointSource,
    trainer: TrainerState,
    items: Sequence[Item],
    looked: Mapping[str, Looked],
) -> None:
    changed = [
        f"{item.name}: {trainer.kinds[item.name]} in the checkpoint, {item.kind} here"
        for item in items
        if trainer.kinds.get(item.name) != item.kind
    ]
    changed += [
        f"{item.name}: {complaint}"
        for item in items
        if isinstance(item, ObjectItem) and isinstance(item.stateful, Cursor | OwnRng)
        if (complaint := item.stateful.complaint(looked[item.name][1].get("state")))
    ]
    if changed:
        raise StateDiffers(checkpoint=str(source.store.path(source.name)), changed=tuple(changed))


def _moved_positions(
    items: Sequence[Item], looked: Mapping[str, Looked], accept: Collection[str]
) -> list[tuple[str, str]]:
    """Loaders whose position in the checkpoint is not the same place here, all of them accepted.

    Raises:
        NotExact: one of them was not accepted.
    """
    moved = [
        (item.name, change)
        for item in items
        if isinstance(item, ObjectItem) and isinstance(item.stateful, Cursor)
        for change in item.stateful.changes(looked[item.name][1].get("state"))
    ]
    if refused := tuple(each for each in moved if each[0] not in accept):
        raise NotExact(differences=refused)
    return moved


def _plan(source: CheckpointSource, record: _Record, world: World, accept: Collection[str]) -> _Plan:
    index = record.index
    names = {name: found for name, (found, _) in record.looked.items()}
    fresh = FreshTensors(accept)
    where = str(source.store.path(source.name))
    places = find_destinations(where, record.items, record.looked, record.named_index, fresh)
    own_names, notes = _own_names(record, places, world)
    own_names |= {name: stored for name, stored in record.stored_names.items() if name in places}
    for name, own in own_names.items():
        places[own] = places.pop(name)
    places |= {
        # Their states are on the CPU, whatever torch.set_default_device says.
        name: torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype, device="cpu")
        for name in names[RNG]
    }
    notes = (*record.notes, *notes, *fresh.notes())
    return _Plan(record.trainer, record.items, record.structures, names, index, places, own_names, notes, fresh)


def _own_names(
    record: _Record, places: Mapping[str, torch.Tensor], world: World
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Of which tensors this rank has a value of its own, by the names in its objects; and what a resize loses of them.

    With another world size ranks cannot be matched, and shards are of one tensor: there all take the first
    rank's.
    """
    mine = [item.name for item in record.items if not isinstance(item, ObjectItem)]
    whole = [name for item in mine for name in record.looked[item][0] if name in places]
    ranks = range(1, record.trainer.world_size)
    uneven = [name for name in whole if any(own_prefix(rank, name) in record.index.tensors for rank in ranks)]
    kept = [name for name in uneven if world.size == record.trainer.world_size and not is_sharded(places[name])]
    lost = sorted(set(uneven) - set(kept))
    own = {name: own_prefix(world.rank, name) for name in kept}
    notes = (f"{', '.join(lost[:4])}: differed by rank; all take the values of rank 0",) if lost else ()
    return {name: called for name, called in own.items() if called in record.index.tensors}, notes


def _look(item: str, structure: Json, allow_pickle: bool) -> Looked:
    """The names of the tensors in an item's values, and the values with nothing in the tensors' places."""
    names: list[str] = []

    def give(name: Json) -> torch.Tensor:
        names.append(str(name))
        return torch.empty(0)

    state = decode(structure, item=item, give_tensor=give, allow_pickle=allow_pickle)
    return tuple(names), cast("State", state)


def _give(plan: _Plan, accept: Collection[str], allow_pickle: Collection[str]) -> None:
    values = plan.values()
    for item in plan.items:
        is_allowed = item.name in allow_pickle
        state = unflatten(plan.structures[item.name], values, item=item.name, allow_pickle=is_allowed)
        item.give(plan.fresh.settle(item, cast("State", state)))
        require_kept_ties(item, values, plan.names[item.name], accept)


def _structures(
    source: CheckpointSource, trainer: TrainerState, items: Sequence[Item], world: World, accept: Collection[str]
) -> tuple[dict[str, Json], list[tuple[str, str]], list[str]]:
    """Each item's values for this rank, after every difference was accepted or refused; and the accepted ones."""
    here = {item.name: item for item in items}
    differences, notes = _item_differences(trainer, here)
    if trainer.values.get(RNG) == NO_RNG:
        differences.append((RNG, "is not in the checkpoint; random numbers start from the seeds of this script"))
    found: dict[str, Json] = {name: value for name, value in trainer.values.items() if name in here or name == RNG}
    if trainer.per_rank:
        lender = world.rank % trainer.world_size
        mine = read_rank_values(source.store, source.name, source.manifest, lender)
        found |= {name: value for name, value in mine.items() if name in here or name == RNG}
        if world.size != trainer.world_size:
            if not _draws_in_lanes(items):
                lenders = f"each rank takes the RNG states of rank number modulo {trainer.world_size}"
                notes.append(f"world {trainer.world_size} -> {world.size}: {lenders}")
            differences += [
                (name, f"its state differs by rank, and {trainer.world_size} ranks became {world.size}")
                for name in trainer.per_rank
                if name in here
            ]
    lost = [name for name in here if name in trainer.kinds and name not in found]
    if lost or RNG not in found:
        complaint = f"it has no values for {', '.join(lost) or RNG}"
        raise ManifestDamaged(path=source.store.path(source.name), complaint=complaint)
    refused = tuple((name, what) for name, what in differences if name not in accept)
    if refused:
        raise NotExact(differences=refused)
    return found, differences, notes


@runtime_checkable
class Laned(Protocol):
    """An object that seeds the RNG of each lane and sums in lane order, as ``unbroken.exact.Reducer`` does."""

    @property
    def is_exact_on_any_world(self) -> bool:
        """Whether its steps have the same bits on any number of ranks."""


def _draws_in_lanes(items: Sequence[Item]) -> bool:
    """Whether no bit depends on a rank's own RNG states, so that another number of ranks is exact all the same."""
    objects = [item.stateful for item in items if isinstance(item, ObjectItem)]
    return any(isinstance(value, Laned) and value.is_exact_on_any_world is True for value in objects)


def _item_differences(trainer: TrainerState, here: Mapping[str, Item]) -> tuple[list[tuple[str, str]], list[str]]:
    differences: list[tuple[str, str]] = []
    notes: list[str] = []
    for name, item in here.items():
        if name in trainer.kinds or is_optional(item):
            continue
        if _is_live_scaler(item):
            # A run that turns mixed precision on begins with a fresh scale; there is nothing it could have lost.
            notes.append(f"{name}: not in the checkpoint, starts fresh")
        else:
            differences.append((name, "is not in the checkpoint and would start fresh"))
    differences += [
        (name, "is in the checkpoint and was not passed to the run") for name in trainer.kinds if name not in here
    ]
    return differences, notes


def _is_live_scaler(item: Item) -> bool:
    return (
        isinstance(item, ObjectItem) and isinstance(item.stateful, torch.amp.GradScaler) and item.stateful.is_enabled()
    )


def _fill(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        for local in local_tensors(tensor):
            if local.numel() and local.is_contiguous() and not local.is_conj() and not local.is_neg():
                local.detach().reshape(-1).view(torch.uint8).fill_(_SENTINEL)


def _verify_live(source: CheckpointSource, plan: _Plan, world: World) -> None:
    """Compare the live tensors with the fingerprints of the manifest."""
    live: dict[str, torch.Tensor] = {name: plan.places[name] for name in plan.names[RNG]}
    for item in plan.items:
        if isinstance(item, ObjectItem):
            # An object may keep its state in another form than in its state_dict: what it was given is checked.
            live |= {name: plan.places[name] for name in plan.names[item.name]}
        else:
            taken = flatten(item.name, item.take(), allow_pickle=True).tensors
            live |= {plan.own_names.get(name, name): tensor for name, tensor in taken.items()}
    own = {name for name in live if name.startswith("ranks.")}
    found = fingerprints(live, world, own=own)
    saved = source.manifest.tensors
    wrong = {name for name, value in found.items() if name not in saved or saved[name].digest != value}
    # What an object dropped on the way has no live tensor to compare.
    every = {name for names in plan.names.values() for name in names}
    wrong |= {name for name in every if name not in found and plan.own_names.get(name) not in found}
    everybody = world.all_gather(tuple(wrong - plan.fresh.names))
    named = tuple(sorted({name for names in everybody for name in names}))
    if named:
        world.from_first(lambda: _require_as_stored(source, plan.index, named))
        raise NotRestored(checkpoint=str(source.store.path(source.name)), names=named)


def _require_as_stored(source: CheckpointSource, index: Index, names: Collection[str]) -> None:
    """Pass if the stored bytes of these tensors have the fingerprints of the manifest, so that the load is at fault.

    Raises:
        DamagedCheckpoint: they have not: the checkpoint contradicts itself.
    """
    alone, wrong = World(0, 1), []
    for name in names:
        if name not in index.tensors:
            continue
        entry = index.tensors[name]
        # One at a time, read again: the live tensors are what a load made of them.
        stored = {name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")}
        read(source.store, source.name, source.manifest, index, stored, alone)
        described = source.manifest.tensors.get(name)
        if described is None or fingerprints(stored, alone)[name] != described.digest:
            wrong.append(f"{name}: its bytes contradict the fingerprint taken when it was saved")
    if wrong:
        raise DamagedCheckpoint(path=source.store.path(source.name), findings=tuple(wrong))
