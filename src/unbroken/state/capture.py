"""The state of a run at one step: live tensors by name, and everything else as JSON.

What all ranks agree on is stored once; what differs by rank (generators, a loader's position) is stored for each. The
ranks find out by comparing digests, so nobody has to say which is which.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # FSDP1's own type; it has no public name
from torch.distributed.tensor import DTensor

from unbroken.state.cursor import Cursor
from unbroken.state.encode import Json
from unbroken.state.fingerprint import fingerprints
from unbroken.state.items import Item, ObjectItem, State
from unbroken.state.stage import as_bits
from unbroken.state.tree import Split, split
from unbroken.store.digest import digest_bytes
from unbroken.world import World

GENERATORS = "generators"


@dataclass(frozen=True)
class Captured:
    """One rank's view: ``shared`` is the same on every rank, ``ranked`` is this rank's own.

    ``tensors`` are live. Those in ``own`` exist on this rank only; all others exist, whole or as shards, on every rank.
    """

    tensors: Mapping[str, torch.Tensor]
    own: frozenset[str]
    shared: Mapping[str, Json]
    ranked: Mapping[str, Json]


def own_prefix(rank: int, item: str) -> str:
    """The name under which the tensors of one rank's own item stand."""
    return f"ranks.{rank}.{item}"


def capture(items: Sequence[Item], generators: State, world: World, *, allow_pickle: Collection[str] = ()) -> Captured:
    """Take the state of every item. Collective.

    Raises:
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
    """
    # On all ranks or on none: a value of one rank alone may need pickle, and the others would wait for its digests.
    states, splits = world.all_or_none(lambda: _taken(items, allow_pickle))
    differing = _differing({item.name: _digest(item, splits[item.name]) for item in items}, world)
    uneven = _differing_copies(items, splits, world)
    drawn = split(own_prefix(world.rank, GENERATORS), generators, allow_pickle=False)
    tensors: dict[str, torch.Tensor] = dict(drawn.tensors)
    own: set[str] = set(drawn.tensors)
    shared: dict[str, Json] = {}
    ranked: dict[str, Json] = {GENERATORS: drawn.skeleton}
    for item in items:
        name = item.name
        if name not in differing:
            shared[name] = splits[name].skeleton
            tensors.update(splits[name].tensors)
            continue
        mine = splits[name]
        if isinstance(item, ObjectItem):
            mine = split(name, states[name], allow_pickle=name in allow_pickle, called=_own_unless_sharded(world.rank))
            own |= {each for each, tensor in mine.tensors.items() if not is_sharded(tensor)}
        ranked[name] = mine.skeleton
        tensors.update(mine.tensors)
    for name in uneven if not world.is_first else ():
        # The first rank's stands under the plain name, where every tool looks for it.
        own_name = own_prefix(world.rank, name)
        tensors[own_name] = tensors.pop(name)
        own.add(own_name)
    return Captured(tensors, frozenset(own), shared, ranked)


def _taken(items: Sequence[Item], allow_pickle: Collection[str]) -> tuple[dict[str, State], dict[str, Split]]:
    states = {item.name: item.take() for item in items}
    return states, {name: split(name, state, allow_pickle=name in allow_pickle) for name, state in states.items()}


def require_savable(items: Sequence[Item], allow_pickle: Collection[str]) -> None:
    """Pass if the values of every object can be stored as they are now.

    Raises:
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
    """
    for item in items:
        # Asking a loader where it stands may start it, and it has not been told where to start yet.
        if isinstance(item, ObjectItem) and not isinstance(item.thing, Cursor):
            split(item.name, item.take(), allow_pickle=item.name in allow_pickle)


def _digest(item: Item, found: Split) -> str:
    said = json.dumps(found.skeleton, sort_keys=True).encode()
    pieces = [digest_bytes(said)]
    if isinstance(item, ObjectItem):
        # A module's and an optimizer's tensors are sharded or replicated by design; an object's may differ by rank.
        whole = {name: tensor for name, tensor in found.tensors.items() if not is_sharded(tensor)}
        pieces += [digest_bytes(_bytes_of(whole[name])) for name in sorted(whole)]
    return digest_bytes(b"".join(pieces)).hex()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = as_bits(tensor.detach().cpu()).contiguous().reshape(-1)
    return memoryview(cast("bytes", flat.view(torch.uint8).numpy()))


def _own_unless_sharded(rank: int) -> Callable[[str, torch.Tensor], str]:
    """Names for an object that differs by rank: what its ranks hold together keeps one name."""
    return lambda path, tensor: path if is_sharded(tensor) else own_prefix(rank, path)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is this rank's view of one that all ranks hold together."""
    return isinstance(tensor, DTensor | ShardedTensor)


def _differing(digests: Mapping[str, str], world: World) -> set[str]:
    everybody = world.all_gather(dict(digests))
    return {name for name in digests if len({said.get(name) for said in everybody}) > 1}


def _differing_copies(items: Sequence[Item], splits: Mapping[str, Split], world: World) -> list[str]:
    """The tensors of modules and optimizers that every rank holds whole, and not all alike.

    Running statistics follow the batches that a rank saw; parameters that nobody keeps equal drift apart. To store one
    copy for all would lose the others, and which one is stored would be chance.
    """
    if world.size == 1:
        return []
    copies: dict[str, torch.Tensor] = {}
    for item in items:
        if not isinstance(item, ObjectItem):
            copies |= {name: each for name, each in splits[item.name].tensors.items() if not is_sharded(each)}
    prints = _local_prints(copies)
    said = digest_bytes(json.dumps(prints, sort_keys=True).encode())
    if len(set(world.all_gather(said))) == 1:
        return []
    return sorted(_differing(prints, world))


def _local_prints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A digest of every tensor as this rank has it, by whatever is fastest where it is."""
    on_device = {name: tensor for name, tensor in tensors.items() if not tensor.is_cpu}
    found = fingerprints(on_device, World(0, 1)) if on_device else {}
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            found[name] = digest_bytes(_bytes_of(tensor)).hex()
    return found
