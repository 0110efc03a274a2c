"""Where two checkpoints differ, from their manifests alone: by tensor where both name tensors, else by part."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from unbroken.store.manifest import Manifest, Part, Tensor
from unbroken.store.names import SEALED

T = TypeVar("T")
_GRADIENTS: Final = re.compile(r"(ranks\.\d+\.)?gradients(\.|$)")


@dataclass(frozen=True)
class CheckpointDifference:
    """What is the same, what differs and how, and what only one of the two has.

    ``unit`` is what was compared: ``tensor``, ``part``, or ``item`` where it was tensors and the parts without any.
    ``ignored`` are the gradients that only one contains: see ``is_gradient_of_one``.
    """

    unit: str
    same: int
    differ: tuple[tuple[str, str], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.differ or self.only_first or self.only_second)


def compare(first: Manifest, second: Manifest) -> CheckpointDifference:
    """Compare two manifests; the order of writing, the clock and the job do not count.

    A sealed folder's tensors are those of its safetensors files; its other files are compared as the parts they are.
    """
    if not (first.tensors and second.tensors):
        return _compare("part", _parts(first), _parts(second), _part_change)
    found = _compare("tensor", first.tensors, second.tensors, _tensor_change)
    if SEALED not in (first.kind, second.kind):
        return _without_gradients_of_one(found)
    rest = _compare("part", _untold_parts(first), _untold_parts(second), _part_change)
    return CheckpointDifference(
        "item",
        found.same + rest.same,
        found.differ + rest.differ,
        found.only_first + rest.only_first,
        found.only_second + rest.only_second,
    )


def is_gradients(name: str) -> bool:
    """Whether a name is that of a gradient, or of all of them."""
    return _GRADIENTS.match(name) is not None


def is_gradient_of_one(name: str, a: Collection[str], b: Collection[str]) -> bool:
    """Whether only one of two checkpoints contains a gradient: no difference of what was trained.

    In the first steps of a job saves contain the gradients that stand, as long as it is not known whether the next step
    uses them; later ones do not, though the state is the same.
    """
    return is_gradients(name) and not (name in a and name in b)


def _without_gradients_of_one(found: CheckpointDifference) -> CheckpointDifference:
    alone = found.only_first, found.only_second
    ignored = tuple(sorted(name for name in (*alone[0], *alone[1]) if is_gradient_of_one(name, *alone)))
    kept = [tuple(name for name in names if name not in ignored) for names in alone]
    return replace(found, only_first=kept[0], only_second=kept[1], ignored=ignored)


def _parts(manifest: Manifest) -> dict[str, Part]:
    return {part.name: part for part in manifest.parts}


def _untold_parts(manifest: Manifest) -> dict[str, Part]:
    return {name: part for name, part in _parts(manifest).items() if not name.endswith(".safetensors")}


def _compare(
    unit: str, first: Mapping[str, T], second: Mapping[str, T], change: Callable[[T, T], str | None]
) -> CheckpointDifference:
    shared = sorted(first.keys() & second.keys())
    differ = tuple((name, how) for name in shared if (how := change(first[name], second[name])))
    return CheckpointDifference(
        unit,
        len(shared) - len(differ),
        differ,
        tuple(sorted(first.keys() - second.keys())),
        tuple(sorted(second.keys() - first.keys())),
    )


def _tensor_change(first: Tensor, second: Tensor) -> str | None:
    if first.shape != second.shape:
        return f"shape {'x'.join(map(str, first.shape))} and {'x'.join(map(str, second.shape))}"
    if first.dtype != second.dtype:
        return f"type {first.dtype} and {second.dtype}"
    return None if first.digest == second.digest else "other bytes"


def _part_change(first: Part, second: Part) -> str | None:
    if first.size_bytes != second.size_bytes:
        return f"{first.size_bytes:,} and {second.size_bytes:,} bytes"
    if first.digest.whole == second.digest.whole:
        return None
    pairs = zip(first.digest.blocks, second.digest.blocks, strict=False)
    changed = sum(a != b for a, b in pairs)
    return f"{changed} of {len(first.digest.blocks)} blocks differ"
