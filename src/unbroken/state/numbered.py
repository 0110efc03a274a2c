"""An imported optimizer whose parameters are numbered, as torch numbers them, under the live optimizer's names.

Group by group and in order, the k-th number is the k-th parameter of the live optimizer. Moments are compared with
their parameters by shape, so that another order or another grouping is an error and not a mixture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from unbroken.errors import StateDiffers
from unbroken.state.encode import Json, decode
from unbroken.state.flatten import flatten
from unbroken.state.index import Index
from unbroken.state.items import Item, OptimizerItem, State

# The kind of such an item in a checkpoint.
NUMBERED: Final = "numbered-optimizer"


@dataclass(frozen=True)
class NamedOptimizers:
    """Values and index of a checkpoint with live names; ``stored`` has the stored name of each renamed tensor."""

    structures: Mapping[str, Json]
    kinds: Mapping[str, str]
    index: Index
    stored: Mapping[str, str]


def name_parameters(
    checkpoint: str, items: Sequence[Item], kinds: Mapping[str, str], structures: Mapping[str, Json], index: Index
) -> NamedOptimizers:
    """A checkpoint's values and index in which numbered optimizers have the names of the live ones' parameters.

    Raises:
        StateDiffers: the groups or the shapes are not those of the live optimizer.
    """
    numbered = [item for item in items if isinstance(item, OptimizerItem) and kinds.get(item.name) == NUMBERED]
    named = dict(structures)
    stored: dict[str, str] = {}
    changed: list[str] = []
    for item in numbered:
        placeholders: dict[int, tuple[str, torch.Tensor]] = {}
        state = _decoded(item.name, structures[item.name], placeholders)
        groups, parameters = item.groups(), item.parameters()
        counts = [len(group["params"]) for group in state["param_groups"]], [len(group) for group in groups]
        if counts[0] != counts[1]:
            said = (" and ".join(map(str, each)) or "no" for each in counts)
            changed.append("{}: groups of {} parameters in the checkpoint, {} here".format(item.name, *said))
            continue
        flat = flatten(item.name, _renamed(state, groups), allow_pickle=False)
        found = {name: placeholders[id(tensor)][0] for name, tensor in flat.tensors.items()}
        changed += _other_shapes(item, found, {name: tuple(each.shape) for name, each in parameters.items()}, index)
        named[item.name], stored = flat.structure, {**stored, **found}
    if changed:
        raise StateDiffers(checkpoint=checkpoint, changed=tuple(changed))
    aliases = {name: index.tensors[old] for name, old in stored.items()}
    known = {**kinds, **{item.name: item.kind for item in numbered}}
    return NamedOptimizers(named, known, Index({**index.tensors, **aliases}) if aliases else index, stored)


def _decoded(item: str, structure: Json, placeholders: dict[int, tuple[str, torch.Tensor]]) -> State:
    def give(name: Json) -> torch.Tensor:
        stands_for = torch.empty(0)
        placeholders[id(stands_for)] = str(name), stands_for
        return stands_for

    return cast("State", decode(structure, item=item, give_tensor=give, allow_pickle=False))


def _renamed(state: State, groups: Sequence[Sequence[str]]) -> State:
    numbers: list[Any] = [number for group in state["param_groups"] for number in group["params"]]
    names = dict(zip(numbers, (name for group in groups for name in group), strict=True))
    moments = {names.get(number, number): kept for number, kept in state["state"].items()}
    pairs = zip(state["param_groups"], groups, strict=True)
    return {"state": moments, "param_groups": [{**group, "params": list(live)} for group, live in pairs]}


def _other_shapes(
    item: OptimizerItem, stored: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], index: Index
) -> list[str]:
    """Moments that cannot be those of their parameter: another order, or another model."""
    found = []
    for name, old in stored.items():
        parameter, _, key = name.removeprefix(f"{item.name}.state.").rpartition(".")
        shape = tuple(index.tensors[old].shape)
        if shape and parameter in shapes and len(shape) == len(shapes[parameter]) and shape != shapes[parameter]:
            found.append(f"{name}: shape {shape} in the checkpoint ({key} of {old}), {shapes[parameter]} here")
    return found
