"""Reads a checkpoint of Lightning: the progress of its loop, and its tensors.

Lightning writes one dict. Its progress tells whether a resume from there is exact. Between two batches and between two
epochs it is. After the last batch of an epoch, or before a validation that is due, it is not: a resumed Lightning
leaves out the validation and the end of the epoch.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from unbroken.state.items import Item, ObjectItem, OptimizerItem, Stateful
from unbroken.store.digest import BlockDigester
from unbroken.store.manifest import Tensor

# In Lightning's dict: what unbroken adds.
OURS: Final = "unbroken"
# Paths, times and our own states may differ between two runs that are the same.
_NOT_COMPARED: Final = (OURS, "callbacks", "hyper_parameters", "epoch", "global_step", "pytorch-lightning_version")


@dataclass(frozen=True)
class Progress:
    """Where a loop stands: ``batches`` of the current epoch are done, and ``is_inside`` it.

    ``is_settled``: the hooks of the last batch are over, and with them a validation that was due.
    """

    batches: int
    is_inside: bool
    is_last_batch: bool
    is_settled: bool


def progress_of(checkpoint: Mapping[str, Any]) -> Progress:
    """Read the progress of the fit loop."""
    loop = checkpoint["loops"]["fit_loop"]
    epoch, batch = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
    return Progress(
        batches=batch["current"]["processed"],
        is_inside=epoch["started"] > epoch["processed"],
        is_last_batch=bool(batch["is_last_batch"]),
        is_settled=batch["total"]["completed"] == batch["total"]["processed"],
    )


def progress_now(fit_loop: Any) -> Progress:  # noqa: ANN401 - of one package or the other
    """The progress of a fit loop as a checkpoint would have it now."""
    epoch, batch = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress
    return Progress(
        batches=batch.current.processed,
        is_inside=epoch.started > epoch.processed,
        is_last_batch=bool(batch.is_last_batch),
        is_settled=batch.total.completed == batch.total.processed,
    )


def script_items(optimizers: Sequence[Any], schedules: Sequence[Any], module: torch.nn.Module) -> list[Item]:
    """The optimizers and schedules, whose values a script chooses."""
    found: list[Item] = []
    for kind, objects in (("optimizer", optimizers), ("scheduler", schedules)):
        for number, each in enumerate(objects):
            name = kind if len(objects) == 1 else f"{kind}_{number}"
            if isinstance(each, torch.optim.Optimizer):
                found.append(OptimizerItem(name, each, module))
            elif isinstance(each, Stateful) and kind == "scheduler":
                found.append(ObjectItem(name, each))
    return found


def described(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Type, shape and digest of all tensors and numbers of a checkpoint, by which two of them are compared."""
    found = {}
    for key, value in checkpoint.items():
        if key not in _NOT_COMPARED:
            for name, leaf in _leaves(str(key), value):
                found[name] = _described(leaf)
    return found


def _leaves(at: str, value: object) -> Iterator[tuple[str, torch.Tensor | float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{at}.{key}", inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for place, inner in enumerate(value):
            yield from _leaves(f"{at}.{place}", inner)
    elif isinstance(value, torch.Tensor | int | float):
        yield at, value


def _described(leaf: torch.Tensor | float) -> Tensor:
    digester = BlockDigester()
    if not isinstance(leaf, torch.Tensor):
        digester.update(memoryview(struct.pack("<d", float(leaf))))
        return Tensor("number", (), digester.finish().whole)
    plain = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
    data = plain.cpu().contiguous().reshape(-1).view(torch.uint8)
    digester.update(memoryview(data.numpy().data))
    return Tensor(str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), digester.finish().whole)


def size_of(checkpoint: Mapping[str, Any]) -> int:
    """About the bytes of its file."""
    tensors = (leaf for _, leaf in _leaves("", checkpoint) if isinstance(leaf, torch.Tensor))
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors)
