"""Names of parameters and buffers as the model's author wrote them, whatever is wrapped around or inside it.

DDP, FSDP and ``torch.compile`` put a segment of their own into every name below them. A segment is dropped because of
the *type* of the module it belongs to, never because of its spelling: a layer that its author called ``module`` keeps
its name.
"""

from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unbroken.torch_private import COMPILED_CLASS, COMPILED_INNER, FSDP1_INNER

# The attribute under which each kind of wrapper keeps the module it wraps. torch.compile's class has no public name,
# so it is known by its attribute and its name.
_INNER: Final = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (FullyShardedDataParallel, FSDP1_INNER),
)


def inner_attribute(module: nn.Module) -> str | None:
    """The attribute in which a wrapper keeps what it wraps; None for every other module."""
    for kind, attribute in _INNER:
        if isinstance(module, kind):
            return attribute
    # A user's own module may have an attribute of this name, but only torch.compile's class forwards to it as well.
    # fully_shard makes a subclass of whatever it is given, with a name of its own.
    is_compiled = COMPILED_INNER in module._modules and any(c.__name__ == COMPILED_CLASS for c in type(module).__mro__)
    return COMPILED_INNER if is_compiled else None


def unwrapped(module: nn.Module) -> nn.Module:
    """The innermost module, without the wrappers around it."""
    while (attribute := inner_attribute(module)) is not None:
        module = module._modules[attribute]  # type: ignore[assignment]
    return module


def clean(module: nn.Module, raw: str) -> str:
    """One name of ``module.state_dict()`` or ``named_parameters()`` without the wrappers' segments."""
    here: nn.Module | None = module
    kept: list[str] = []
    for segment in raw.split("."):
        if here is None:
            kept.append(segment)
            continue
        # Some wrappers already hide their segment in the names they give: go through them without one.
        while (attribute := inner_attribute(here)) is not None and attribute != segment:
            here = here._modules[attribute]
            assert here is not None
        if inner_attribute(here) != segment:
            kept.append(segment)
        here = here._modules.get(segment)
    return ".".join(kept)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether any name below a module has a wrapper's segment; most models have none, and thousands of names."""
    return any(inner_attribute(each) is not None for each in module.modules())


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Clean names of all parameters by identity; a tied one has the first of its names."""
    names: dict[int, str] = {}
    is_wrapped = _is_wrapped(module)
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), clean(module, raw) if is_wrapped else raw)
    return names


def changes_buckets(module: nn.Module) -> bool:
    """Whether DDP will sum the gradients of its first step in other buckets than those of later steps.

    With more than two ranks the order of a sum depends on a gradient's place in its bucket, and with it the last bit.
    """
    replicas = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
    return any(each.static_graph or not each.find_unused_parameters for each in replicas)


def is_flat_sharded(module: nn.Module) -> bool:
    """Whether any part is sharded by the older FSDP, whose parameters are flattened and need its own state dicts."""
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


def state_names(module: nn.Module, state: Iterable[str] | None = None) -> dict[str, str]:
    """Raw name to clean name, for all that ``module.state_dict()`` holds, or that ``state``, which is one, does.

    Raises:
        ValueError: two raw names become the same, so that one would overwrite the other.
    """
    raw_names = module.state_dict() if state is None else state
    if not _is_wrapped(module):
        return {raw: raw for raw in raw_names}
    names = {raw: clean(module, raw) for raw in raw_names}
    if len(set(names.values())) != len(names):
        doubled = sorted(name for name in set(names.values()) if list(names.values()).count(name) > 1)
        raise ValueError(f"each of these names would mean two tensors: {', '.join(doubled[:4])}")
    return names
