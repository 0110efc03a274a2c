"""The state of a run at one step: live tensors by name, and everything else as JSON.

What all ranks agree on is stored once; what differs by rank (generators, a loader's position) is stored for each. The
ranks find out by comparing digests, so the user does not have to say which is which.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from unbroken.errors import NotAnItem, UnbrokenError
from unbroken.state.cursor import Cursor
from unbroken.state.encode import Json
from unbroken.state.fingerprint import fingerprints
from unbroken.state.flatten import Flat, flatten
from unbroken.state.host_copy import as_bits
from unbroken.state.host_memory import asking_for_memory
from unbroken.state.items import GradientsItem, Item, ModuleItem, ObjectItem, OptimizerItem, State, present
from unbroken.state.naming import is_flat_sharded
from unbroken.state.pieces import require_supported
from unbroken.store.digest import digest_bytes
from unbroken.torch_private import ShardedTensor
from unbroken.world import World

RNG: Final = "rng_state"
# Names go into fingerprints: under another one, an RNG state that an earlier version saved would compare as different.
RNG_TENSORS: Final = "generators"
# The encoded RNG state of a checkpoint that has none: an imported one.
NO_RNG: Final[Json] = {"dict": []}


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
    """The prefix of the tensor names of one rank's own item."""
    return f"ranks.{rank}.{item}"


def capture(
    items: Sequence[Item],
    generators: Callable[[], State],
    world: World,
    *,
    allow_pickle: Collection[str] = (),
    shares_rng: bool = False,
) -> Captured:
    """Take the state of every item, and the RNG states after them. Collective.

    ``shares_rng`` says that all ranks have the same RNG states, so that one is stored.

    Raises:
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
        TensorUnsupported: a tensor is of a kind that a checkpoint cannot hold.
        NoMemory: host memory ran out.
    """
    # On all ranks or on none: a value of one rank alone may need pickle, and the others would wait for its digests.
    called = RNG_TENSORS if shares_rng else own_prefix(world.rank, RNG_TENSORS)
    taken = world.all_or_none(lambda: take_alone(items, generators, called, world, allow_pickle))
    differing = _compare(taken.digests, world)
    uneven = sorted(_compare(taken.copies, world))
    tensors: dict[str, torch.Tensor] = dict(taken.drawn.tensors)
    own: set[str] = set() if shares_rng else set(taken.drawn.tensors)
    shared: dict[str, Json] = {RNG: taken.drawn.structure} if shares_rng else {}
    ranked: dict[str, Json] = {} if shares_rng else {RNG: taken.drawn.structure}
    for item in items:
        name, mine = item.name, taken.flat[item.name]
        if name not in differing:
            shared[name] = mine.structure
            tensors.update(mine.tensors)
            continue
        if isinstance(item, ObjectItem):
            is_allowed = name in allow_pickle
            mine = flatten(name, taken.states[name], allow_pickle=is_allowed, called=own_unless_sharded(world.rank))
            own |= {each for each, tensor in mine.tensors.items() if not is_sharded(tensor)}
        ranked[name] = mine.structure
        tensors.update(mine.tensors)
    for name in uneven if not world.is_first else ():
        # The first rank's has the plain name, where every tool looks for it.
        own_name = own_prefix(world.rank, name)
        tensors[own_name] = tensors.pop(name)
        own.add(own_name)
    return Captured(tensors, frozenset(own), shared, ranked)


@dataclass(frozen=True)
class LocalState:
    """One rank's state without the others: each item's, flattened; digests to compare; and the RNG states."""

    states: Mapping[str, State]
    flat: Mapping[str, Flat]
    digests: Mapping[str, str]
    copies: Mapping[str, str]
    drawn: Flat


def take_alone(
    items: Sequence[Item], generators: Callable[[], State], called: str, world: World, allow_pickle: Collection[str]
) -> LocalState:
    """Take the state of every item as this rank has it, without the other ranks, unless a model is of the older FSDP.

    Raises:
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
        TensorUnsupported: a tensor is of a kind that a checkpoint cannot hold.
        NoMemory: host memory ran out.
    """
    # All states before anything can raise: the older FSDP communicates with the other ranks in state_dict().
    states = {item.name: item.take() for item in items}
    # After them: an object may draw random numbers in state_dict(), and a resume continues after that draw.
    drawn = flatten(called, generators(), allow_pickle=False)
    flat = {name: flatten(name, state, allow_pickle=name in allow_pickle) for name, state in states.items()}
    _require_supported(flat.values())
    with asking_for_memory():
        # There is nobody to compare with otherwise.
        digests = {item.name: _digest(item, flat[item.name]) for item in items} if world.size > 1 else {}
        copies = _local_prints(_copies(items, flat)) if world.size > 1 else {}
    return LocalState(states, flat, digests, copies, drawn)


def _require_supported(flat: Iterable[Flat]) -> None:
    for found in flat:
        for name, tensor in found.tensors.items():
            require_supported(name, tensor)


def require_savable(items: Sequence[Item], allow_pickle: Collection[str]) -> None:
    """Pass if the values of every object, and the tensors of objects and modules, can be stored as they are now.

    Raises:
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
        TensorUnsupported: a tensor is of a kind that a checkpoint cannot hold.
        NotAnItem: an object cannot say its state.
    """
    for item in present(items):
        # state_dict() of a loader may start it, before its position is restored; that of the older FSDP needs the other
        # ranks, one of which may raise here.
        is_checked_later = isinstance(item.stateful, Cursor) if isinstance(item, ObjectItem) else _is_whole_later(item)
        if not is_checked_later:
            _require_supported([flatten(item.name, _state_of(item), allow_pickle=item.name in allow_pickle)])


def _state_of(item: Item) -> State:
    try:
        return item.take()
    except UnbrokenError:
        raise
    except Exception as wrong:
        held = item.stateful if isinstance(item, ObjectItem) else item
        lacks = f"a state_dict() that works: {type(wrong).__name__}: {wrong}"
        raise NotAnItem(name=item.name, type_name=type(held).__name__, lacks=lacks) from wrong


def _is_whole_later(item: ModuleItem | OptimizerItem | GradientsItem) -> bool:
    """Whether an item may hold other tensors when it is saved than now: an optimizer's, lazy ones, or not made yet."""
    if not isinstance(item, ModuleItem) or is_flat_sharded(item.module):
        return True
    held = (*item.module.parameters(), *item.module.buffers())
    return any(is_lazy(tensor) or tensor.is_meta for tensor in held)


def _digest(item: Item, found: Flat) -> str:
    said = json.dumps(found.structure, sort_keys=True).encode()
    pieces = [digest_bytes(said)]
    if isinstance(item, ObjectItem):
        # A module's and an optimizer's tensors are sharded or replicated by design; an object's may differ by rank.
        whole = {name: tensor for name, tensor in found.tensors.items() if not is_sharded(tensor)}
        pieces += [digest_bytes(_bytes_of(whole[name])) for name in sorted(whole)]
    return digest_bytes(b"".join(pieces)).hex()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = as_bits(tensor.detach().cpu()).contiguous().reshape(-1)
    return memoryview(cast("bytes", flat.view(torch.uint8).numpy()))


def own_unless_sharded(rank: int) -> Callable[[str, torch.Tensor], str]:
    """Names for an object that differs by rank: what its ranks hold together keeps one name."""
    return lambda path, tensor: path if is_sharded(tensor) else own_prefix(rank, path)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is this rank's view of one that all ranks hold together."""
    return isinstance(tensor, DTensor | ShardedTensor)


def _compare(digests: Mapping[str, str], world: World) -> set[str]:
    """The names of which not all ranks have the same digest. Collective.

    Ten thousand tensors may differ by rank, as running statistics do: what a rank sends does not grow with the ranks.
    """
    names = sorted(digests)
    values = [digests[name] for name in names]
    are_named_otherwise, are_otherwise = world.differing([_short(names), _short([names, values])])
    if not are_otherwise:
        return set()
    if are_named_otherwise:
        return differing_names(digests, world.all_gather(digests))
    return {name for name, differs in zip(names, world.differing([*map(_short, values)]), strict=True) if differs}


def _short(value: object) -> bytes:
    return digest_bytes(json.dumps(value).encode())[:16]


def differing_names(digests: Mapping[str, str], everybody: Sequence[Mapping[str, str]]) -> set[str]:
    """The names of which not all ranks have the same."""
    return {name for name in digests if len({said.get(name) for said in everybody}) > 1}


def _copies(items: Sequence[Item], flat: Mapping[str, Flat]) -> dict[str, torch.Tensor]:
    """The tensors of modules and optimizers that every rank holds whole, to see whether all hold them alike.

    Running statistics follow the batches that a rank saw; parameters that are not kept equal drift apart. To store one
    copy for all would lose the others, and which one is stored would be random.
    """
    copies: dict[str, torch.Tensor] = {}
    for item in items:
        if not isinstance(item, ObjectItem):
            copies |= {name: each for name, each in flat[item.name].tensors.items() if not is_sharded(each)}
    return copies


def _local_prints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A digest of every tensor as this rank has it, by whatever is fastest where it is."""
    on_device = {name: tensor for name, tensor in tensors.items() if not tensor.is_cpu}
    found = fingerprints(on_device, World(0, 1)) if on_device else {}
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            found[name] = digest_bytes(_bytes_of(tensor)).hex()
    return found
