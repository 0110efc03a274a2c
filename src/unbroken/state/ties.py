"""Tensors that an optimizer or an object has under two names: one tensor when saved, one tensor after a load.

A checkpoint holds such a tensor once, under both names, so that both have the same chunks. An optimizer is given one
tensor for both; so is an object, but its ``load_state_dict`` may make copies. That is looked at after the load.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from unbroken.errors import NotExact
from unbroken.state.cursor import Cursor
from unbroken.state.flatten import flatten
from unbroken.state.index import Index
from unbroken.state.items import Item, ModuleItem, ObjectItem, OptimizerItem
from unbroken.state.naming import is_flat_sharded
from unbroken.state.pieces import local_tensors


def with_ties(
    values: Mapping[str, torch.Tensor],
    items: Sequence[Item],
    names: Mapping[str, Sequence[str]],
    own_names: Mapping[str, str],
    index: Index,
) -> dict[str, torch.Tensor]:
    """The values, by the names that the structures use, with one tensor for all names of one.

    An optimizer may hold the very tensor of a model, too. Modules are as they are: they are loaded in place.
    """
    tied = dict(values)
    models: dict[object, str] = {}
    for item in items:
        if isinstance(item, OptimizerItem) and is_flat_sharded(item.module):
            # Taken apart and put together by the older FSDP itself.
            continue
        own: dict[object, str] = {}
        for name in names[item.name]:
            entry = index.tensors.get(own_names.get(name, name))
            if entry is None or not entry.elements:
                continue
            key = (entry.dtype, entry.shape, entry.chunks)
            if isinstance(item, ModuleItem):
                models.setdefault(key, name)
                continue
            first = own.setdefault(key, models.get(key, name) if isinstance(item, OptimizerItem) else name)
            tied[name] = values[first]
    return tied


def require_kept_ties(
    item: Item, given: Mapping[str, torch.Tensor], names: Sequence[str], accept: Collection[str]
) -> None:
    """Pass if an object has one tensor now wherever it was given one.

    Raises:
        NotExact: its ``load_state_dict`` has made several of it, and that was not accepted.
    """
    if not isinstance(item, ObjectItem) or isinstance(item.stateful, Cursor) or item.name in accept:
        return
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(id(given[name]), []).append(name)
    if all(len(group) == 1 for group in groups.values()):
        return
    live = flatten(item.name, item.take(), allow_pickle=True).tensors
    for group in groups.values():
        if len({_memory(live[name]) for name in group if name in live}) > 1:
            what = (
                f"{', '.join(group)} were one tensor when saved, and load_state_dict made several of it; let it keep "
                "the tensors it is given, or copy into one of its own"
            )
            raise NotExact(differences=((item.name, what),))


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple((each.data_ptr(), tuple(each.shape), each.stride()) for each in local_tensors(tensor))
