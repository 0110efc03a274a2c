"""What an accelerator holds: the objects that its checkpoints are made of, and what the bits depend on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]

from unbroken.errors import WeightsOnly
from unbroken.frameworks.loader_pass import batch_count
from unbroken.state.items import Item, ObjectItem, OptimizerItem, Stateful
from unbroken.state.wrappers import real, real_loader

# Their engines make the updates and save by themselves.
_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass(frozen=True)
class Held:
    """What an accelerator saves: what was prepared with it, and what was registered."""

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    loaders: list[Any]
    registered: list[Any]

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Held":
        """As it is now. Accelerate names these lists in its documentation, and has no other way to ask."""
        return cls(
            list(accelerator._models),
            list(accelerator._optimizers),
            list(accelerator._schedulers),
            list(accelerator._dataloaders),
            list(accelerator._custom_objects),
        )

    def counts(self) -> list[int]:
        """How many there are of each kind."""
        return [len(each) for each in vars(self).values()]


def require_usable(accelerator: Accelerator, held: Held) -> None:
    """Raise unless the accelerator can be saved and restored.

    Raises:
        ValueError: nothing was prepared, or an engine of its own saves.
    """
    if not held.models or not held.optimizers:
        raise ValueError("attach comes after accelerator.prepare(model, optimizer, ...): nothing is prepared yet")
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise ValueError(f"attach does not work with {kind.value}: its engine makes the updates and saves by itself")
    if kind == DistributedType.FSDP:
        # Accelerate runs it on GPUs alone, where no test has shown that a resume is exact.
        raise ValueError(
            "attach does not work with FSDP: shard the model with torch's fully_shard, and use unbroken.Run or "
            "unbroken.frameworks.dcp"
        )


def require_complete(path: Path) -> None:
    """Raise unless a folder has what ``load_state`` needs to continue exactly.

    Raises:
        WeightsOnly: it has not, as what ``save_model`` writes.
    """
    names = [each.name for each in path.iterdir()]
    wanted = {
        "optimizer.bin": any(name.startswith(("optimizer", "pytorch_optimizer")) for name in names),
        "random_states_0.pkl": "random_states_0.pkl" in names,
    }
    missing = tuple(name for name, is_there in wanted.items() if not is_there)
    if missing:
        raise WeightsOnly(path=path, missing=missing)


def fixed_of(accelerator: Accelerator, held: Held) -> dict[str, Any]:
    """What the bits depend on, and Accelerate takes without a word or fails on half-way."""
    return {
        "num_processes": accelerator.num_processes,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "mixed_precision": str(accelerator.mixed_precision),
        "split_batches": accelerator.split_batches,
        "dispatch_batches": accelerator.dispatch_batches,
        "even_batches": accelerator.even_batches,
        "use_seedable_sampler": accelerator.use_seedable_sampler,
        "use_stateful_dataloader": accelerator.use_stateful_dataloader,
        "prepared_models": len(held.models),
        "prepared_optimizers": _types(held.optimizers),
        "prepared_schedulers": _types(held.schedulers),
        "registered_objects": _types(held.registered),
        "batch_sizes": [_batch_size_of(each) for each in held.loaders],
        "dataset_lengths": [_length_of(each) for each in held.loaders],
    }


def items_of(accelerator: Accelerator, held: Held) -> list[Item]:
    """The optimizers, schedulers and the loss scaler, whose values a script chooses."""
    found: list[Item] = []
    for kind, objects in (
        ("optimizer", held.optimizers),
        ("scheduler", held.schedulers),
        ("scaler", _scalers(accelerator)),
    ):
        for number, each in enumerate(map(real, objects)):
            name = kind if len(objects) == 1 else f"{kind}_{number}"
            if isinstance(each, torch.optim.Optimizer):
                found.append(OptimizerItem(name, each, torch.nn.ModuleList(held.models)))
            elif isinstance(each, Stateful):
                found.append(ObjectItem(name, each))
    return found


def _scalers(accelerator: Accelerator) -> list[Any]:
    return [] if accelerator.scaler is None else [accelerator.scaler]


def _types(objects: list[Any]) -> list[str]:
    return [type(real(each)).__name__ for each in objects]


def _batch_size_of(loader: object) -> int | None:
    inner: Any = real_loader(loader)
    sampler = getattr(inner, "batch_sampler", None)
    for each in (getattr(sampler, "batch_sampler", None), sampler, inner):
        if isinstance(size := getattr(each, "batch_size", None), int):
            return size
    return None


def _length_of(loader: object) -> int | None:
    return batch_count(getattr(real_loader(loader), "dataset", None))


def size_of(models: list[Any]) -> int:
    """About the bytes of a first save: the weights, and twice as much for an optimizer."""
    return 3 * sum(int(value.numel()) * int(value.element_size()) for model in models for value in model.parameters())
