"""What a framework wraps around an object that a script made: the real object inside, recognised without an import.

Accelerate's ``prepare`` and Fabric's ``setup`` return objects that imitate what they wrap and keep the state of the
inner one. A run saves the inner one, so that a checkpoint is the same with and without the framework. A class is known
by its module and name, so that neither framework has to be installed.
"""

from collections.abc import Iterator
from typing import Final

from torch import nn

from unbroken.state.naming import inner_attribute

_FABRIC: Final = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
# Module and name of a wrapper's class, and the attribute that holds what it wraps.
_INNER: Final = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
    **{(module, "_FabricOptimizer"): "_optimizer" for module in _FABRIC},
    **{(module, "_FabricModule"): "_forward_module" for module in _FABRIC},
}
_LOADERS: Final = {
    ("accelerate.data_loader", "DataLoaderAdapter"): "base_dataloader",
    **{(module, "_FabricDataLoader"): "_dataloader" for module in _FABRIC},
}


def real(thing: object) -> object:
    """The object that a framework's wrapper holds; any other object is itself."""
    while True:
        attribute = _attribute(thing, _INNER)
        if attribute is not None:
            thing = getattr(thing, attribute)
        elif isinstance(thing, nn.Module) and _holds_wrapper(thing):
            # torch.compile around Fabric's module: the compiled code is not state.
            thing = thing._modules[str(inner_attribute(thing))]
        else:
            return thing


def _holds_wrapper(module: nn.Module) -> bool:
    attribute = inner_attribute(module)
    return attribute is not None and _attribute(module._modules[attribute], _INNER) is not None


def real_loader(loader: object) -> object:
    """The loader inside Accelerate's or Fabric's; any other is itself."""
    for inner in layers_of(loader):
        loader = inner
    return loader


def layers_of(loader: object) -> Iterator[object]:
    """A loader, and what it wraps, from the outside in."""
    yield loader
    while (attribute := _attribute(loader, _LOADERS)) is not None:
        loader = getattr(loader, attribute)
        yield loader


def is_wrapped_loader(loader: object) -> bool:
    """Whether a framework's wrapper is around a loader."""
    return _attribute(loader, _LOADERS) is not None


def is_foreign_engine(thing: object) -> bool:
    """Whether DeepSpeed keeps the state: in shards of its own, which only its own checkpoints hold."""
    return any(each.__module__.partition(".")[0] == "deepspeed" for each in type(thing).__mro__)


def _attribute(thing: object, known: "dict[tuple[str, str], str]") -> str | None:
    # type(), not isinstance(): the wrappers say that they are instances of what they wrap.
    for each in type(thing).__mro__:
        if (attribute := known.get((each.__module__, each.__name__))) is not None:
            return attribute
    return None
